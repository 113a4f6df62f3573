"""The ``tandem`` command line: the list of commands, and how an error ends one."""

import importlib
import os
import sys
from collections.abc import Iterator, MutableMapping
from typing import Any

import typer
import typer.core

from tandem.cli.extras import describe_missing
from tandem.cli.interrupts import STATUS, end_interrupted, handle_interrupts
from tandem.core.errors import TandemError
from tandem.core.logs import LogLevel, configure_logging

__all__ = ["app", "main"]

COMMANDS = {
    "serve": "tandem.cli.commands.serve:serve",
    "chat": "tandem.cli.asking.chat:chat",
    "generate": "tandem.cli.asking.generate:generate",
    "pull": "tandem.cli.commands.pull:pull",
    "plan": "tandem.cli.commands.plan:plan",
    "verify": "tandem.cli.commands.verify:verify",
    "convert": "tandem.cli.commands.convert:convert",
    "finetune": "tandem.cli.commands.finetune:finetune",
    "eval": "tandem.cli.commands.evaluate:evaluate",
    "export": "tandem.cli.commands.export:export",
    "cluster": "tandem.cli.clusters.app:app",
    "explain": "tandem.cli.commands.explain:explain",
    "doctor": "tandem.cli.commands.doctor:doctor",
    "bench": "tandem.cli.commands.bench:app",
    "sim": "tandem.cli.simulating.app:app",
    "version": "tandem.cli.commands.version:version",
    "config": "tandem.cli.commands.config_show:app",
    "store": "tandem.cli.commands.store:app",
}
"""Name to ``module:function``, or to the application of a group; imported when it is asked for."""

UsageError: Any = typer.BadParameter.__mro__[1]
"""Of the parser below typer, which has been click and a copy of it."""


class _Loaded(MutableMapping[str, Any]):
    """The commands by name, each made when it is looked up."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            module, _, attribute = COMMANDS[name].partition(":")
            found = getattr(importlib.import_module(module), attribute)
            if not isinstance(found, typer.Typer):
                single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
                single.command(name)(found)
                found = single
            self._made[name] = typer.main.get_command(found)
            self._made[name].name = name
        return self._made[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._made[name] = command

    def __delitem__(self, name: str) -> None:
        del self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class _Commands(typer.core.TyperGroup):
    """A group that imports a command when it is called, or shown in a list."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = _Loaded()


app = typer.Typer(
    name="tandem",
    cls=_Commands,
    help="Serve and fine-tune large language models on whatever hardware there is.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        # Flags take underscores too: settings have them in files and in the environment.
        "token_normalize_func": lambda token: token.replace("_", "-"),
    },
)


@app.callback()
def _root() -> None:
    """Typer makes a group of an application with a callback."""


def main() -> None:
    """Run a command; an error that a user can cause is one line on standard error and status 1."""
    configure_logging("tandem", LogLevel.WARNING)
    try:
        with handle_interrupts():
            status = app(prog_name="tandem", standalone_mode=False)
        # Typer takes the interrupt for an end with this status.
        if status == STATUS:
            end_interrupted()
        if status:
            sys.exit(status)
    except UsageError as error:
        _show_usage_error(error)
        sys.exit(2)
    except BrokenPipeError:
        # The reader, such as `head`, has what it wanted. Python would fail to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except ModuleNotFoundError as error:
        what = describe_missing(error)
        if what is None:
            raise
        sys.stderr.write(f"tandem: {what}\n")
        sys.exit(1)
    except (TandemError, OSError, UnicodeError) as error:
        line = f"tandem: {error}{_name_flag(error)}\n"
        sys.stderr.write(line.encode(errors="backslashreplace").decode())
        sys.exit(1)
    except KeyboardInterrupt:
        end_interrupted()


def _name_flag(error: Exception) -> str:
    """Return the flag of the setting at fault, where the message names it otherwise."""
    field = error.field if isinstance(error, TandemError) else None
    if field is None or "." not in field:
        return ""
    from tandem.cli.config import find_flag

    flag = find_flag(field)
    return "" if flag is None or flag in str(error) else f" ({flag})"


def _show_usage_error(error: Any) -> None:
    """Write the line about words that the parser does not take, or the help if there are none."""
    context = error.ctx
    if type(error).__name__ == "NoArgsIsHelpError":
        sys.stdout.write(error.format_message() + "\n")
        return
    path = "tandem" if context is None else context.command_path
    what = " ".join(error.format_message().split())
    sys.stderr.write(f"tandem: {what.rstrip('.')}: see `{path} --help`\n")


if __name__ == "__main__":
    main()
