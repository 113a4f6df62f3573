"""The live half of ``tandem bench conductor``: policies and admission under a slice of a trace.

A launcher process owns four engine instances of a small random model; for each policy a server of
its own is started before them, and ``tandem bench serve`` replays the slice against it. The slice
has whole conversations, lengths divided by 16. Before anything counts, prefill must be most of the
time to the first token of single requests. Then:

- ``case=policy``: at 0.8 of the rate at which the cluster serves the slice when more of it arrives
  than can be served, each policy in turn, from empty caches and an untaught conductor that has seen
  the same warm-up: mean time to first token, hit rate and goodput.
- ``case=overload``: at twice that rate, with objectives and admission ``predicted``: the share of
  accepted requests that met them, and goodput beside the best without admission at lower rates.
"""

import contextlib
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import httpx
import msgspec

from tandem.bench.children import start_child
from tandem.bench.harness import BenchCase
from tandem.bench.serving.model import write_random_model
from tandem.core.errors import DeadlineError, InternalError
from tandem.core.loads.figures import Objectives
from tandem.core.loads.records import LoadReport, RequestRecord
from tandem.core.loads.traces import BLOCK_TOKENS, TraceRow, read_rows
from tandem.models.loading.hub import DEMO_FOLDER

__all__ = ["count_ideal_hits", "make_live_cases", "slice_conversations"]

SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 4096,
}
"""Sizes of the model: large enough that prefill is most of the time to first token, small enough
for two cores.
"""
QUICK_SHAPE = SHAPE | {"hidden_size": 128, "num_hidden_layers": 1, "moe_intermediate_size": 128}
MAX_LEN = 16_384
DIVISOR = 16
NUM_SLICES, QUICK_NUM_SLICES = 100, 800
"""The slice is one of this many parts of the trace: 123 requests of the published conversation
trace.
"""
NUM_INSTANCES = 4
BLOCK = 32
NUM_BLOCKS = 1500
"""KV cache blocks of each instance: about half of what the requests of the trace's slice need, so
that no instance can cache all of it.
"""
OURS, ROUND_ROBIN = "mooncake", "round_robin"
RIVALS = (ROUND_ROBIN, "load", "prefix", "sglang", "dynamo")
QUICK_RIVALS = (ROUND_ROBIN,)
LOAD_SHARE = 0.8
OVERLOAD = 2.0
SHARES_WITHOUT_OVERLOAD, QUICK_SHARES = (0.5, 0.8, 1.0), (0.8,)
MIN_PREFILL_SHARE = 0.8
HIT_SLACK = 0.02
"""Allowed difference between two counts of cached prompt tokens, as a share: one includes tokens
that are not of the prompt.
"""
SLO_FACTOR = 10.0
"""Objectives of a request, as multiples of the latencies of a request that runs alone."""
NUM_WARMUP, NUM_SINGLE = 24, 16
KEY = "bench-admin"
TOKEN = 500
"""The token that every answer consists of: it decodes to a word, so that each token is an event of
its stream.
"""
START_S, RUN_S, END_S = 240.0, 1800.0, 30.0
Metric = Literal["ttft", "hits", "goodput"]


def slice_conversations(rows: Iterable[TraceRow], num_slices: int) -> list[TraceRow]:
    """Return one of ``num_slices`` parts of a trace, with conversations whole.

    All requests of the trace begin with the same first hash; the second identifies the
    conversation.
    """
    return [row for row in rows if row.hash_ids[:2][-1] % num_slices == 0]


def count_ideal_hits(rows: Iterable[TraceRow]) -> float:
    """Return the share of prompt tokens that an unbounded prefix cache, empty at first, would
    serve.
    """
    seen: set[int] = set()
    num_hits = num_tokens = 0
    for row in rows:
        known = list(itertools.takewhile(seen.__contains__, row.hash_ids))
        num_hits += min(len(known) * BLOCK_TOKENS, row.input_length)
        num_tokens += row.input_length
        seen.update(row.hash_ids)
    return num_hits / max(num_tokens, 1)


