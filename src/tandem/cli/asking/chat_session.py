"""State of a conversation in the terminal, and the commands that change it."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

from tandem.core.errors import ConfigError

__all__ = ["HELP", "ChatSession"]

HELP = """\
/set NAME VALUE    temperature, top_p, top_k, min_p, seed, max_tokens, system; no VALUE: unset
/set, /show        show what is set
/clear             forget the conversation
/save FILE         write the conversation; /load FILE reads it
/bye               end it (so do /exit and Ctrl-D)
/help              show this
A message between two lines of \"\"\" has several lines, as does a line that ends in \\.
In a terminal Alt-Enter starts a new line, the arrow keys edit and recall earlier turns, and Ctrl-C
stops an answer.
"""
NUMBERS = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "seed": int,
    "max_tokens": int,
}


class ChatSession:
    """A conversation, and the values that its requests have.

    Args:
        options: values of the requests by their fields; None: left to the server.
        system: system message; None: none.
    """

    def __init__(self, options: dict[str, Any], system: str | None) -> None:
        self.options = options
        self.defaults: dict[str, float] = {}
        """The server's values of fields that are not set."""
        self.messages: list[dict[str, str]] = []
        self._system = system
        self.clear()

    def clear(self) -> None:
        """Forget the conversation; the system message stays."""
        self.messages = []
        if self._system is not None:
            self.messages.append({"role": "system", "content": self._system})

    def make_body(self, model: str | None) -> dict[str, Any]:
        """Return the body of a request for the next answer."""
        body: dict[str, Any] = {"messages": self.messages, "model": model, **self.options}
        return {key: value for key, value in body.items() if value is not None}

    def run_command(self, line: str) -> bool:
        """Run a line that begins with a slash; return False if it ends the conversation."""
        try:
            name, *words = shlex.split(line)
        except ValueError as error:
            sys.stderr.write(f"{error}\n")
            return True
        if name in ("/exit", "/bye", "/quit"):
            return False
        try:
            if name == "/clear":
                self.clear()
            elif name in ("/help", "/?"):
                sys.stdout.write(HELP)
            elif name == "/show" or (words in ([], ["parameter"]) and name == "/set"):
                self._show()
            elif name == "/set":
                # Ollama's form has the word "parameter" before a name.
                del words[: words[0] == "parameter"]
                self._set(words[0], " ".join(words[1:]))
            elif name in ("/save", "/load") and len(words) == 1:
                path = Path(words[0]).expanduser()
                self._save(path) if name == "/save" else self._load(path)
            else:
                sys.stderr.write(f"no command {line}: /help lists them\n")
        except (ConfigError, OSError) as error:
            what = error.what if isinstance(error, ConfigError) else error
            sys.stderr.write(f"{what}\n")
        return True

    def _set(self, name: str, text: str) -> None:
        if name == "system":
            self._system = text or None
            rest = [each for each in self.messages if each["role"] != "system"]
            self.clear()
            self.messages += rest
            return
        kind = NUMBERS.get(name)
        if kind is None:
            known = ", ".join([*NUMBERS, "system"])
            raise ConfigError("cli.chat", f"nothing is called {name}: there are {known}")
        try:
            self.options[name] = kind(text) if text else None
        except ValueError as error:
            raise ConfigError("cli.chat", f"{name} {text}: give a number") from error

    def _show(self) -> None:
        for name in NUMBERS:
            value = self.options.get(name)
            if value is None:
                default = self.defaults.get(name)
                value = "not set" if default is None else f"{default:g} (the model's default)"
            sys.stdout.write(f"{name:<12} {value}\n")
        sys.stdout.write(f"{'system':<12} {self._system or 'none'}\n")

    def _save(self, path: Path) -> None:
        path.write_text(json.dumps(self.messages, ensure_ascii=False, indent=1) + "\n", "utf-8")
        sys.stderr.write(f"{len(self.messages)} messages in {path}\n")

    def _load(self, path: Path) -> None:
        try:
            found = json.loads(path.read_text("utf-8"))
            messages = [{"role": str(m["role"]), "content": str(m["content"])} for m in found]
        except (ValueError, TypeError, KeyError) as error:
            what = f"{path} holds no conversation: /save writes one"
            raise ConfigError("cli.chat", what) from error
        self.messages = messages
        systems = [each["content"] for each in messages if each["role"] == "system"]
        self._system = systems[0] if systems else None
        sys.stderr.write(f"{len(messages)} messages\n")
