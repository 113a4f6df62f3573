"""The commands, whose many flags are made once for all tests; a process makes those it needs."""

from collections.abc import Iterator
from typing import Any

import typer

from tandem.cli.main import app

ROOT: Any = typer.main.get_command(app)


def list_commands(group: Any = ROOT, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the words of every command and group, those of the root first."""
    yield path
    for name, command in getattr(group, "commands", {}).items():
        yield from list_commands(command, (*path, name))


def find_command(path: tuple[str, ...]) -> Any:
    """Return the command or group of these words."""
    command = ROOT
    for name in path:
        command = command.commands[name]
    return command


PATHS = list(list_commands())
COMMANDS = {
    path: find_command(path) for path in PATHS if not hasattr(find_command(path), "commands")
}
"""The commands that are no groups, by their words."""
