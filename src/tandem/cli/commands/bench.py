"""``tandem bench NAME``: run a benchmark, in which Tandem and its rivals are interleaved."""

import contextlib
import importlib
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
import typer.core

from tandem.bench.harness import describe_run, format_record, run_cases
from tandem.cli.asking.bench_serve import serve
from tandem.core.errors import NotFoundError, UnsupportedError

__all__ = ["app", "bench", "exit_when_terminated"]

BENCHES = {
    "attention": "tandem.bench.operators.attention",
    "cluster": "tandem.bench.serving.cluster",
    "conductor": "tandem.bench.conductor",
    "deferral": "tandem.bench.serving.deferral",
    "engine": "tandem.bench.serving.engine",
    "experts": "tandem.bench.serving.experts",
    "families": "tandem.bench.serving.families",
    "finetune": "tandem.bench.finetune",
    "finetune-memory": "tandem.bench.finetune_memory",
    "gated-delta": "tandem.bench.operators.gated_delta",
    "hybrid": "tandem.bench.operators.hybrid",
    "linear": "tandem.bench.operators.linear",
    "load": "tandem.bench.serving.load",
    "model": "tandem.bench.serving.model",
    "moe": "tandem.bench.operators.moe",
    "nvme": "tandem.bench.operators.nvme",
    "plan": "tandem.bench.serving.planned",
    "sampling": "tandem.bench.operators.sampling",
    "sparse": "tandem.bench.operators.sparse",
    "store": "tandem.bench.store",
    "store-disk": "tandem.bench.store_disk",
    "transfer": "tandem.bench.transfer",
}
"""Module of each benchmark by name; each module has a function ``make_cases(quick=...)``."""
WITH_PEERS = ("load", "model", "moe", "store", "transfer")
"""Benchmarks whose ``make_cases`` also takes ``with_peers=...``."""
WITH_TRACE = ("conductor",)
"""Benchmarks whose ``make_cases`` also takes ``trace=...``."""

QUICK_BUDGET_S, QUICK_ROUNDS = 2.0, 5
FULL_BUDGET_S, FULL_ROUNDS = 60.0, 31


class _Benches(typer.core.TyperGroup):
    """A group of commands in which any word but ``serve`` is the name of a benchmark."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command for the first word; a benchmark's name stays in its arguments."""
        if args and args[0] == "serve":
            return super().resolve_command(ctx, args)
        return "run", self.commands["run"], args


app = typer.Typer(
    cls=_Benches,
    help=(
        "Run a benchmark, ours and its rivals interleaved, or measure a server.\n\n"
        f"`tandem bench NAME`, with NAME one of: {', '.join(BENCHES)}."
    ),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("serve")(serve)


@contextlib.contextmanager
def exit_when_terminated() -> Iterator[None]:
    """Turn SIGTERM into an exit with status 143 while the context is open, so that models of
    gigabytes do not stay in the folder for temporary files. Does nothing outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@app.command("run", hidden=True)
def bench(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(BENCHES)}.")],
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write JSON lines to a file; - is stdout.")
    ] = None,
    cases: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Cases to run; may be repeated.")
    ] = None,
    quick: Annotated[bool, typer.Option(help="Fewer rounds; ends within 40 s.")] = False,
    with_peers: Annotated[
        bool, typer.Option(help="Install and measure rivals that are not dependencies.")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Trace in Mooncake's format, for live cases."),
    ] = None,
) -> None:
    """Measure; print one line and one JSON record per case."""
    if name not in BENCHES:
        raise NotFoundError("cli.bench", f"no benchmark {name!r}: there is {', '.join(BENCHES)}")
    if with_peers and name not in WITH_PEERS:
        what = f"no peers for {name}: --with-peers is for {', '.join(WITH_PEERS)}"
        raise UnsupportedError("cli.bench", what)
    if trace is not None and name not in WITH_TRACE:
        what = f"no trace for {name}: --trace is for {', '.join(WITH_TRACE)}"
        raise UnsupportedError("cli.bench", what)
    extra: dict[str, Any] = {"with_peers": True} if with_peers else {}
    if trace is not None:
        extra["trace"] = trace
    module = importlib.import_module(BENCHES[name])
    failed = False
    with contextlib.ExitStack() as opened:
        opened.enter_context(exit_when_terminated())
        file = None
        if json is not None and str(json) != "-":
            # The file is opened before the first case, so that a wrong path is found before minutes
            # of measuring; old records stay until there is a new one.
            file = opened.enter_context(json.open("ab"))
        for number, record in enumerate(
            run_cases(
                name,
                module.make_cases(quick=quick, **extra),
                patterns=cases or ["*"],
                budget_s=QUICK_BUDGET_S if quick else FULL_BUDGET_S,
                rounds=QUICK_ROUNDS if quick else FULL_ROUNDS,
            )
        ):
            failed |= record.check != "ok"
            line = msgspec.json.encode(record) + b"\n"
            if file is not None:
                if number == 0:
                    file.truncate(0)
                file.write(line)
                file.flush()
            if json is not None and file is None:
                sys.stdout.buffer.write(line)
            else:
                sys.stdout.write(format_record(record) + "\n")
            sys.stdout.flush()
    # The description is made after the cases, since it lists the versions of what they imported.
    facts = " ".join(f"{key}={value!r}" for key, value in describe_run().items())
    sys.stderr.write(f"{facts} with_peers={with_peers}\n")
    if failed:
        raise typer.Exit(1)
