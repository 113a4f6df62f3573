"""Reading a user's messages in ``tandem chat``: line editing, history and several lines.

prompt_toolkit owns the terminal. If standard input or output is not a terminal, messages are plain
lines, so that a script can pipe a conversation in.
"""

import sys
from collections.abc import Callable
from pathlib import Path

__all__ = ["make_reader"]

QUOTES = '"""'
"""Mark around a message of several lines."""
HISTORY_FILE = Path("~/.cache/tandem/chat_history")


def make_reader() -> Callable[[], str | None]:
    """Return a function that reads one message; it returns None when the input has ended.

    A line that ends in a backslash continues on the next one; lines between two of triple quotes
    are one message. On a terminal, Alt-Enter also starts
    a new line, the arrow keys edit and recall earlier messages, and Ctrl-C clears the line.
    """
    if sys.stdin.isatty() and sys.stdout.isatty():
        return _make_terminal_reader()
    return lambda: _read_lines(_read_plain)


def _read_plain(label: str) -> str:
    # The prompt's label goes to standard error: standard output holds answers alone, which a
    # program may read (as JSON with --json).
    if sys.stdin.isatty():
        sys.stderr.write(label)
        sys.stderr.flush()
    return input()


def _make_terminal_reader() -> Callable[[], str | None]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    file = _open_history()
    history = InMemoryHistory() if file is None else FileHistory(str(file))
    session: PromptSession[str] = PromptSession(history=history, key_bindings=keys)

    def ask(label: str) -> str:
        while True:
            try:
                return session.prompt(label)
            except KeyboardInterrupt:
                continue  # As in a shell, Ctrl-C drops the line and the conversation continues.

    return lambda: _read_lines(ask)


def _open_history() -> Path | None:
    """Return the history file, readable by its owner only; None if it cannot be made."""
    try:
        file = HISTORY_FILE.expanduser()
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.touch(mode=0o600)
    except (OSError, RuntimeError):  # RuntimeError: the home folder is unknown.
        return None
    return file


def _read_lines(ask: Callable[[str], str]) -> str | None:
    lines: list[str] = []
    try:
        line = ask("Chat: ")
        if line.strip().startswith(QUOTES):
            return _read_quoted(ask, line.strip().removeprefix(QUOTES))
        while line.endswith("\\"):
            lines.append(line[:-1])
            line = ask("... ")
        return "\n".join([*lines, line]).strip()
    except EOFError:
        return None


def _read_quoted(ask: Callable[[str], str], line: str) -> str:
    lines: list[str] = []
    while not line.rstrip().endswith(QUOTES):
        lines.append(line)
        line = ask("... ")
    return "\n".join([*lines, line.rstrip().removesuffix(QUOTES)]).strip("\n")
