"""The tables of the Mooncake paper, simulated from scenario files, against the published numbers.

A table is a file in ``sim/data/paper/tables``. Its rows name a system of ``systems.yaml``, changes
to it, the published number, and the run that the number is relative to. All assumptions of a table
are in its file, none in code. A run that several rows need is made once, and can be kept in a file.
"""

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from hashlib import sha256
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from tandem.core.config import parse_yaml
from tandem.core.errors import ConfigError, InternalError, NotFoundError
from tandem.core.loads.figures import Objectives
from tandem.core.loads.records import RequestRecord
from tandem.placement.catalog import find_model, read_hardware
from tandem.placement.shape import read_shape
from tandem.sim.cluster.run import SimReport, open_load, run_scenario
from tandem.sim.cluster.scenario import Load, Scenario, change_scenario
from tandem.sim.replay.hits import PlainLru, count_hits

__all__ = [
    "Outcome",
    "PaperFit",
    "PaperRow",
    "PaperTable",
    "RowResult",
    "Runs",
    "list_tables",
    "read_fits",
    "render_page",
    "serve_scenario",
]

TBT_S = 0.1
REPLAYED = ("block_hits", "mean_hits")
"""Figures that come from replaying a load without time."""
NEAR = 0.3
"""Relative distance up to which a figure counts as equal to the published one."""


class PaperRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One number of a table in the Mooncake paper, and the run that is simulated for it."""

    name: str
    system: str
    against: str = ""
    """System by whose figure ours is divided; the row's changes do not apply to it."""
    set: dict[str, Any] = {}
    published: float | None = None
    """Published number; None if the paper shows a curve or gives only a direction."""
    is_below: bool = False
    """True if the paper gives no number, but says that the ratio is below 1."""
    is_above: bool = False
    """True if the paper gives no number, but says that the ratio is above 1."""
    is_fitted: bool = False
    load: str = ""
    """Name of a generated load to run instead of the trace; only the direction is compared then."""
    tbt_ms: int = 0
    figure: str = ""
    """Figure of this row, instead of the table's."""
    blocks: int = 0
    """Capacity in blocks of the cache for ``block_hits`` and ``mean_hits``; 0 for no limit."""


class _Variant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    base: str
    set: dict[str, Any] = {}


class PaperTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One table of the Mooncake paper: its rows, and the settings of their runs."""

    title: str
    source: str
    figure: str
    unit: str
    what: str
    rows: list[PaperRow]
    set: dict[str, Any] = {}
    """Changes of the scenario that apply to every run of the table."""
    rates: tuple[float, ...] = (1.0,)
    """Factors on the load's rate, for figures that are the best over several rates."""
    min_requests: int = 0
    """Fewest requests of each run that show the effect of this table."""
    may_tie: bool = False
    """True if rows with equal figures also count as being in the published order."""
    systems: dict[str, _Variant] = {}


class PaperFit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A parameter of the scenarios that is fitted to one row of the paper, named in advance; all
    other rows are predicted.
    """

    path: str
    """Path of the fitted scenario field, the same in all systems."""
    value: float
    """Fitted value of that field, found by ``tandem sim paper --fit``."""
    tried: tuple[float, ...]
    table: str
    row: str
    why: str


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one simulated run from which the tables' rows are made."""

    key: str
    completed: int
    failed: int
    ttft_s: float
    hit_ratio: float
    prefill_s: float
    goodput: float
    effective: dict[str, float]
    """Requests per second with a TTFT within 30 s and a TBT within the key's number of
    milliseconds.
    """
    last_ttft_ratio: float
    rejected: float = 0.0
    """Share of requests that were rejected."""
    tbt_kept: float = 0.0
    """Share of requests with a TBT within 100 ms."""
    tbt_ms: float = 0.0
    """Mean TBT of the requests, in milliseconds."""
    mfu: float = 0.0
    """Share of the accelerators' peak FLOP/s that the instances which prefill reach during their
    steps; counts operations on weights only. 0 with learnt step costs.
    """


class RowResult(msgspec.Struct, frozen=True, kw_only=True):
    """A row (one number) of the Mooncake paper with our simulated figure for it."""

    row: PaperRow
    ours: float
    is_right: bool
    """True if our figure agrees with the published direction: a ratio to another system is on the
    same side of 1; figures without such a ratio are in the published order within their table.
    """

    @property
    def off(self) -> float | None:
        """Relative distance of our figure from the published number; None without one."""
        return None if self.row.published is None else self.ours / self.row.published - 1


def _data() -> Any:
    return resources.files("tandem.sim") / "data" / "paper"


def _read(name: str) -> Any:
    return parse_yaml((_data() / name).read_text("utf-8"))


