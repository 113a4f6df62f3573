"""``tandem sim compare``: measure live servers and compare them with their simulation."""

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from tandem.cli.output import JsonFlag, print_json, print_table
from tandem.cli.simulating.calibrate import ToldServer
from tandem.core.errors import ConfigError, PeerLostError

if TYPE_CHECKING:
    from tandem.core.loads.records import LoadReport
    from tandem.core.loads.traces import TraceRow
    from tandem.sim.cluster.scenario import Scenario
    from tandem.sim.study.live import ErrorRow

__all__ = ["compare"]

LOADS = (0.3, 0.5, 0.75)
"""Request rates at which each setup is compared, as shares of the setup's capacity."""
FITTED_LOADS = (0.75, 0.3)
"""Request rates of the loads to which the overheads are fitted, as shares of the capacity."""
LEARNING_REQUESTS, LEARNING_AT_ONCE = 24, 6
MAX_LEARNING_LOADS = 12
"""Most loads that are sent until the costs of every instance's steps are learnt: an instance that
only prefills has about as many steps as requests.
"""
MIN_REQUESTS, MAX_REQUESTS = 24, 600
KV_BLOCKS = 256
STORE_MEMORY = "256MiB"
MODELS = ("demo", "moe")
SERVERS = {"unified": [], "1P1D": ["--prefill", "1", "--decode", "1"]}
MOE_SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "vocab_size": 4096,
}
"""Configuration of the model ``moe``: six layers, random weights, 600 MB in bfloat16."""


