"""Rendering of conversations by the checkpoint's chat template, in separate processes."""

from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from tandem.core.clock import Clock
from tandem.core.errors import ConfigError, DeadlineError, PeerLostError
from tandem.server.text.bounded_process import BoundedProcesses

__all__ = ["ChatTemplate"]

_WORKER = Path(__file__).with_name("template_worker.py")


class ChatTemplate:
    """The chat template of one checkpoint, and its template for conversations with tools, if that
    is another.

    Args:
        source: jinja2 text, which is not trusted.
        tool_source: text of the template for conversations with tools; None: the same.
        variables: variables of every rendering beside its own arguments, such as the special
            tokens.
        timeout_s: time limit of a rendering, seconds.
        max_chars: largest length of a rendered text.
    """

    def __init__(
        self,
        source: str,
        variables: dict[str, str],
        *,
        tool_source: str | None = None,
        timeout_s: float = 5.0,
        max_chars: int = 2**25,
        clock: Clock | None = None,
    ) -> None:
        self.source = source
        """Text of the chat template (Jinja)."""
        self.tool_source = source if tool_source is None else tool_source
        """Text of the template that renders conversations with tools."""
        self._variables = variables
        self._timeout_s = timeout_s
        self._max_chars = max_chars
        first = msgspec.msgpack.encode([self.source, self.tool_source])
        self._processes = BoundedProcesses(_WORKER, first, "chat_template.render", clock)

    def start(self) -> None:
        """Start a process, so that the first conversation does not wait for it.

        Raises:
            ConfigError: the template does not compile.
            PeerLostError: the process does not answer.
        """
        try:
            is_ok, text = self._processes.start()
        except (DeadlineError, PeerLostError) as error:
            raise _loss(error.what) from error
        if not is_ok:
            raise _refusal(f"it does not compile: {text}")

    def render(self, messages: list[dict[str, Any]], arguments: dict[str, Any]) -> str:
        """Return the prompt of a conversation. Blocks; thread-safe.

        Args:
            messages: dictionaries with at least "role" and "content".
            arguments: further template variables, such as ``add_generation_prompt``.

        Raises:
            ConfigError: the template refuses the conversation, fails, or exceeds its bounds of
                memory and output; field "messages".
            PeerLostError: the process did not answer in time, or ended; another try may do better.
        """
        variables: dict[str, Any] = {"messages": messages, "tools": None, "documents": None}
        variables |= self._variables | arguments
        # The process has no environment, so it does not know the time zone.
        now = datetime.now().astimezone()
        try:
            # Arguments are passed on as JSON, the form they came in: msgpack cannot carry integers
            # of more than 64 bits.
            message = msgspec.json.encode(
                (bool(variables["tools"]), variables, self._max_chars, now, now.tzname())
            )
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                "chat_template.render",
                f"the template's arguments cannot be passed on: {error}",
                field="chat_template_kwargs",
            ) from error
        try:
            is_ok, text = self._processes.run(message, self._timeout_s)
        except (DeadlineError, PeerLostError) as error:
            raise _loss(error.what) from error
        if not is_ok:
            raise _refusal(text)
        return text

    def close(self) -> None:
        """End the processes; a later ``render`` starts another."""
        self._processes.close()


def _loss(text: str) -> PeerLostError:
    return PeerLostError(
        "chat_template.render",
        f"the chat template: {text}: try again, with a shorter conversation if this comes again",
    )


def _refusal(text: str) -> ConfigError:
    return ConfigError(
        "chat_template.render", f"the chat template failed: {text}", field="messages"
    )
