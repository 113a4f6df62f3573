"""Runs every combination of some fields' values in a scenario, on several cores; can be resumed.

Each run is a separate process, ``tandem sim run``, so that runs share neither memory nor a lock. A
completed run is a line in the sweep's file; a restarted sweep makes the runs that are missing.
"""

import itertools
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from tandem.core.errors import InternalError
from tandem.sim.cluster.scenario import Scenario, change_scenario, parse_changes

__all__ = ["SweepPoint", "list_points", "run_process", "run_sweep"]


class SweepPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a sweep (a scenario run with all combinations of some values): the values that are
    changed in the scenario, and its report.
    """

    key: str
    """Digest of the whole scenario of the run, by which a stored result is matched: results of
    another scenario are not taken for this one.
    """
    values: dict[str, Any]
    report: dict[str, Any] = {}
    """JSON report of ``tandem sim run``; empty before the run."""


def list_points(scenario: Scenario, axes: Sequence[str]) -> list[SweepPoint]:
    """Return the runs of a sweep: one for each combination of values.

    Args:
       scenario: the scenario to change.
       axes: ``PATH=V1,V2,...`` words; all combinations are run.

    Raises: ConfigError (a word is not of this form, or a value is not valid in the scenario).
    """
    columns: list[list[tuple[str, Any]]] = []
    for axis in axes:
        path, sign, values = axis.partition("=")
        words = [f"{path}{sign}{value}" for value in values.split(",")]
        columns.append([item for word in words for item in parse_changes([word]).items()])
    points: list[SweepPoint] = []
    for combination in itertools.product(*columns):
        values = dict(combination)
        changed = change_scenario(scenario, values)
        key = sha256(msgspec.json.encode(changed)).hexdigest()[:16]
        points.append(SweepPoint(key=key, values=values))
    return points


def run_process(scenario: Scenario, folder: Path, name: str) -> dict[str, Any]:
    """Run a scenario in a new process; return its report.

    Raises: InternalError (with the output of the process).
    """
    path = folder / f".{name}.yaml"
    # The scenario is written as JSON, which is valid YAML.
    path.write_bytes(msgspec.json.encode(scenario))
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "tandem", "sim", "run", str(path), "--json"],
            capture_output=True,
            check=False,
        )
    finally:
        path.unlink(missing_ok=True)
    if done.returncode:
        raise InternalError("sim.sweep", f"{name}: {done.stderr.decode(errors='replace').strip()}")
    return msgspec.json.decode(done.stdout)


def read_done(path: Path) -> dict[str, SweepPoint]:
    """Return the completed runs in a sweep's file, by a key made of their values; an incomplete
    last line is ignored.
    """
    done: dict[str, SweepPoint] = {}
    if path.exists():
        for line in path.read_bytes().splitlines():
            try:
                point = msgspec.json.decode(line, type=SweepPoint)
            except msgspec.DecodeError:
                continue
            done[point.key] = point
    return done


def run_sweep(
    scenario: Scenario,
    axes: Sequence[str],
    path: Path,
    *,
    jobs: int,
    on_done: Callable[[SweepPoint, int, int], None] | None = None,
    run: Callable[[Scenario, Path, str], dict[str, Any]] = run_process,
) -> list[SweepPoint]:
    """Make the missing runs of a sweep; return all its points, in order.

    Args:
       scenario: the scenario to change.
       axes: see ``list_points``.
       path: file of results, which is appended to.
       jobs: runs at a time.
       on_done: called with a completed run, the number completed, and the number of all runs.
       run: makes one run.

    Raises: the errors of ``list_points``; InternalError (a run failed; completed ones are kept).
    """
    points = list_points(scenario, axes)
    done = read_done(path)
    missing = [point for point in points if point.key not in done]
    lock = threading.Lock()

    def work(point: SweepPoint) -> None:
        report = run(change_scenario(scenario, point.values), path.parent, point.key)
        ended = msgspec.structs.replace(point, report=report)
        with lock:
            with path.open("ab") as file:
                file.write(b"\n" * _is_cut(path) + msgspec.json.encode(ended) + b"\n")
            done[point.key] = ended
            if on_done is not None:
                on_done(ended, sum(each.key in done for each in points), len(points))

    with ThreadPoolExecutor(jobs) as pool:
        for future in [pool.submit(work, point) for point in missing]:
            future.result()
    return [done[point.key] for point in points]


def _is_cut(path: Path) -> bool:
    """Return True if the last line of a file lacks its line break."""
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read() != b"\n"
