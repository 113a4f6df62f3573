"""``tandem sim record``: record a trace, without text, from a running server."""

import sys
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tandem.cli.asking.call import call_server
from tandem.cli.output import JsonFlag, print_json, print_next
from tandem.core.loads.traces import BLOCK_TOKENS, TraceRow

__all__ = ["record"]

ASK_EVERY_S = 1.0


class _Told(msgspec.Struct, kw_only=True):
    recording: str
    rows: list[TraceRow]
    num_lost: int


def record(
    output: Annotated[Path, typer.Argument(help="File of the trace, JSON lines.")],
    url: Annotated[str, typer.Option(help="The server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, typer.Option(help="Key of an admin.")] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0, help="Time to record; without, until Ctrl-C.")
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Requests after which to stop.")
    ] = None,
    block_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of one hash; 512 in published traces.")
    ] = BLOCK_TOKENS,
    json: JsonFlag = False,
) -> None:
    """Record the requests of a server as a trace: arrivals, lengths and hashes of prefixes.

    No text and no token leaves the server, and the hashes are numbers that mean nothing without a
    secret which it forgets. A request is recorded when it ends; those that were refused, and those
    that arrived before the recording began, are not.
    """

    def ask(action: str, recording: str = "") -> _Told:
        body = {"action": action, "recording": recording, "block_tokens": block_tokens}
        return call_server(url, "/traffic", _Told, body=body, api_key=api_key)

    name = ask("start").recording
    end_s = None if seconds is None else time.monotonic() + seconds
    rows: list[TraceRow] = []
    num_lost = 0
    try:
        while requests is None or len(rows) < requests:
            left_s = ASK_EVERY_S if end_s is None else end_s - time.monotonic()
            if left_s <= 0:
                break
            time.sleep(min(ASK_EVERY_S, left_s))
            rows += ask("read", name).rows
        told = ask("stop", name)
        rows += told.rows
        num_lost = told.num_lost
        if num_lost:
            sys.stderr.write(f"{num_lost} requests were lost: asked for too late\n")
    finally:
        write_rows(output, rows)
    if json:
        print_json({"file": str(output), "requests": len(rows), "lost": num_lost})
        return
    sys.stdout.write(f"{len(rows)} requests in {output}\n")
    if rows:
        print_next("tandem", "sim", "run", "SCENARIO", "--trace", output)


def write_rows(path: Path, rows: list[TraceRow]) -> None:
    """Write the requests of a trace in order of arrival, with times from the first arrival."""
    ordered = sorted(rows, key=lambda row: row.timestamp)
    begin = ordered[0].timestamp if ordered else 0.0
    with path.open("wb") as file:
        for row in ordered:
            at = round(row.timestamp - begin, 3)
            file.write(msgspec.json.encode(msgspec.structs.replace(row, timestamp=at)) + b"\n")
