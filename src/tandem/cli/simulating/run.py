"""``tandem sim run``: simulate a scenario in virtual time."""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from tandem.cli.output import JsonFlag, print_json, print_table
from tandem.cli.simulating.studies import read_changed

if TYPE_CHECKING:
    from tandem.sim.cluster.run import SimReport

__all__ = ["run"]

COLUMNS = (
    "instance",
    "role",
    "busy",
    "steps",
    "prompts",
    "hits",
    "by the store",
    "GB sent",
    "preempted",
)


def run(
    scenario: Annotated[Path, typer.Argument(help="YAML file of a scenario.")],
    trace: Annotated[
        Path | None, typer.Option(help="Trace in Mooncake's format, in the place of its own.")
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(help="File of tandem sim calibrate: machines as that server's instances."),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="PATH=VALUE",
            help="Replace a field, as load.rate_scale=2 or instances.*.count=8; may be repeated.",
        ),
    ] = None,
    output_file: Annotated[
        Path | None, typer.Option(help="Append the figures as a JSON line.")
    ] = None,
    output_details: Annotated[
        Path | None, typer.Option(help="Write a JSON line for each request.")
    ] = None,
    decisions: Annotated[
        Path | None, typer.Option(help="Write a JSON line for each decision.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the run, as PNG or SVG.")] = None,
    page: Annotated[
        Path | None, typer.Option(help="Write picture and figures as one HTML file.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Serve a trace with simulated instances; print what its users would have seen."""
    from tandem.bench.clients.report import render_report
    from tandem.sim.cluster.run import open_load, run_scenario
    from tandem.sim.study.pictures import draw_load, write_page

    wished = read_changed(scenario, trace, changes, calibration)
    with show_bar() as on_done:
        outcome = run_scenario(wished, open_load(wished.load), on_done=on_done)
    report = outcome.report
    if output_file is not None:
        with output_file.open("ab") as file:
            file.write(msgspec.json.encode(report) + b"\n")
    if output_details is not None:
        _write_lines(output_details, outcome.records)
    if decisions is not None:
        _write_lines(decisions, outcome.decisions)
    if plot is not None:
        draw_load(outcome, plot)
    if page is not None:
        with tempfile.TemporaryDirectory() as folder:
            picture = Path(folder) / "run.png"
            draw_load(outcome, picture)
            title = report.scenario or scenario.stem
            tables = {"Figures": _list_figures(report), "Instances": [COLUMNS, *_list_rows(report)]}
            write_page(page, title, tables, [picture])
    if json:
        print_json(report)
        return
    sys.stdout.write(render_report(report) + "\n")
    print_table(COLUMNS, _list_rows(report), f"{report.events:,} events")


def _list_rows(report: "SimReport") -> list[tuple[object, ...]]:
    return [
        (
            each.name,
            each.role,
            f"{each.busy_s / max(report.duration, 1e-9):.0%}",
            each.steps,
            each.requests,
            f"{each.hit_tokens / max(each.prompt_tokens, 1):.1%}",
            f"{each.store_hit_tokens / max(each.prompt_tokens, 1):.1%}",
            f"{each.sent_bytes / 1e9:.0f}",
            each.preemptions,
        )
        for each in report.instances
    ]


def _list_figures(report: "SimReport") -> list[tuple[object, ...]]:
    from tandem.bench.clients.report import render_report

    rows: list[tuple[object, ...]] = [("figure", "value")]
    for line in render_report(report).splitlines():
        name, _, value = line.rpartition(":")
        if name:
            rows.append((name, value.strip()))
    return rows


def _write_lines(path: Path, values: list[Any]) -> None:
    with path.open("wb") as file:
        encoder = msgspec.json.Encoder()
        for value in values:
            file.write(encoder.encode(value) + b"\n")


@contextmanager
def show_bar() -> Iterator[Any]:
    """Give a progress bar of ended requests and virtual time if there is a terminal; otherwise
    None.

    The bar is erased at the end, because otherwise it would be drawn over the figures.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.completed} requests, {task.description}"), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, refresh_per_second=2, transient=True) as progress:
        task = progress.add_task("")

        def show(record: Any) -> None:
            progress.update(task, advance=1, description=f"virtual time {record.done_s:,.0f} s")

        yield show
