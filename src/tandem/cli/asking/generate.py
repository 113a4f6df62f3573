"""``tandem generate``: continue a prompt once."""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.asking.local_server import (
    ADAPTER_NAME,
    MODEL_HELP,
    AdapterFlag,
    connect,
    list_adapter_flags,
)
from tandem.cli.asking.stream import StreamResult, stream_events
from tandem.cli.output import JsonFlag, print_json
from tandem.core.errors import ConfigError

__all__ = ["generate"]


def generate(
    model: Annotated[str | None, typer.Argument(help=MODEL_HELP)] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Text to continue.")] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Read the prompt from a file; - is stdin.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="A running server, instead of our own.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Key for --url.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 128,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1, help="Nucleus.")] = None,
    seed: Annotated[int | None, typer.Option(help="Fixes the random stream.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop at this text.")] = None,
    adapter: AdapterFlag = None,
    rates: Annotated[bool, typer.Option(help="Print rates to standard error.")] = True,
    json: JsonFlag = False,
) -> None:
    """Write how the model continues a prompt."""
    text = _read_prompt(prompt, file)
    body = {
        "prompt": text,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "stop": stop or None,
    }
    body = {key: value for key, value in body.items() if value is not None}
    flags = [] if adapter is None else list_adapter_flags(adapter, url)
    result = StreamResult()
    with connect(model, url, api_key, flags) as (client, name):
        if name or adapter is not None:
            body["model"] = name if adapter is None else ADAPTER_NAME
        begin_s = time.perf_counter()
        for event in stream_events(client, "/v1/completions", body):
            piece = result.take(event, time.perf_counter() - begin_s)
            if not json:
                sys.stdout.write(piece)
                sys.stdout.flush()
        result.total_s = time.perf_counter() - begin_s
    if json:
        print_json(result)
    else:
        sys.stdout.write("\n")
        if rates:
            result.print_rates()


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    if prompt is None and file is None and not sys.stdin.isatty():
        file = Path("-")
    if (prompt is None) == (file is None):
        what = "give the prompt by --prompt, by --file or on standard input"
        raise ConfigError("cli.generate", what, field="prompt")
    if prompt is not None:
        return prompt
    assert file is not None
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = f"cannot read {file}: {error}: give a text by --prompt or --file"
        raise ConfigError("cli.generate", what, field="file") from error
