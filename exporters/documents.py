"""YAML documents that remember the line of every key and value, so that an error can name it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from exporters.errors import InvalidInputError

if TYPE_CHECKING:
    import yaml

#: Configuration is written by hand; anything larger is a mistake or an attack.
MAX_YAML_NODES: Final = 50_000


@dataclass(frozen=True, slots=True)
class Document:
    """One YAML document: plain data, and the line of each path of keys and indices in it; ``()`` is the document."""

    data: Any
    lines: Mapping[tuple[str | int, ...], int]

    def line(self, *path: str | int) -> int:
        """Line of the value or key at ``path``, or of the closest one around it."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines[path]


def read_documents(data: bytes | str, where: str) -> list[Document]:
    """Parse every document of a YAML stream with the safe loader; ``where`` names the file in errors.

    Raises:
        InvalidInputError: not YAML, a key twice or not text, a number that is not finite, or too large; names the line.
    """
    import yaml

    try:
        loader = yaml.SafeLoader(data)
        try:
            found = []
            while loader.check_node():
                lines: dict[tuple[str | int, ...], int] = {}
                budget = [MAX_YAML_NODES]
                found.append(Document(_construct(loader, loader.get_node(), (), lines, budget, where), lines))
            return found
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise InvalidInputError(f"{where}{line}: not valid YAML: {error.problem}", cure="fix the line") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidInputError(f"{where} is not valid YAML: {reason}", cure="save it as UTF-8 text") from None
    except RecursionError:
        raise InvalidInputError(f"{where} is nested too deeply", cure="is it the right file?") from None


def _construct(
    loader: yaml.SafeLoader,
    node: Any,
    path: tuple[str | int, ...],
    lines: dict[tuple[str | int, ...], int],
    budget: list[int],
    where: str,
) -> Any:
    import yaml

    line = node.start_mark.line + 1
    lines.setdefault(path, line)
    # Aliases make a small file expand without end, so nodes are counted as they are visited.
    budget[0] -= 1
    if budget[0] < 0 or len(path) > 50:
        raise InvalidInputError(f"{where}:{line}: the document is too large", cure="is it the right file?")
    if isinstance(node, yaml.MappingNode):
        loader.flatten_mapping(node)
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = loader.construct_object(key_node) if isinstance(key_node, yaml.ScalarNode) else None
            place = key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise InvalidInputError(f"{where}:{place}: a key is not text", cure="put it in quotes")
            if key in result:
                raise InvalidInputError(f"{where}:{place}: {key!r} is given twice", cure="remove one")
            lines[(*path, key)] = place
            result[key] = _construct(loader, value_node, (*path, key), lines, budget, where)
        return result
    if isinstance(node, yaml.SequenceNode):
        return [_construct(loader, item, (*path, index), lines, budget, where) for index, item in enumerate(node.value)]
    try:
        value = loader.construct_object(node)
    except ValueError as error:
        raise InvalidInputError(f"{where}:{line}: {node.value!r}: {error}", cure="put it in quotes") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidInputError(f"{where}:{line}: {node.value} is not a finite number", cure="leave the field out")
    return value