class _Process:
    """A child process with a ``tandem`` command, which runs until it is closed and prints a line of
    JSON when it is ready.

    Args:
       log: file for its other output.
       words: arguments of the command.
    """

    def __init__(self, log: Path, *words: str) -> None:
        self._log = log
        with log.open("wb") as file:
            self._process = start_child(
                [sys.executable, "-P", "-m", "tandem", *words, "--json"],
                stdout=subprocess.PIPE,
                stderr=file,
            )
        self.said = self._read(words[0])

    def _read(self, name: str) -> dict[str, Any]:
        timer = threading.Timer(START_S, self._process.kill)
        timer.start()
        text = ""
        assert self._process.stdout is not None
        try:
            for line in self._process.stdout:
                text += line.decode()
                with contextlib.suppress(json.JSONDecodeError):
                    return json.loads(text)
        finally:
            timer.cancel()
        self.close()
        said = self._log.read_text(errors="replace")[-500:]
        raise DeadlineError("bench.conductor", f"`tandem {name}` did not start: {said}")

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


class _Outcome(msgspec.Struct, frozen=True):
    """Result of one run of ``tandem bench serve``."""

    report: LoadReport
    records: list[RequestRecord]

    @property
    def hit_rate(self) -> float:
        return self.report.total_cached_tokens / max(self.report.total_input_tokens, 1)

    @property
    def accepted(self) -> list[RequestRecord]:
        """The requests that were not refused by admission."""
        return [each for each in self.records if not each.error.startswith("429")]

    def share_kept(self, objectives: Objectives) -> float:
        """Return the share of accepted requests that met their objectives."""
        return statistics.mean(map(objectives.are_kept, self.accepted)) if self.accepted else 0.0


class _Server:
    """A server in front of the launcher's instances, with one routing policy. A context manager."""

    def __init__(self, live: "_Live", policy: str, *flags: str) -> None:
        self._live = live
        self._process = _Process(
            live.scratch / "server.log",
            *("serve", str(live.model), "--port", "0", "--cluster.launchers", live.endpoint),
            *("--cluster.policy", policy, "--server.admin-api-key", KEY, *flags),
        )
        self.url: str = self._process.said["url"]

    def __enter__(self) -> Self:
        # Every policy gets the same warm-up load, from which the conductor learns the cost of
        # steps.
        self.load("random", NUM_WARMUP, "--random-input-len", "1500", "--random-range-ratio", "0.1",
                  "--random-output-len", "16", "--request-rate", "4")  # fmt: skip
        self.flush()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.close()

    def flush(self) -> None:
        headers = {"Authorization": f"Bearer {KEY}"}
        httpx.post(self.url + "/flush_cache", headers=headers, timeout=60.0, trust_env=False)

    def read_metrics(self) -> dict[str, float]:
        """Return the server's metrics by name, each summed over all of its labels."""
        page = httpx.get(self.url + "/metrics", timeout=60.0, trust_env=False).text
        values: dict[str, float] = {}
        for line in page.splitlines():
            name, _, value = line.rpartition(" ")
            if not line.startswith("#"):
                key = name.partition("{")[0]
                values[key] = values.get(key, 0.0) + float(value)
        return values

    def load(
        self, dataset: str, count: int, *flags: str, objectives: Objectives | None = None
    ) -> _Outcome:
        """Run ``tandem bench serve`` against this server."""
        details = self._live.scratch / "details.jsonl"
        words = [
            *(
                sys.executable,
                "-P",
                "-m",
                "tandem",
                "bench",
                "serve",
                "--base-url",
                self.url,
                "--json",
            ),
            *("--endpoint", "completions", "--dataset-name", dataset, "--num-prompts", str(count)),
            *("--warmup-requests", "0", "--output-details", str(details)),
            *("--extra-request-body", json.dumps({"logit_bias": {str(TOKEN): 100}}), *flags),
        ]
        if objectives is not None:
            words += [
                "--goodput",
                f"ttft:{objectives.ttft}",
                "--goodput",
                f"tpot:{objectives.tpot}",
            ]
        done = subprocess.run(words, capture_output=True, timeout=RUN_S, check=False)
        if done.returncode:
            raise InternalError("bench.conductor", done.stderr.decode()[-1000:])
        return _Outcome(
            msgspec.json.decode(done.stdout, type=LoadReport),
            [
                msgspec.json.decode(line, type=RequestRecord)
                for line in details.read_bytes().splitlines()
            ],
        )


