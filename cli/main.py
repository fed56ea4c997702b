"""The ``rca`` command: finds the sub-command, and turns every expected failure into one line and an exit code.

A sub-command's module is imported when it is called (or listed), so that on call ``rca explain`` pays for nothing else.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from cli.output import note, report_error, silence_stdout
from rca.errors import ExitCode, PrioscopeError

#: Sub-commands in the order of ``rca --help``: name, and ``module:attribute`` of a function or a typer app.
COMMANDS: Final = {
    "explain": "cli.explain:explain",
    "demo": "cli.demo:demo",
    "serve": "cli.serve:serve",
    "watch": "cli.watch:watch",
    "incidents": "cli.incidents:app",
    "incident": "cli.incident:app",
    "exporter": "cli.exporter:app",
    "dashboards": "cli.dashboards:app",
    "alerts": "cli.alerts:app",
    "verify": "cli.verify:verify",
    "train": "cli.train:train",
}


class LazyGroup(TyperGroup):
    """A group that imports a sub-command when somebody asks for it."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        # typer looks the names up here to suggest one for a misspelt command.
        self.commands: Any = dict.fromkeys(COMMANDS)

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        """Names of the sub-commands, without importing them."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        """Import and return the sub-command ``cmd_name``; None when there is none."""
        if cmd_name in COMMANDS and self.commands[cmd_name] is None:
            self.commands[cmd_name] = _load(cmd_name)
        return self.commands.get(cmd_name)


def _load(name: str) -> Any:
    module, _, attribute = COMMANDS[name].partition(":")
    target = getattr(importlib.import_module(module), attribute)
    if isinstance(target, typer.Typer):
        command: Any = typer.main.get_group(target)
    else:
        single = typer.Typer(add_completion=False, rich_markup_mode="rich")
        single.command(name, context_settings={"help_option_names": ["-h", "--help"]})(target)
        command = typer.main.get_command(single)
    command.name = name
    return command


app = typer.Typer(
    name="rca",
    cls=LazyGroup,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        typer.echo(f"prioscope {version('prioscope')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Find the root cause of an incident in a GPU cluster, and say how sure that is.

    Exit codes: 0 done or explained, 1 a check failed, 2 wrong usage or input, 3 not found, 4 inconclusive,
    5 a source did not answer.
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``rca`` and return its exit code (see `rca.errors.ExitCode`)."""
    try:
        app(args=None if arguments is None else list(arguments), prog_name="rca")
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except PrioscopeError as error:
        report_error(error)
        return int(error.exit_code)
    except BrokenPipeError:
        silence_stdout()
        return 0
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if error.filename is None:
            note(f"error: cannot write the output: {error.strerror}")
            note("cure: free some space, or write to another place")
            silence_stdout()
            return int(ExitCode.USAGE)
        note(f"error: {error.filename}: {error.strerror}")
        note("cure: check the path and its permissions")
        return int(ExitCode.USAGE)
    return int(ExitCode.OK)


if __name__ == "__main__":
    sys.exit(main())
