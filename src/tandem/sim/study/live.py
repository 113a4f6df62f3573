"""The simulator's error against a live server that serves the same load.

Learnt from the server beforehand: the costs of its steps, and three constants, the time between two
steps, the time that each decode adds to it, and the time of a request outside of its steps. These
are fitted to loads at two rates; runs of other prompts at these rates and between are predicted.
This module only computes: the live figures are arguments.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from tandem.core.instance_status import InstanceRole
from tandem.core.loads.records import LoadReport
from tandem.core.loads.traces import TraceRow, shrink_rows
from tandem.engine.config import EngineConfig
from tandem.sim.cluster.calibration import CalibrationFile, calibrate_scenario
from tandem.sim.cluster.generators import Generator, generate_rows
from tandem.sim.cluster.requests import scale_rows
from tandem.sim.cluster.run import run_scenario
from tandem.sim.cluster.scenario import Group, LinkSpec, Load, Scenario
from tandem.sim.cluster.store import StoreSpec

__all__ = [
    "BLOCK_SIZE",
    "BLOCK_TOKENS",
    "FIGURES",
    "LENGTH_DIVISOR",
    "NEAR",
    "ErrorRow",
    "FittedLoad",
    "compare_figures",
    "draw_rows",
    "find_capacity",
    "fit_overheads",
    "make_scenario",
    "render_errors",
]

BLOCK_SIZE = 16
LENGTH_DIVISOR = 8
"""Divisor of the generated load's lengths, which gives prompts of about 300 tokens."""
BLOCK_TOKENS = 512 // LENGTH_DIVISOR
NEAR = 0.15
"""Relative error up to which a figure counts as predicted."""
NUM_FITS = 8
MIN_SPREAD = 0.2
"""Least relative difference of the mean number of decodes in a step between two loads by which the
time per decode is told from a constant.
"""
FIGURES = ("TTFT", "TPOT", "throughput")


