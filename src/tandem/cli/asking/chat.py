"""``tandem chat``: a conversation in the terminal."""

import sys
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from tandem.cli.asking.chat_session import ChatSession
from tandem.cli.asking.local_server import (
    ADAPTER_NAME,
    MODEL_HELP,
    AdapterFlag,
    connect,
    list_adapter_flags,
    read_card,
)
from tandem.cli.asking.stream import StreamResult, stream_events
from tandem.cli.asking.terminal_input import make_reader
from tandem.cli.asking.wrapping import make_writer
from tandem.cli.interrupts import keep_interrupts
from tandem.core.errors import TandemError

if TYPE_CHECKING:
    import httpx

__all__ = ["chat"]


def chat(
    model: Annotated[str | None, typer.Argument(help=MODEL_HELP)] = None,
    url: Annotated[str | None, typer.Option(help="A running server, instead of our own.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Key for --url.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 512,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1, help="Nucleus.")] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="Likeliest tokens; 0 is all.")] = None,
    min_p: Annotated[
        float | None, typer.Option(min=0, max=1, help="Least share of the likeliest's probability.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Fixes the random stream.")] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Context length of our server.")
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Say this instead of asking; may be repeated.")
    ] = None,
    adapter: AdapterFlag = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON line per answer.")] = False,
) -> None:
    """Talk to a model; every answer is followed by its rates."""
    flags = [] if max_model_len is None else ["--max-model-len", str(max_model_len)]
    if adapter is not None:
        flags += list_adapter_flags(adapter, url)
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
    }
    session = ChatSession(options, system)
    # An error ends a script's call with an exit status; a person at a terminal reads the error and
    # can ask again.
    has_person = prompt is None and sys.stdin.isatty()
    with (
        connect(model, url, api_key, flags) as (client, name),
        keep_interrupts() if has_person else nullcontext(),
    ):
        asked = (name or None) if adapter is None else ADAPTER_NAME
        if prompt is not None:
            turns = iter(prompt)
        else:
            if not json:
                sys.stdout.write("/help lists the commands.\n")
            turns = iter(make_reader(), None)
        if not json:
            card = read_card(client, asked)
            session.defaults = card.default_sampling
            if card.note:
                sys.stderr.write(f"{card.note}\n")
        for text in turns:
            if prompt is None and text.startswith("/") and "\n" not in text:
                if not session.run_command(text):
                    break
                continue
            if not text:
                continue
            session.messages.append({"role": "user", "content": text})
            try:
                answer = _answer(
                    client, session.make_body(asked), echo=not json, is_kept=has_person
                )
            except TandemError as error:
                if not has_person:
                    raise
                sys.stderr.write(f"\n{error}\n")
                session.messages.pop()
                continue
            session.messages.append({"role": "assistant", "content": answer.text})
            if json:
                sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
                sys.stdout.flush()
            else:
                sys.stdout.write("\n")
                answer.print_rates()


def _answer(
    client: "httpx.Client", body: dict[str, Any], *, echo: bool, is_kept: bool
) -> StreamResult:
    """Stream one answer to the terminal. Ctrl-C ends the answer; if ``is_kept``, the conversation
    goes on.
    """
    begin_s = time.perf_counter()
    result = StreamResult()
    write = make_writer()
    try:
        for event in stream_events(client, "/v1/chat/completions", body):
            piece = result.take(event, time.perf_counter() - begin_s)
            if echo:
                write(piece)
    except KeyboardInterrupt:
        if not is_kept:
            raise
        sys.stderr.write("\nstopped")
    result.total_s = time.perf_counter() - begin_s
    return result