class _Live:
    """The launcher of the instances, the slice of the trace, and the results so far, which later
    cases share.
    """

    def __init__(
        self, scratch: Path, trace: Path, opened: contextlib.ExitStack, *, quick: bool
    ) -> None:
        self.scratch, self._trace, self._opened, self._quick = scratch, trace, opened, quick
        self.endpoint = f"ipc://{scratch}/launcher.sock"
        self._runs: dict[tuple[str, float], _Outcome] = {}

    @cached_property
    def model(self) -> Path:
        folder = self.scratch / "model"
        write_random_model(folder, QUICK_SHAPE if self._quick else SHAPE, MAX_LEN)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(DEMO_FOLDER / name, folder / name)
        return folder

    @cached_property
    def rows(self) -> list[TraceRow]:
        num_slices = QUICK_NUM_SLICES if self._quick else NUM_SLICES
        return slice_conversations(read_rows(self._trace), num_slices)

    @cached_property
    def slice_path(self) -> Path:
        path = self.scratch / "slice.jsonl"
        first_ms = self.rows[0].timestamp
        path.write_bytes(
            b"".join(
                msgspec.json.encode(TraceRow(row.timestamp - first_ms, *_get_rest(row))) + b"\n"
                for row in self.rows
            )
        )
        return path

    @cached_property
    def launcher(self) -> _Process:
        launcher = _Process(
            self.scratch / "launcher.log",
            *("cluster", "launch", str(self.model), "--launcher.listen", self.endpoint),
            *("--unified", str(NUM_INSTANCES), "--engine.block-size", str(BLOCK)),
            *("--engine.num-kv-blocks", str(NUM_BLOCKS), "--model.expert-format", "int8"),
            *(
                "--model.linear-format",
                "int8",
                "--model.packed-cache",
                str(self.scratch / "packed"),
            ),
        )
        self._opened.callback(launcher.close)
        return launcher

    @contextlib.contextmanager
    def serve(self, policy: str, *flags: str) -> Iterator[_Server]:
        assert self.launcher.said["instances"]
        with _Server(self, policy, *flags) as server:
            yield server

    def replay(
        self, server: _Server, rate: float | None, objectives: Objectives | None = None
    ) -> _Outcome:
        """Send the slice of the trace to a server at a mean rate in requests per second; None sends
        all at once.
        """
        span_s = (self.rows[-1].timestamp - self.rows[0].timestamp) / 1e3
        slowdown = 0.0 if rate is None else len(self.rows) / rate / span_s
        return server.load(
            "mooncake",
            len(self.rows),
            *("--dataset-path", str(self.slice_path), "--length-divisor", str(DIVISOR)),
            *("--slowdown", str(slowdown)),
            objectives=objectives,
        )

    @cached_property
    def single(self) -> tuple[float, Objectives]:
        """Share of prefill in the time to first token of requests that are sent one by one, and the
        objectives (latency limits) derived from their times.
        """
        with self.serve(OURS) as server:
            before = server.read_metrics()
            alone = server.load(
                *(
                    "random",
                    NUM_SINGLE,
                    "--random-input-len",
                    "1500",
                    "--random-range-ratio",
                    "0.01",
                ),
                *("--random-output-len", "16", "--max-concurrency", "1"),
            )
            after = server.read_metrics()
        name = "tandem:request_prefill_time_seconds_sum"
        assert alone.report.ttft_ms is not None
        assert alone.report.tpot_ms is not None
        ttft_ms = alone.report.ttft_ms.mean
        share = (after[name] - before[name]) * 1e3 / (ttft_ms * NUM_SINGLE)
        return share, Objectives(
            ttft=round(SLO_FACTOR * ttft_ms), tpot=round(SLO_FACTOR * alone.report.tpot_ms.mean)
        )

    @cached_property
    def saturating_rate(self) -> float:
        """Requests per second that the cluster serves when more arrive than it can serve.

        Requests that are all sent at once find little of each other's prompts in the caches. So the
        slice is sent again, from empty caches, at ``OVERLOAD`` times the rate found that way.
        """
        with self.serve(OURS) as server:
            at_once = self.replay(server, None).report.request_throughput
            server.flush()
            return self.replay(server, OVERLOAD * at_once).report.request_throughput

    def run(self, policy: str, share: float) -> _Outcome:
        """Return the result of a routing policy at a share of ``saturating_rate``; each pair of
        policy and share runs once.
        """
        key = policy, share
        if key not in self._runs:
            # Rate and objectives are measured before this server starts: measuring them sends
            # requests, and the run must begin with empty caches.
            rate, objectives = share * self.saturating_rate, self.single[1]
            with self.serve(policy) as server:
                self._runs[key] = self.replay(server, rate, objectives)
        return self._runs[key]

    @cached_property
    def overload(self) -> _Outcome:
        objectives = self.single[1]
        rate = OVERLOAD * self.saturating_rate
        slo = f"ttft_ms={objectives.ttft},tpot_ms={objectives.tpot}"
        with self.serve(OURS, "--cluster.admission", "predicted", "--server.slo", slo) as server:
            return self.replay(server, rate, objectives)

    def check(self) -> str:
        share = self.single[0]
        if share < MIN_PREFILL_SHARE and not self._quick:
            return f"prefill is {share:.0%} of the time to first token, not {MIN_PREFILL_SHARE:.0%}"
        return "ok"

    def check_run(self, policies: Sequence[str]) -> str:
        """Run all routing policies; return ok if every request was answered, else the error."""
        problem = self.check()
        for policy in policies if problem == "ok" else ():
            outcome = self.run(policy, LOAD_SHARE)
            if outcome.report.failed:
                problem = f"{policy}: {outcome.report.failed} failed: {outcome.report.errors}"
            elif outcome.hit_rate > count_ideal_hits(self.rows) + HIT_SLACK:
                problem = f"{policy}: {outcome.hit_rate:.2f} of tokens cached, more than there are"
        return problem