class ErrorRow(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of one run, as simulated and as measured on a live server."""

    setup: str
    rate: float
    """Requests per second."""
    load: float
    """The rate as a share of the calibrated simulator's capacity."""
    figure: str
    unit: str
    live: float
    simulated: float

    @property
    def error(self) -> float:
        """Relative error of the simulated figure."""
        return self.simulated / self.live - 1 if self.live else float("inf")


def draw_rows(count: int, seed: int) -> list[TraceRow]:
    """Return conversations of several turns over a few shared prefixes, on average one request per
    second.
    """
    spec = Generator(
        requests=count,
        rate=1.0,
        new_tokens=1200,
        new_spread=0.7,
        output_tokens=256,
        output_spread=0.5,
        max_tokens=8000,
        turns=3,
        think_s=6,
        shared_prefixes=4,
        shared_tokens=1200,
        seed=seed,
    )
    return list(shrink_rows(generate_rows(spec), LENGTH_DIVISOR))


def make_scenario(found: CalibrationFile, *, store_tokens: int = 0) -> Scenario:
    """Return the scenario of a live server.

    Args:
       found: costs learnt from its instances.
       store_tokens: capacity of its store in tokens; 0 for no store.
    """
    engine = EngineConfig(block_size=BLOCK_SIZE, max_queue=100_000)
    roles: list[InstanceRole] = [each.role for each in found.instances]
    groups = tuple(
        Group(role=role, count=roles.count(role), engine=engine) for role in dict.fromkeys(roles)
    )
    store = None
    if store_tokens:
        store = StoreSpec(tokens=max(store_tokens // len(roles), BLOCK_SIZE))
    base = Scenario(
        instances=groups,
        store=store,
        links=LinkSpec(gbps=80.0, efficiency=1.0, is_layerwise=True),
        load=Load(block_tokens=BLOCK_TOKENS),
    )
    return calibrate_scenario(base, found)


def find_capacity(scenario: Scenario, rows: Sequence[TraceRow]) -> float:
    """Return the requests per second that the instances serve if all requests arrive at once."""
    at_once = [msgspec.structs.replace(row, timestamp=0.0) for row in rows]
    report = run_scenario(scenario, at_once).report
    return len(rows) / max(report.duration, 1e-9)


class FittedLoad(NamedTuple):
    """A load that was served live, to which overheads are fitted."""

    rows: Sequence[TraceRow]
    live: LoadReport


def fit_overheads(scenario: Scenario, loads: Sequence[FittedLoad]) -> Scenario:
    """Return a scenario whose overheads are fitted so that it comes near the live means.

    The time per token that is missing has a constant part, and one that grows with the decodes of a
    step, because each token that is sent takes time of the server's and the client's on the same
    cores. On unified instances the constant part becomes the gap between steps; on prefill-decode
    pairs it becomes the latency of a hand-over, for which a token waits. Relative errors of all
    loads count alike.
    """
    is_pair = any(group.role == "decode" for group in scenario.instances)
    for _ in range(NUM_FITS):
        terms: list[tuple[float, float]] = []
        missing_tpot_s: list[float] = []
        missing_ttft_ms: list[float] = []
        weights: list[tuple[float, float]] = []
        for rows, live in loads:
            ours = run_scenario(scenario, rows).report
            if not (ours.ttft_ms and ours.tpot_ms and live.ttft_ms and live.tpot_ms):
                continue
            # The latency of a hand-over (of a prompt's KV to the decoding instance) counts once, in
            # the gap after the first token; a gap between steps counts for each token.
            tokens = ours.total_output_tokens / max(ours.completed, 1)
            constant = 1 / max(tokens - 1, 1) if is_pair else 1.0
            num_decodes = ours.output_throughput * ours.tpot_ms.mean / 1e3
            terms.append((constant, num_decodes))
            missing_tpot_s.append((live.tpot_ms.mean - ours.tpot_ms.mean) / 1e3)
            missing_ttft_ms.append(live.ttft_ms.mean - ours.ttft_ms.mean)
            weights.append((1 / live.tpot_ms.mean, 1 / live.ttft_ms.mean))
        if not terms:
            break
        tpot_weights, ttft_weights = np.array(weights).T
        # Longer steps have more decodes, which makes them longer again: take half of it.
        missing = np.array(missing_tpot_s) / 2
        constant_s, decode_s = _solve(np.array(terms), missing, tpot_weights)
        if is_pair:
            latency_us = max(scenario.links.latency_us + 1e6 * constant_s, 0.0)
            links = msgspec.structs.replace(scenario.links, latency_us=latency_us)
            scenario = msgspec.structs.replace(scenario, links=links)
            constant_s = 0.0
        scenario = _add_step_time(scenario, constant_s, decode_s)
        request_ms = np.average(missing_ttft_ms, weights=ttft_weights**2)
        request_ms = max(scenario.request_ms + float(request_ms), 0.0)
        scenario = msgspec.structs.replace(scenario, request_ms=request_ms)
    return scenario


def _solve(
    terms: NDArray[np.float64], missing_s: NDArray[np.float64], weights: NDArray[np.float64]
) -> tuple[float, float]:
    """Return the constant and the time per decode that fit the missing times best, by least squares
    of the relative errors; the time per decode is 0 where the loads do not tell the two apart.
    """
    weighted = terms * weights[:, None]
    if len(terms) > 1 and np.ptp(terms[:, 1]) > MIN_SPREAD * terms[:, 1].max():
        constant_s, decode_s = np.linalg.lstsq(weighted, missing_s * weights, rcond=None)[0]
        return float(constant_s), float(decode_s)
    column = weighted[:, 0]
    return float(column @ (missing_s * weights) / (column @ column)), 0.0


def _add_step_time(scenario: Scenario, gap_s: float, decode_s: float) -> Scenario:
    groups: list[Group] = []
    for group in scenario.instances:
        costs = group.calibration
        assert costs is not None, "a live server has learnt costs"
        costs = msgspec.structs.replace(
            costs,
            gap_s=max(costs.gap_s + gap_s, 0.0),
            decode_s=max(costs.decode_s + decode_s, 0.0),
        )
        groups.append(msgspec.structs.replace(group, calibration=costs))
    return msgspec.structs.replace(scenario, instances=tuple(groups))


def compare_figures(
    setup: str,
    scenario: Scenario,
    rows: Sequence[TraceRow],
    rate: float,
    load: float,
    live: LoadReport,
) -> list[ErrorRow]:
    """Simulate a run that was served live; return the figures of both.

    Args:
       setup: name of the model and its instances.
       scenario: scenario of the server.
       rows: requests, one per second on average.
       rate: requests per second at which they were sent.
       load: that rate as a share of the capacity.
       live: report of the live run.
    """
    ours = run_scenario(scenario, scale_rows(rows, rate)).report
    values = (
        ("ms", live.ttft_ms and live.ttft_ms.mean, ours.ttft_ms and ours.ttft_ms.mean),
        ("ms", live.tpot_ms and live.tpot_ms.mean, ours.tpot_ms and ours.tpot_ms.mean),
        ("tokens/s", live.output_throughput, ours.output_throughput),
    )
    return [
        ErrorRow(
            setup=setup,
            rate=rate,
            load=load,
            figure=figure,
            unit=unit,
            live=there or 0.0,
            simulated=here or 0.0,
        )
        for figure, (unit, there, here) in zip(FIGURES, values, strict=True)
    ]


def render_errors(rows: Sequence[ErrorRow], machine: str) -> str:
    """Return the page of the simulator's errors against live runs, in Markdown."""
    near = sum(abs(row.error) <= NEAR for row in rows)
    lines = [
        "# The simulator's error against live servers",
        "",
        "Made by `tandem sim compare --output PAGE`. Each setup is started and learns the costs of",
        "its steps. The time between steps, what each decode adds to it, and the time of a request",
        "beside them are fitted to two loads. Then it serves three loads of other prompts, which",
        "are also simulated. Means over all requests of a run.",
        "",
        f"{machine}",
        "",
        f"**{near} of {len(rows)} figures are within {NEAR:.0%}.**",
        "",
        "| setup | requests/s (share of capacity) | figure | live | simulated | error |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        mark = "" if abs(row.error) <= NEAR else " (!)"
        lines.append(
            f"| {row.setup} | {row.rate:.2f} ({row.load:.1f}) | {row.figure}, {row.unit} "
            f"| {row.live:.4g} | {row.simulated:.4g} | {row.error:+.0%}{mark} |"
        )
    return "\n".join(lines) + "\n"
