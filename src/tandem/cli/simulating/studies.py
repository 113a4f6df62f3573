"""``tandem sim sweep``, ``capacity`` and ``advise``: run one scenario many times."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
import yaml

from tandem.cli.output import JsonFlag, print_json, print_table, show_work
from tandem.core.config import parse_yaml
from tandem.core.errors import ConfigError, NotFoundError

__all__ = ["advise", "capacity", "sweep"]

ScenarioArgument = Annotated[Path, typer.Argument(help="YAML file of a scenario.")]
TraceOption = Annotated[
    Path | None, typer.Option(help="Trace in Mooncake's format, in the place of its own.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Replace a field; may be repeated."),
]


class Figure(StrEnum):
    """The diagrams (goodput, time to first token) that a sweep of simulations can draw."""

    GOODPUT = "goodput"
    TTFT = "ttft"


FIGURES = ("request_throughput", "goodput", "attained", "hit_ratio")


def read_changed(
    path: Path, trace: Path | None, changes: list[str] | None, calibration: Path | None = None
) -> Any:
    """Return a scenario with the fields that the command line replaces.

    Raises: errors of ``read_scenario``, ``read_calibration`` and ``change_scenario``.
    """
    from tandem.sim.cluster.calibration import calibrate_scenario, read_calibration
    from tandem.sim.cluster.scenario import change_scenario, parse_changes, read_scenario

    given = parse_changes(changes or [])
    if trace is not None:
        given |= {"load.trace": str(trace.absolute()), "load.generator": None}
    wished = read_scenario(path)
    if calibration is not None:
        wished = calibrate_scenario(wished, read_calibration(calibration))
    return change_scenario(wished, given)


def sweep(
    scenario: ScenarioArgument,
    axes: Annotated[
        list[str],
        typer.Argument(metavar="PATH=V1,V2...", help="Fields and their values; all combinations."),
    ],
    output: Annotated[
        Path, typer.Option(help="File of results, a JSON line a run; what is there is not run.")
    ],
    trace: TraceOption = None,
    changes: SetOption = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at once.")] = 1,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw a figure against the rate as PNG, a curve a combination."),
    ] = None,
    figure: Annotated[
        Figure, typer.Option(help="The figure of --plot; goodput needs objectives (slo).")
    ] = Figure.GOODPUT,
    json: JsonFlag = False,
) -> None:
    """Run every combination of some fields' values; go on where an earlier sweep was stopped."""
    from tandem.sim.study.sweeps import run_sweep

    def show(point: Any, done: int, total: int) -> None:
        sys.stderr.write(f"{done} of {total}: {point.values}\n")

    wished = read_changed(scenario, trace, changes)
    points = run_sweep(wished, axes, output, jobs=jobs, on_done=show)
    if plot is not None:
        from tandem.sim.study.pictures import GOODPUT, draw_curves

        curves: dict[str, list[tuple[float, float]]] = {}
        for point in points:
            rest = {k: v for k, v in point.values.items() if k != "load.rate_scale"}
            name = ", ".join(f"{k}={v}" for k, v in rest.items())
            value = point.report["goodput"]
            if figure is Figure.TTFT:
                value = (point.report["ttft_ms"] or {"mean": 0.0})["mean"] / 1e3
            if value is None:
                raise ConfigError("sim.sweep", "--plot: the scenario has no objectives (slo)")
            rate = (point.report["completed"] + point.report["failed"]) / point.report["load_s"]
            curves.setdefault(name, []).append((rate, value))
        label = GOODPUT if figure is Figure.GOODPUT else "mean time to first token (s)"
        draw_curves(curves, plot, label)
    if json:
        print_json(points)
        return
    names = list(points[0].values)
    rows = [
        (
            *point.values.values(),
            f"{(point.report['ttft_ms'] or {'mean': 0})['mean'] / 1e3:.2f}",
            f"{(point.report['tpot_ms'] or {'mean': 0})['mean']:.1f}",
            *(_round(point.report[name]) for name in FIGURES),
        )
        for point in points
    ]
    print_table((*names, "TTFT s", "TPOT ms", "req/s", "goodput", "attained", "hits"), rows)