def _get_rest(row: TraceRow) -> tuple[int, int, list[int]]:
    return row.input_length, row.output_length, row.hash_ids


def _read(outcome: _Outcome, metric: Metric) -> float:
    report = outcome.report
    if metric == "hits":
        return outcome.hit_rate
    if metric == "goodput":
        return report.goodput or 0.0
    assert report.ttft_ms is not None
    return report.ttft_ms.mean


def make_live_cases(trace: Path, *, quick: bool) -> Iterator[BenchCase]:
    """Yield the cases that need running instances; a later case reports figures that an earlier one
    measured.

    Args:
       trace: path of a trace in Mooncake's format.
       quick: a tiny model, a few requests and one rival policy.
    """
    rivals = QUICK_RIVALS if quick else RIVALS
    shares = QUICK_SHARES if quick else SHARES_WITHOUT_OVERLOAD
    with contextlib.ExitStack() as opened:
        scratch = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="tandem-bench-")))
        live = _Live(scratch, trace, opened, quick=quick)

        def measure(policy: str, metric: Metric) -> float:
            return _read(live.run(policy, LOAD_SHARE), metric)

        head = f"case=policy requests={len(live.rows)} load={LOAD_SHARE}"
        units: dict[Metric, str] = {
            "ttft": "ms mean TTFT",
            "hits": "of prompt tokens cached",
            "goodput": "requests/s in time",
        }
        check = lambda: live.check_run((OURS, *rivals))  # noqa: E731
        yield BenchCase(
            name=f"{head} metric=ttft policy={OURS} than={ROUND_ROBIN}",
            unit=units["ttft"],
            ours=lambda: measure(OURS, "ttft"),
            check=check,
            baseline=lambda: measure(ROUND_ROBIN, "ttft"),
            baseline_name=ROUND_ROBIN,
            max_rounds=1,
        )
        for metric, unit in units.items():
            yield BenchCase(
                name=f"{head} metric={metric} policy={OURS} than=best",
                unit=unit,
                ours=lambda metric=metric: measure(OURS, metric),
                check=check,
                rivals={
                    name: lambda name=name, metric=metric: measure(name, metric) for name in rivals
                },
                higher_is_better=metric != "ttft",
                max_rounds=1,
            )
        head = f"case=overload load={OVERLOAD} admission=predicted"
        yield BenchCase(
            name=f"{head} metric=accepted",
            unit="of requests",
            ours=lambda: len(live.overload.accepted) / len(live.overload.records),
            check=live.check,
            higher_is_better=True,
            max_rounds=1,
        )
        for metric, names in {
            "attainment": ("ttft", "tpot"),
            "ttft": ("ttft",),
            "tpot": ("tpot",),
        }.items():
            yield BenchCase(
                name=f"{head} metric={metric}",
                unit="of accepted requests in time",
                ours=lambda names=names: live.overload.share_kept(
                    Objectives(**{name: getattr(live.single[1], name) for name in names})
                ),
                check=live.check,
                higher_is_better=True,
                max_rounds=1,
            )
        yield BenchCase(
            name=f"{head} metric=goodput",
            unit=units["goodput"],
            ours=lambda: live.overload.report.goodput or 0.0,
            check=live.check,
            rivals={
                f"none at {share}": lambda share=share: live.run(OURS, share).report.goodput or 0.0
                for share in shares
            },
            higher_is_better=True,
            max_rounds=1,
        )
