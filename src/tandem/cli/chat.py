"""``tandem chat``: a conversation in the terminal."""

import sys
import time
from typing import Annotated, Any

import httpx
import msgspec
import typer

from tandem.cli.local_server import connect
from tandem.cli.stream import StreamResult, stream_events
from tandem.core.errors import TandemError

__all__ = ["chat"]

HELP = "/clear forgets the conversation, /exit ends it; a line that ends in \\ continues.\n"


def chat(
    model: Annotated[str, typer.Argument(help="Folder, hub id or `demo`.")] = "demo",
    url: Annotated[str | None, typer.Option(help="A running server, instead of our own.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Key for --url.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 512,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    seed: Annotated[int | None, typer.Option(help="Fixes the random stream.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Context length of our server.")] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Say this instead of asking; may be repeated.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON line per answer.")] = False,
) -> None:
    """Talk to a model; every answer is followed by its prompt and eval rates."""
    flags = [] if max_model_len is None else ["--max-model-len", str(max_model_len)]
    options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    start: list[dict[str, str]] = []
    if system is not None:
        start.append({"role": "system", "content": system})
    messages = list(start)
    given = None if prompt is None else iter(prompt)
    with connect(model, url, api_key, flags) as client:
        if not json and given is None:
            sys.stdout.write(HELP)
        while (text := _read_turn(given)) is not None:
            if text == "/exit":
                break
            if text == "/clear":
                messages = list(start)
                continue
            if not text:
                continue
            messages.append({"role": "user", "content": text})
            answer = _answer(client, messages, options, echo=not json)
            if answer is None:
                messages.pop()
                continue
            messages.append({"role": "assistant", "content": answer.text})
            if json:
                sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
                sys.stdout.flush()
            else:
                sys.stdout.write("\n" + answer.describe_rates())


def _read_turn(given: Any) -> str | None:
    if given is not None:
        return next(given, None)
    lines: list[str] = []
    try:
        while True:
            line = input("Chat: " if not lines else "... ")
            if not line.endswith("\\"):
                return "\n".join([*lines, line]).strip()
            lines.append(line[:-1])
    except EOFError:
        return None


def _answer(
    client: httpx.Client, messages: list[dict[str, str]], options: dict[str, Any], *, echo: bool
) -> StreamResult | None:
    """Stream one answer; an error is printed and ends the turn, not the conversation."""
    body = {"messages": messages, **{k: v for k, v in options.items() if v is not None}}
    begin_s = time.perf_counter()
    result = StreamResult()
    try:
        for event in stream_events(client, "/v1/chat/completions", body):
            result.take(event, time.perf_counter() - begin_s)
            for choice in event["choices"]:
                piece = choice["delta"].get("content") or ""
                result.text += piece
                if echo:
                    sys.stdout.write(piece)
                    sys.stdout.flush()
    except (TandemError, httpx.HTTPError) as error:
        sys.stderr.write(f"\n{error}\n")
        return None
    except KeyboardInterrupt:
        sys.stderr.write("\nstopped\n")
    result.total_s = time.perf_counter() - begin_s
    return result