@cache
def _read_systems() -> dict[str, Scenario]:
    values = {fit.path: fit.value for fit in read_fits()}
    return {
        name: change_scenario(msgspec.convert(fields, Scenario, strict=False), values)
        for name, fields in _read("systems.yaml").items()
    }


def read_fits() -> list[PaperFit]:
    """Return the fits (parameters, each with the row of the paper that it is fitted to); each uses
    the values of those before it.
    """
    return msgspec.convert(_read("fit.yaml"), list[PaperFit], strict=False)


NAMES = (
    "capacity",
    "prefill_time",
    "cache",
    "capacity_hits",
    "scheduling",
    "overload",
    "production",
    "bandwidth",
    "ratio",
    "plane",
    "long_prompt",
)


def list_tables(names: Sequence[str] = ()) -> dict[str, PaperTable]:
    """Return tables of the Mooncake paper by name; without names, all.

    Raises: NotFoundError (no table of one of the names).
    """
    for name in names:
        if name not in NAMES:
            what = f"no table {name!r}: there is {', '.join(NAMES)}"
            raise NotFoundError("sim.paper", what)
    return {
        name: msgspec.convert(_read(f"tables/{name}.yaml"), PaperTable) for name in names or NAMES
    }


def _measure_effective(records: Sequence[RequestRecord], duration: float) -> dict[str, float]:
    found: dict[str, float] = {}
    for tbt in (100, 200, 300):
        kept = Objectives(ttft=30_000, tbt=tbt)
        found[str(tbt)] = sum(kept.are_kept(record) for record in records) / duration
    return found


def serve_scenario(key: str, scenario: Scenario) -> Outcome:
    """Run a scenario; return its figures.

    Raises: the errors of ``run_scenario``; InternalError (no request succeeded).
    """
    run = run_scenario(scenario, open_load(scenario.load))
    report = run.report
    good = [record for record in run.records if not record.error]
    if not good:
        raise InternalError("sim.paper", f"no request of {report.scenario} succeeded")
    return Outcome(
        key=key,
        completed=report.completed,
        failed=report.failed,
        ttft_s=statistics.fmean(record.ttft_s for record in good),
        hit_ratio=report.hit_ratio,
        prefill_s=report.prefill_s,
        goodput=(report.goodput or 0.0) * report.duration / report.load_s,
        effective=_measure_effective(run.records, report.load_s),
        last_ttft_ratio=good[-1].ttft_s / good[0].ttft_s,
        rejected=report.failed / len(run.records),
        tbt_kept=sum(record.tbt_s <= TBT_S for record in good) / len(good),
        tbt_ms=1e3 * statistics.fmean(record.tbt_s for record in good),
        mfu=_measure_mfu(scenario, report),
    )


def _measure_mfu(scenario: Scenario, report: SimReport) -> float:
    """Return the share of peak FLOP/s that the instances which prefill reach during their steps.

    0 if their step costs are learnt, or if the machine has no accelerator.
    """
    group = next(each for each in scenario.instances if each.role != "decode")
    if group.calibration is not None:
        return 0.0
    spec = read_hardware(group.hardware)
    weights = read_shape(find_model(group.model).config, group.model).active_weights
    nodes = [each for each in report.instances if each.role == group.role]
    tokens = sum(each.prompt_tokens - each.hit_tokens for each in nodes)
    if group.role == "unified":
        tokens += report.total_output_tokens
    accelerator = spec.accelerator
    busy_s = sum(each.busy_s for each in nodes)
    if accelerator is None or not busy_s:
        return 0.0
    peak = accelerator.bf16_tflops * 1e12 * spec.num_accelerators
    return 2 * weights * tokens / (busy_s * peak)