def _round(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def capacity(
    scenario: ScenarioArgument,
    trace: TraceOption = None,
    changes: SetOption = None,
    share: Annotated[
        float, typer.Option(min=0, max=1, help="Of requests that have to keep the objectives.")
    ] = 0.9,
    tolerance: Annotated[float, typer.Option(min=0.001, help="Relative, of the rate.")] = 0.05,
    prices: Annotated[
        Path | None, typer.Option(help="YAML: US dollars an hour by machine.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Find the largest rate at which enough requests keep the scenario's objectives."""
    from tandem.sim.cluster.run import open_load, run_scenario
    from tandem.sim.cluster.scenario import change_scenario
    from tandem.sim.study.capacity import Probe, find_capacity, price_hour, price_tokens

    wished = read_changed(scenario, trace, changes)
    if not wished.slo.is_set:
        raise ConfigError("sim.capacity", "the scenario has no objectives: give slo", field="slo")
    usd = None if prices is None else price_hour(wished, _read_prices(prices))

    def measure(scale: float) -> Probe:
        base = wished.load.rate_scale
        changed = change_scenario(wished, {"load.rate_scale": base * scale})
        report = run_scenario(changed, open_load(changed.load)).report
        probe = Probe(
            rate_scale=scale,
            request_rate=(report.completed + report.failed) / report.load_s,
            attained=report.attained or 0.0,
            goodput=report.goodput or 0.0,
            tokens_per_s=report.total_throughput,
        )
        sys.stderr.write(f"{probe.request_rate:.3f} requests/s: {probe.attained:.1%} in time\n")
        return probe

    found = find_capacity(measure, share=share, tolerance=tolerance)
    if usd is not None and found.best is not None:
        cost = price_tokens(usd, found.best.tokens_per_s)
        found = msgspec.structs.replace(found, usd_per_hour=usd, usd_per_million_tokens=cost)
    if json:
        print_json(found)
        return
    rows = [
        (f"{p.request_rate:.3f}", f"{p.attained:.1%}", f"{p.goodput:.3f}", f"{p.tokens_per_s:.0f}")
        for p in found.probes
    ]
    print_table(("requests/s", "in time", "goodput", "tokens/s"), rows)
    if found.best is None:
        sys.stdout.write("no rate that was tried is served in time\n")
        return
    sys.stdout.write(f"{found.best.request_rate:.3f} requests/s are served\n")
    if found.usd_per_million_tokens is not None:
        sys.stdout.write(f"${found.usd_per_million_tokens:.3f} a million tokens\n")


def advise(
    scenario: ScenarioArgument,
    prices: Annotated[
        Path, typer.Option(help="YAML: US dollars an hour by machine; all are candidates.")
    ],
    budget: Annotated[
        float | None, typer.Option(min=0, help="US dollars an hour of the whole cluster.")
    ] = None,
    trace: TraceOption = None,
    changes: SetOption = None,
    json: JsonFlag = False,
) -> None:
    """Say which machine to add next: the one with which most requests keep the objectives."""
    from tandem.core.errors import CapacityError
    from tandem.sim.cluster.run import make_setups, open_load, run_scenario
    from tandem.sim.study import advice

    wished = read_changed(scenario, trace, changes)
    if not wished.slo.is_set:
        raise ConfigError("sim.advise", "the scenario has no objectives: give slo", field="slo")
    options: list[advice.Option] = []
    for option in advice.list_options(wished, _read_prices(prices), budget):
        try:
            make_setups(option.scenario)
        except CapacityError as error:
            sys.stderr.write(f"{option.machine}: {error.what}\n")
        else:
            options.append(option)

    def measure(changed: Any) -> tuple[float, float]:
        report = run_scenario(changed, open_load(changed.load)).report
        return report.attained or 0.0, report.goodput or 0.0

    with show_work(f"simulating {len(options)} clusters"):
        found = advice.advise(options, measure)
    if json:
        print_json(found)
        return
    rows = [
        (
            each.machine or "as it is",
            each.role,
            f"{each.usd_per_hour:.2f}",
            f"{each.attained:.1%}",
            f"{each.goodput:.3f}",
        )
        for each in found
    ]
    print_table(("add", "role", "$ an hour", "in time", "goodput"), rows)


def _read_prices(path: Path) -> dict[str, float]:
    try:
        return msgspec.convert(parse_yaml(path.read_text("utf-8")), dict[str, float], strict=False)
    except OSError as error:
        what = f"cannot read {path}: {error.strerror}: give a YAML file of prices"
        raise NotFoundError("sim.capacity", what) from error
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        raise ConfigError("sim.capacity", f"{path}: dollars an hour by machine: {error}") from error
