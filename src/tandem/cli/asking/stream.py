"""Reading a streamed answer, and its rates."""

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec

from tandem.core.errors import InternalError

__all__ = ["StreamResult", "stream_events"]


class StreamResult(msgspec.Struct, kw_only=True):
    """One streamed answer as the client saw it."""

    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token_s: float | None = None
    """Time to first token."""
    total_s: float = 0.0

    def take(self, event: dict[str, Any], elapsed_s: float) -> None:
        """Note what one event says of usage, time and the end."""
        usage = event.get("usage")
        if usage:
            self.prompt_tokens = usage["prompt_tokens"]
            self.completion_tokens = usage["completion_tokens"]
            details = usage.get("prompt_tokens_details") or {}
            self.cached_tokens = details.get("cached_tokens") or 0
        for choice in event["choices"]:
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            has_text = choice.get("text") or (choice.get("delta") or {}).get("content")
            if has_text and self.first_token_s is None:
                self.first_token_s = elapsed_s

    def describe_rates(self) -> str:
        """Return the lines that follow an answer, in the words that llama.cpp made common."""
        prompt_s = self.first_token_s if self.first_token_s is not None else self.total_s
        eval_s = max(self.total_s - prompt_s, 0.0)
        num_eval = max(self.completion_tokens - 1, 0)
        return (
            f"prompt eval count:    {self.prompt_tokens} token(s), {self.cached_tokens} cached\n"
            f"prompt eval duration: {prompt_s:.3f} s\n"
            f"prompt eval rate:     {_rate(self.prompt_tokens, prompt_s)}\n"
            f"eval count:           {self.completion_tokens} token(s)\n"
            f"eval duration:        {eval_s:.3f} s\n"
            f"eval rate:            {_rate(num_eval, eval_s)}\n"
        )


def _rate(count: int, seconds: float) -> str:
    return f"{count / seconds:.2f} tokens/s" if seconds > 0 and count else "-"


def stream_events(
    client: httpx.Client, path: str, body: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield the events of a streamed request, usage included.

    Raises: InternalError with the server's message if it refuses or breaks off.
    """
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with client.stream("POST", path, json=body) as response:
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
            event = msgspec.json.decode(data)
            if "error" in event:
                raise InternalError("cli.stream", _message(data.encode()))
            yield event
    raise InternalError("cli.stream", "the stream broke off")


def _message(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return body[:500].decode(errors="replace")
