"""Boards in a Grafana, through its HTTP API: what is there, and putting ours there."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from exporters.errors import InvalidInputError, NotFoundError, SourceUnreachableError

Json = dict[str, Any]

#: What Grafana counts itself: no difference between two boards.
_COUNTED: Final = ("id", "version")


class Outcome(StrEnum):
    """What became of a board that was pushed."""

    CREATED = "created"
    UPDATED = "updated"
    UNCHANGED = "unchanged"
    REFUSED = "refused"
    """It is there with another content, and may not be overwritten."""


@dataclass(frozen=True, slots=True)
class Pushed:
    """A board that was pushed; ``url`` is its path in Grafana, empty when it was refused."""

    uid: str
    outcome: Outcome
    url: str = ""


class Grafana:
    """One Grafana.

    Args:
        url: Its address, with a sub-path if it has one.
        token: Of a service account that may write dashboards and folders.
        timeout: Seconds for each request.

    Raises:
        InvalidInputError: ``url`` is no http(s) address.
    """

    def __init__(self, url: str, token: str, timeout: float = 30.0) -> None:
        from grafana_client.api import GrafanaApi

        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidInputError(f"{url!r} is no address of a Grafana", cure="give one such as https://grafana:3000")
        # The client joins a sub-path and "api" as they are.
        path = f"{parts.path.rstrip('/')}/" if parts.path.strip("/") else ""
        self.url = urlunsplit((parts.scheme, parts.netloc, path.rstrip("/"), "", ""))
        self._api = GrafanaApi.from_url(urlunsplit((parts.scheme, parts.netloc, path, "", "")), token, timeout)

    def board(self, uid: str) -> Json | None:
        """Return the board ``uid`` as Grafana has it; None when it has none.

        Raises:
            InvalidInputError: Grafana refuses the token or the request.
            SourceUnreachableError: Grafana does not answer.
        """
        with self._errors():
            try:
                found: Json = self._api.dashboard.get_dashboard(uid)["dashboard"]
            except self._client_error() as error:
                if error.status_code != 404:
                    raise
                return None
        return found

    def push(self, boards: Mapping[str, Json], folder: str, *, overwrite: bool, message: str = "") -> Iterator[Pushed]:
        """Put ``boards`` into the folder with this title, which is made when it is missing; yield what became of each.

        A board that is there with another content is only replaced with ``overwrite``: somebody may have edited it.

        Raises:
            InvalidInputError: Grafana refuses the token or the request, or several folders have this title.
            SourceUnreachableError: Grafana does not answer.
        """
        place = self._folder(folder)
        for uid, board in boards.items():
            there = self.board(uid)
            if there is not None and same(there, board):
                yield Pushed(uid, Outcome.UNCHANGED, f"/d/{uid}")
                continue
            if there is not None and not overwrite:
                yield Pushed(uid, Outcome.REFUSED)
                continue
            content = copy.deepcopy(board) | {"id": None}
            request = {"dashboard": content, "folderUid": place, "message": message, "overwrite": overwrite}
            with self._errors():
                answer = self._api.dashboard.update_dashboard(request)
            yield Pushed(uid, Outcome.UPDATED if there is not None else Outcome.CREATED, answer.get("url", f"/d/{uid}"))

    def _folder(self, title: str) -> str:
        with self._errors():
            found = [folder for folder in self._api.folder.get_all_folders() if folder["title"] == title]
            if len(found) > 1:
                raise InvalidInputError(f"{len(found)} folders are called {title!r}", cure="rename all but one")
            uid: str = found[0]["uid"] if found else self._api.folder.create_folder(title)["uid"]
        return uid

    @staticmethod
    def _client_error() -> type[Any]:
        from grafana_client.client import GrafanaClientError

        error: type[Any] = GrafanaClientError
        return error

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        from grafana_client.client import GrafanaException, GrafanaServerError, GrafanaTimeoutError
        from niquests.exceptions import RequestException

        try:
            yield
        except (GrafanaTimeoutError, RequestException) as error:
            raise SourceUnreachableError(
                f"Grafana at {self.url} does not answer: {error}", cure="check the address and the network"
            ) from None
        except GrafanaServerError as error:
            raise SourceUnreachableError(f"Grafana at {self.url}: {error}", cure="see Grafana's log") from None
        except GrafanaException as error:
            if error.status_code in (401, 403):
                raise InvalidInputError(
                    f"Grafana at {self.url} refuses the token ({error.status_code})",
                    cure="use a service account token that may write dashboards and folders",
                ) from None
            if error.status_code == 404:
                raise NotFoundError(f"{self.url} has no Grafana API", cure="check the address and its path") from None
            raise InvalidInputError(f"Grafana at {self.url}: {error}", cure="see the message") from None


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two boards differ only in what Grafana counts itself."""
    return comparable(one) == comparable(other)


def comparable(board: Mapping[str, Any]) -> Json:
    """Return ``board`` without what Grafana counts itself."""
    return {name: value for name, value in board.items() if name not in _COUNTED}