def compare(
    model: Annotated[
        list[str] | None,
        typer.Option(help="demo, moe (six layers, random) or a folder; may be repeated."),
    ] = None,
    server: Annotated[
        list[str] | None, typer.Option(help="unified or 1P1D; may be repeated.")
    ] = None,
    store: Annotated[
        bool | None, typer.Option("--store/--no-store", help="One of the two; both without.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=1, help="Of each load, of which a setup serves five.")
    ] = 8.0,
    output: Annotated[Path | None, typer.Option(help="Write the page, Markdown.")] = None,
    json: JsonFlag = False,
) -> None:
    """Serve loads live and in virtual time, and show how far apart TTFT, TPOT and throughput are.

    Needs the machine for itself, some ten minutes with what it does without options.
    """
    from tandem.sim.study.live import render_errors

    wanted = server or list(SERVERS)
    for name in wanted:
        if name not in SERVERS:
            raise ConfigError("sim.compare", f"--server {name}: give {' or '.join(SERVERS)}")
    stores = (False, True) if store is None else (store,)
    found: list[ErrorRow] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in model or MODELS:
            path = _find_model(name, Path(scratch))
            cache = ["--model.packed-cache", str(Path(scratch) / "packed")]
            for kind in wanted:
                for has_store in stores:
                    setup = f"{Path(name).name}, {kind}, {'with' if has_store else 'no'} store"
                    flags = [*SERVERS[kind], *cache]
                    found += _compare_setup(setup, path, flags, seconds, has_store=has_store)
    page = render_errors(found, _describe_machine())
    if output is not None:
        output.write_text(page, "utf-8")
    if json:
        print_json(found)
        return
    print_table(
        ("setup", "requests/s", "load", "figure", "live", "simulated", "error"),
        [
            (
                each.setup,
                f"{each.rate:.2f}",
                f"{each.load:.2f}",
                f"{each.figure}, {each.unit}",
                f"{each.live:.4g}",
                f"{each.simulated:.4g}",
                f"{each.error:+.1%}",
            )
            for each in found
        ],
    )


def _describe_machine() -> str:
    from tandem import _native

    topology = _native.read_topology()
    return f"Machine: {len(topology.cores)} cores; server, instances and client share them."


def _find_model(name: str, scratch: Path) -> str:
    if name != "moe":
        return name
    from transformers.utils.logging import disable_progress_bar

    from tandem.bench.serving.model import write_random_model
    from tandem.models.loading.hub import DEMO_FOLDER

    disable_progress_bar()
    folder = scratch / "moe"
    write_random_model(folder, MOE_SHAPE)
    for file in DEMO_FOLDER.glob("tokenizer*"):
        shutil.copy(file, folder / file.name)
    return str(folder)


class _Live:
    """A live server, started to compare its latencies with simulated ones."""

    def __init__(self, client: Any, key: str) -> None:
        self._client, self._key = client, key

    def tell(self) -> ToldServer:
        reply = self._client.get("/server_info")
        return msgspec.json.decode(reply.content, type=ToldServer)

    def serve(
        self, rows: "list[TraceRow]", seed: int, rate: float | None, at_once: int | None = None
    ) -> "LoadReport":
        """Send requests at a rate, or ``at_once`` at a time; return the figures that their clients
        measured.
        """
        from tandem.bench.clients.client import LoadClient, Target
        from tandem.bench.clients.workloads import IdRange, make_trace
        from tandem.core.loads.figures import summarise
        from tandem.sim.study.live import BLOCK_TOKENS

        slowdown = 0.0 if rate is None else 1 / rate
        load = make_trace(
            rows, ids=IdRange(), block_tokens=BLOCK_TOKENS, slowdown=slowdown, seed=seed
        )
        target = Target(base_url=str(self._client.base_url), api_key=self._key)

        async def send() -> Any:
            client = LoadClient(target, max_concurrency=at_once)
            try:
                return await client.run(load, [0.0] * len(load))
            finally:
                await client.close()

        records = asyncio.run(send())
        report = summarise(records, backend="openai-completions", dataset_name="mooncake")
        if report.failed:
            what = f"{report.failed} requests failed: {next(iter(report.errors))}"
            raise PeerLostError("sim.compare", what)
        return report


def _compare_setup(
    setup: str, model: str, flags: list[str], seconds: float, *, has_store: bool
) -> "list[ErrorRow]":
    from tandem.cli.asking.local_server import connect
    from tandem.sim.cluster.calibration import has_learnt, learn_instances
    from tandem.sim.study.live import (
        BLOCK_SIZE,
        FittedLoad,
        compare_figures,
        draw_rows,
        find_capacity,
        fit_overheads,
        make_scenario,
    )

    flags = [*flags, "--engine.block-size", str(BLOCK_SIZE)]
    flags += ["--engine.num-kv-blocks", str(KV_BLOCKS), "--engine.max-model-len", "2048"]
    if has_store:
        flags += ["--store.memory", STORE_MEMORY]

    def describe(live: _Live) -> "Scenario":
        told = live.tell()
        if told.instance is None:
            raise PeerLostError("sim.compare", f"{setup}: no instance serves")
        tokens = (256 << 20) // told.instance.kv_bytes_per_token if has_store else 0
        return make_scenario(learn_instances(told.instances, told.instance), store_tokens=tokens)

    found: list[ErrorRow] = []
    with ExitStack() as opened:
        client, _ = opened.enter_context(connect(model, None, None, flags))
        key = client.headers.get("authorization", "").removeprefix("Bearer ")
        live = _Live(client, key)
        seeds = _count_seeds()
        rows = draw_rows(LEARNING_REQUESTS, next(seeds))
        for _ in range(MAX_LEARNING_LOADS):
            live.serve(rows, next(seeds), None, LEARNING_AT_ONCE)
            if all(has_learnt(each) for each in live.tell().instances):
                break
        capacity = find_capacity(describe(live), rows)
        fitted: list[FittedLoad] = []
        for load in FITTED_LOADS:
            rate = load * capacity
            rows = draw_rows(_count(rate, seconds), seed := next(seeds))
            fitted.append(FittedLoad(_scale(rows, rate), live.serve(rows, seed, rate)))
        scenario = fit_overheads(describe(live), fitted)
        for load in LOADS:
            rate = load * capacity
            rows = draw_rows(_count(rate, seconds), seed := next(seeds))
            report = live.serve(rows, seed, rate)
            found += compare_figures(setup, scenario, rows, rate, load, report)
            errors = ", ".join(f"{each.figure} {each.error:+.0%}" for each in found[-3:])
            sys.stderr.write(f"{setup}: {rate:.2f} requests/s: {errors}\n")
    return found


def _scale(rows: "list[TraceRow]", rate: float) -> "list[TraceRow]":
    from tandem.sim.cluster.requests import scale_rows

    return list(scale_rows(rows, rate))


def _count(rate: float, seconds: float) -> int:
    return min(max(round(rate * seconds), MIN_REQUESTS), MAX_REQUESTS)


def _count_seeds() -> Iterator[int]:
    yield from range(1, 1000)
