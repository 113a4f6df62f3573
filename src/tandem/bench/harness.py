"""Measuring and reporting, the same for every benchmark.

A case has a check, a function that times ours, and, if there is a rival or a limit of the machine,
functions that time those. Rounds are interleaved (A B C A B C ...), so that other load on the
machine slows all alike; the reported ratio is the median of the ratios of single rounds, with its
quartiles. A case whose check fails reports no time.
"""

import fnmatch
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tandem.core.errors import NotFoundError, TandemError

__all__ = ["BenchCase", "BenchRecord", "describe_run", "format_record", "run_cases", "time_call"]


class BenchRecord(msgspec.Struct, kw_only=True):
    """Result of one case; printed as one line of text or one line of JSON."""

    bench: str
    case: str
    ours: float | None
    baseline: float | None
    baseline_name: str | None
    unit: str
    ratio: float | None
    """Times by which ours is better than the baseline; above 1 ours is better, whatever the unit.
    """
    ratio_iqr: tuple[float, float] | None
    ceiling: float | None
    ceiling_fraction: float | None
    check: str
    n: int
    others: dict[str, float] = {}
    """Measurements of the rivals that were not the best, by name."""
    limits: dict[str, tuple[float, float]] = {}
    """Further limits of the machine (such as its memory bandwidth) by name: the measured limit, and
    by how many times our result is better than that.
    """


@dataclass(frozen=True, slots=True)
class BenchCase:
    """One thing to measure.

    Each callable returns one measurement in ``unit``, and they are called in turn. Set-up that must
    not be timed is done in them before their clock starts, or in ``check``, which is called first.
    """

    name: str
    """Name of the case: ``key=value`` words."""
    unit: str
    ours: Callable[[], float]
    check: Callable[[], str]
    """Returns ``ok``, or a description of the failure."""
    baseline: Callable[[], float] | None = None
    baseline_name: str | Callable[[], str] | None = None
    """Name of the baseline; a callable if ``check`` determines which rival is the fastest."""
    ceiling: Callable[[], float] | None = None
    higher_is_better: bool = False
    rivals: Mapping[str, Callable[[], float]] | None = None
    """Rivals by name, instead of ``baseline``: all are measured, and ours is compared with the
    best.
    """
    max_rounds: int | None = None
    """Most rounds to measure, for an expensive case; None does as many rounds as were asked for."""
    limits: Mapping[str, Callable[[], float]] | None = None
    """Limits of the machine by name, besides ``ceiling``, that are closer to what the case does;
    each function measures one.
    """


