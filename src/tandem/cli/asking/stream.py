"""Reading a streamed answer, and its rates."""

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from tandem.core.errors import ConfigError, InternalError, PeerLostError

if TYPE_CHECKING:
    import httpx

__all__ = ["StreamEvent", "StreamResult", "stream_events"]


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _PromptDetails | None = None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


_USAGE = {"include_usage": True, "continuous_usage_stats": True}
"""Counts in each event: an answer that is stopped has none of its end."""


class StreamEvent(msgspec.Struct):
    """The fields of a stream's event that the command reads; they are the same for chat completions
    and completions of any server with OpenAI's API.
    """

    choices: list[_Choice]
    usage: _Usage | None = None


class _ErrorEvent(msgspec.Struct):
    error: Any = None


class StreamResult(msgspec.Struct, kw_only=True):
    """One streamed answer as the client saw it."""

    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token_s: float | None = None
    """Time to the first token, seconds; None before it."""
    total_s: float = 0.0

    def take(self, event: StreamEvent, elapsed_s: float) -> str:
        """Record the usage, time and finish reason in one event; return the text that it adds."""
        if event.usage is not None:
            self.prompt_tokens = event.usage.prompt_tokens
            self.completion_tokens = event.usage.completion_tokens
            details = event.usage.prompt_tokens_details
            self.cached_tokens = 0 if details is None else details.cached_tokens or 0
        added = ""
        for choice in event.choices:
            self.finish_reason = choice.finish_reason or self.finish_reason
            delta = None if choice.delta is None else choice.delta.content
            added += choice.text or delta or ""
        if added and self.first_token_s is None:
            self.first_token_s = elapsed_s
        self.text += added
        return added

    def print_rates(self) -> None:
        """Print a line of rates to standard error, dim on a terminal."""
        prompt_s = self.first_token_s if self.first_token_s is not None else self.total_s
        eval_s = max(self.total_s - prompt_s, 0.0)
        num_eval = max(self.completion_tokens - 1, 0)
        cached = f" ({self.cached_tokens} cached)" if self.cached_tokens else ""
        line = (
            f"prompt {self.prompt_tokens} tokens{cached} in {prompt_s:.2f} s, "
            f"{_rate(self.prompt_tokens, prompt_s)}; answer {self.completion_tokens} tokens in "
            f"{eval_s:.2f} s, {_rate(num_eval, eval_s)}"
        )
        is_dim = sys.stderr.isatty()
        sys.stderr.write(f"\x1b[2m{line}\x1b[0m\n" if is_dim else f"{line}\n")
        sys.stderr.flush()


def _rate(count: int, seconds: float) -> str:
    return f"{count / seconds:.1f} tokens/s" if seconds > 0 and count else "no rate"


def stream_events(client: "httpx.Client", path: str, body: dict[str, Any]) -> Iterator[StreamEvent]:
    """Yield the events of a streamed request, usage included.

    Raises: InternalError (the server refuses or breaks off; with its message); PeerLostError (no
        answer); ConfigError (a number that JSON cannot represent).
    """
    import httpx

    body = {**body, "stream": True, "stream_options": _USAGE}
    try:
        content = json.dumps(body, allow_nan=False)
    except ValueError as error:
        what = f"a request cannot hold nan or inf: {error}"
        raise ConfigError("cli.stream", what) from error
    headers = {"Content-Type": "application/json"}
    try:
        with client.stream("POST", path, content=content, headers=headers) as response:
            if response.status_code != 200:
                raise InternalError(
                    "cli.stream", f"{response.status_code}: {_message(response.read())}"
                )
            for line in response.iter_lines():
                if not line.startswith("data: "):
                    continue
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    return
                yield _decode(data.encode())
    except httpx.HTTPError as error:
        what = f"no answer from {client.base_url}: {error}: does a server run there?"
        raise PeerLostError("cli.stream", what) from error
    raise InternalError("cli.stream", "the stream broke off")


def _decode(data: bytes) -> StreamEvent:
    try:
        if msgspec.json.decode(data, type=_ErrorEvent).error is not None:
            raise InternalError("cli.stream", _message(data))
        return msgspec.json.decode(data, type=StreamEvent)
    except msgspec.DecodeError as error:
        what = f"an event is none of this API: {error}"
        raise InternalError("cli.stream", what) from error


def _message(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return body[:500].decode(errors="replace")