class Runs:
    """Runs the scenarios of the paper's tables, each once.

    Args:
       trace: path of the conversation trace.
       num_requests: most requests of each run; 0 runs all.
       path: file of outcomes, read first and then appended to; None for no file.
       on_run: called before each run with its name and the number of runs so far.
       serve: runs one scenario, given its key.
    """

    def __init__(
        self,
        trace: Path,
        num_requests: int,
        path: Path | None = None,
        on_run: Callable[[str, int], None] | None = None,
        serve: Callable[[str, Scenario], Outcome] | None = None,
    ) -> None:
        self._trace, self._num_requests, self._path = trace, num_requests, path
        self._on_run = on_run
        self._serve = serve_scenario if serve is None else serve
        self._limit = num_requests
        self._done: dict[str, Outcome] = {}
        if path is not None and path.exists():
            for line in path.read_bytes().splitlines():
                outcome = msgspec.json.decode(line, type=Outcome)
                self._done[outcome.key] = outcome

    def measure(self, table: PaperTable, num_requests: int | None = None) -> list[RowResult]:
        """Return the rows of a table of the paper with our figures, which are simulated unless kept
        from before.

        Args:
           table: table of the paper.
           num_requests: requests of each of its runs; None takes the number given for all tables,
               which runs of generated loads always take, unless they are replayed without time.
        """
        results: list[RowResult] = []
        for row in table.rows:
            self._limit = self._find_limit(table, row, num_requests)
            results.append(self._measure_row(table, row))
        by_kind: dict[tuple[str, str], list[RowResult]] = {}
        for each in results:
            if not each.row.against and each.row.published:
                by_kind.setdefault((each.row.figure, each.row.load), []).append(each)
        wrong = {
            each.row.name
            for rows in by_kind.values()
            if not _is_ordered(rows, may_tie=table.may_tie)
            for each in rows
        }
        return [
            msgspec.structs.replace(each, is_right=each.row.name not in wrong)
            if not each.row.against and each.row.published
            else each
            for each in results
        ]

    def _find_limit(self, table: PaperTable, row: PaperRow, num_requests: int | None) -> int:
        """Return the number of requests that a row's runs take from the trace; 0 runs all."""
        # Of a generated load only the direction (which system is better) is compared, so fewer
        # requests are enough; a load that is replayed without time is cheap and runs whole.
        is_direction = bool(row.load) and (row.figure or table.figure) not in REPLAYED
        limit = self._num_requests if num_requests is None or is_direction else num_requests
        return max(limit, table.min_requests) if limit else 0

    def fit(self, fit: PaperFit, num_requests: int | None = None) -> list[tuple[float, float]]:
        """Return each tried value of the fitted parameter, with our figure for the fit's row of the
        paper at that value.

        Args:
           fit: the parameter and its row.
           num_requests: as in ``measure``.
        """
        table = list_tables([fit.table])[fit.table]
        row = next(each for each in table.rows if each.name == fit.row)
        found: list[tuple[float, float]] = []
        for value in fit.tried:
            # The value is set in the whole table, so that both runs have it where a row is the
            # quotient of two runs' figures.
            changed = msgspec.structs.replace(table, set=table.set | {fit.path: value})
            self._limit = self._find_limit(table, row, num_requests)
            found.append((value, self._measure_row(changed, row).ours))
        return found

    def _measure_row(self, table: PaperTable, row: PaperRow) -> RowResult:
        figure = row.figure or table.figure
        changes = dict(table.set)
        if row.load:
            changes |= {"load.generator": row.load}
        if figure in REPLAYED:
            value = self._count_hits(row, figure)
            if row.against:
                value /= self._count_hits(msgspec.structs.replace(row, blocks=0), figure)
            return RowResult(row=row, ours=value, is_right=True)
        value = self._find(table, row.system, changes | row.set, figure, row.tbt_ms)
        if row.against:
            base = self._find(table, row.against, changes, figure, row.tbt_ms)
            value = value / base if base else float("inf")
        if row.published is None:
            is_right = (value < 1 or not row.is_below) and (value > 1 or not row.is_above)
        else:
            is_right = (value > 1) == (row.published > 1)
        return RowResult(row=row, ours=value, is_right=is_right)

    def _count_hits(self, row: PaperRow, figure: str) -> float:
        """Return the hit ratio of a load that is replayed without time against plain LRU, the cache
        for which the paper states ratios.
        """
        load = Load(trace=str(self._trace), generator=row.load or None, limit=self._limit)
        counted = count_hits(open_load(load), PlainLru(row.blocks or None))
        return counted.ratio if figure == "block_hits" else counted.mean_ratio

    def _find(
        self, table: PaperTable, system: str, changes: Mapping[str, Any], figure: str, tbt_ms: int
    ) -> float:
        variant = table.systems.get(system)
        if variant is not None:
            system, changes = variant.base, dict(changes) | variant.set
        base = _read_systems()[system]
        if figure == "capacity":
            outcomes = [
                self._run(base, dict(changes) | {"load.rate_scale": rate}) for rate in table.rates
            ]
            return max(outcome.effective[str(tbt_ms)] for outcome in outcomes)
        outcome = self._run(base, changes)
        if figure not in Outcome.__struct_fields__:
            raise ConfigError("sim.paper", f"{table.title}: no figure {figure!r}")
        return float(getattr(outcome, figure))

    def _run(self, base: Scenario, changes: Mapping[str, Any]) -> Outcome:
        given = {"load.limit": self._limit} | dict(changes)
        trace = given.get("load.trace")
        path = self._trace
        if isinstance(trace, str):
            path = Path(str(_data() / trace))
        # The key of a run holds the trace's name, not its folder: where a trace lies changes no
        # result.
        key_of = change_scenario(base, given)
        key = sha256(msgspec.json.encode(key_of) + path.name.encode()).hexdigest()[:16]
        if key not in self._done:
            if self._on_run is not None:
                self._on_run(f"{base.name}, {dict(changes)}", len(self._done))
            scenario = change_scenario(base, given | {"load.trace": str(path)})
            outcome = self._serve(key, scenario)
            self._done[key] = outcome
            if self._path is not None:
                with self._path.open("ab") as file:
                    file.write(msgspec.json.encode(outcome) + b"\n")
        return self._done[key]