def time_call(function: Callable[[], object]) -> float:
    """Return the seconds that one call takes."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def run_cases(
    bench: str,
    cases: Iterable[BenchCase],
    *,
    patterns: Sequence[str] = ("*",),
    budget_s: float,
    rounds: int,
) -> Iterator[BenchRecord]:
    """Measure the cases whose names match one of ``patterns``; yield each record when it is done.

    Args:
       bench: the benchmark's name, for the records.
       cases: a lazy iterable if making them is expensive.
       patterns: globs over case names.
       budget_s: most seconds for a case, after which no further round begins.
       rounds: rounds wanted.

    Raises: NotFoundError if no case matches.
    """
    matched = False
    for case in cases:
        if any(fnmatch.fnmatchcase(case.name, pattern) for pattern in patterns):
            matched = True
            yield _run_case(bench, case, budget_s, rounds)
    if not matched:
        raise NotFoundError(
            "bench.run", f"no case of {bench} matches {' or '.join(patterns)}: give GLOBs"
        )


def _run_case(bench: str, case: BenchCase, budget_s: float, rounds: int) -> BenchRecord:
    try:
        check = case.check()
    except TandemError as error:
        check = str(error)
    record = BenchRecord(
        bench=bench,
        case=case.name,
        ours=None,
        baseline=None,
        baseline_name=None,
        unit=case.unit,
        ratio=None,
        ratio_iqr=None,
        ceiling=None,
        ceiling_fraction=None,
        check=check,
        n=0,
    )
    if check != "ok":
        return record
    name = case.baseline_name
    record.baseline_name = name() if callable(name) else name
    ours: list[float] = []
    baseline: list[float] = []
    ceiling: list[float] = []
    rivals: dict[str, list[float]] = {name: [] for name in case.rivals or {}}
    limits: dict[str, list[float]] = {name: [] for name in case.limits or {}}
    end_s = time.monotonic() + budget_s
    if case.max_rounds is not None:
        rounds = min(rounds, case.max_rounds)
    while len(ours) < rounds and (not ours or time.monotonic() < end_s):
        ours.append(case.ours())
        if case.baseline is not None:
            baseline.append(case.baseline())
        for rival, measure in (case.rivals or {}).items():
            rivals[rival].append(measure())
        if case.ceiling is not None:
            ceiling.append(case.ceiling())
        for limit, measure in (case.limits or {}).items():
            limits[limit].append(measure())
    record.n = len(ours)
    record.ours = statistics.median(ours)
    if rivals:
        medians = {rival: statistics.median(times) for rival, times in rivals.items()}
        best = (max if case.higher_is_better else min)(medians, key=lambda rival: medians[rival])
        record.baseline_name, baseline = best, rivals[best]
        record.others = {rival: value for rival, value in medians.items() if rival != best}
    if baseline:
        record.baseline = statistics.median(baseline)
        ratios = [_better(a, b, case) for a, b in zip(ours, baseline, strict=True)]
        record.ratio = statistics.median(ratios)
        record.ratio_iqr = _quartiles(ratios)
    if ceiling:
        record.ceiling = statistics.median(ceiling)
        record.ceiling_fraction = statistics.median(
            _better(a, b, case) for a, b in zip(ours, ceiling, strict=True)
        )
    for limit, values in limits.items():
        ratios = [_better(a, b, case) for a, b in zip(ours, values, strict=True)]
        record.limits[limit] = statistics.median(values), statistics.median(ratios)
    return record


def _better(ours: float, other: float, case: BenchCase) -> float:
    """Return how many times better ``ours`` is than ``other``, by the case's sense of better."""
    return ours / other if case.higher_is_better else other / ours


def _quartiles(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def format_record(record: BenchRecord) -> str:
    """Return the record as one line for a person."""
    head = f"{record.bench} {record.case}"
    if record.ours is None:
        return f"{head}  check FAILED: {record.check}"
    parts = [head, f"ours {record.ours:.4g} {record.unit}"]
    if record.baseline is not None:
        parts.append(f"baseline {record.baseline_name} {record.baseline:.4g} {record.unit}")
    if record.ratio is not None and record.ratio_iqr is not None:
        low, high = record.ratio_iqr
        parts.append(f"ratio {record.ratio:.2f} [{low:.2f}, {high:.2f}]")
    parts.extend(f"{rival} {value:.4g} {record.unit}" for rival, value in record.others.items())
    parts.append(f"n={record.n} interleaved")
    parts.append(f"check {record.check}")
    if record.ceiling is not None and record.ceiling_fraction is not None:
        parts.append(f"{record.ceiling_fraction:.0%} of {record.ceiling:.4g} {record.unit} here")
    for limit, (value, ratio) in record.limits.items():
        parts.append(f"{ratio:.0%} of {limit} {value:.4g} {record.unit}")
    return "  ".join(parts)


def describe_run() -> dict[str, str]:
    """Return the facts that identify a record's origin: machine, versions, commit."""
    facts = {"python": platform.python_version(), "machine": platform.machine()}
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        facts["cpu"] = next(
            line.split(":", 1)[1].strip()
            for line in text.splitlines()
            if line.startswith("model name")
        )
    except (OSError, StopIteration):
        facts["cpu"] = platform.processor() or "unknown"
    torch = sys.modules.get("torch")
    if torch is not None:
        facts["torch"] = torch.__version__
        facts["threads"] = str(torch.get_num_threads())
    facts["commit"] = _read_commit()
    return facts


def _read_commit() -> str:
    folder = Path(__file__).parent
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return result.stdout.strip()