def _is_ordered(rows: Sequence[RowResult], *, may_tie: bool) -> bool:
    """Return True if our figures of these rows are in the same order as the published numbers."""
    ordered = sorted(rows, key=lambda each: each.row.published or 0.0)
    for first, second in pairwise(ordered):
        if first.row.published == second.row.published:
            continue
        if second.ours < first.ours or (second.ours == first.ours and not may_tie):
            return False
    return True


INTRODUCTION = """\
# The Mooncake paper, reproduced

Made by `tandem sim paper --trace TRACE {options} --output docs/reproduction.md`.
Mooncake's evaluation cannot be repeated from outside, as its scheduler and engine are not public.
This page repeats it with the scheduler, prefix index, store directory and conductor that also
serve, over models of the paper's machines. Every assumption is in `src/tandem/sim/data/paper/`; a
row that a parameter is fitted to says so, and the others are predicted. Rows of loads that are not
at hand run on a generator with the published statistics: they are marked *generated*, and count for
direction alone.

{requests_text}

{fit_text}
"""


def render_page(
    results: Mapping[str, Sequence[RowResult]],
    num_requests: int,
    whole: Collection[str] = (),
) -> str:
    """Return the page that compares the paper's tables with ours, in Markdown.

    Args:
       results: rows by table.
       num_requests: requests of each run; 0 for all.
       whole: tables whose runs served the whole trace nevertheless.
    """
    tables = list_tables(list(results))
    text = "Each run is whole."
    if num_requests:
        text = f"Each run serves the first {num_requests:,} requests of the trace, or of its load"
        text += "; those of tables marked *whole* serve all of the trace." if whole else "."
    fits = [
        f"Fitted: `{fit.path}` = {fit.value:g}, to the row *{fit.row}* of "
        f"*{list_tables([fit.table])[fit.table].title}*. {fit.why.strip()}"
        for fit in read_fits()
    ]
    options = " ".join([f"--requests {num_requests}", *(f"--whole {name}" for name in whole)])
    lines = [
        INTRODUCTION.format(
            options=options,
            requests_text=text,
            fit_text="\n\n".join(fits),
        )
    ]
    counted = [
        each
        for rows in results.values()
        for each in rows
        if each.off is not None and not each.row.load and not each.row.is_fitted
    ]
    near = sum(abs(each.off or 0.0) <= NEAR for each in counted)
    every = [each for rows in results.values() for each in rows]
    right = sum(each.is_right for each in every)
    lines.append(
        f"**{right} of {len(every)} rows are right in direction and order. Of the {len(counted)} "
        "of the conversation trace that have a published number and were not fitted, "
        f"{near} are within {NEAR:.0%}.**"
    )
    for name, rows in results.items():
        table = tables[name]
        mark = " *Whole.*" if name in whole else ""
        lines += ["", f"## {table.title}", "", f"{table.source}. {table.what.strip()}{mark}", ""]
        lines += [
            f"| row | published | ours ({table.unit}) | off | direction |",
            "|---|---|---|---|---|",
        ]
        for each in rows:
            published = "" if each.row.published is None else f"{each.row.published:g}"
            off = "" if each.off is None else f"{each.off:+.0%}"
            off = "fitted" if each.row.is_fitted else off
            direction = "right" if each.is_right else "**wrong**"
            lines.append(
                f"| {each.row.name} | {published} | {each.ours:.3g} | {off} | {direction} |"
            )
        reasons = _read_reasons().get(name)
        if reasons:
            lines += ["", reasons.strip()]
    lines += [
        "",
        "## Reproduced by other commands",
        "",
        "| published | command | ours |",
        "|---|---|---|",
    ]
    lines += [
        f"| {each['what']} | {each['command']} | {each['ours']} |"
        for each in _read("elsewhere.yaml")
    ]
    lines += [
        "",
        "## What is not reproduced here",
        "",
        "| published | command | needs |",
        "|---|---|---|",
    ]
    lines += [
        f"| {each['what']} | {each['command']} | {each['needs']} |"
        for each in _read("lacking.yaml")
    ]
    return "\n".join(lines) + "\n"


def _read_reasons() -> dict[str, str]:
    """Return the explanations of tables that differ from the paper, by table."""
    return _read("reasons.yaml") or {}
