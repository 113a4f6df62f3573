"""``tandem sim run``: a scenario in virtual time."""

import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from tandem.cli.output import JsonFlag, print_json, print_table

__all__ = ["run"]


def run(
    scenario: Annotated[Path, typer.Argument(help="YAML file of a scenario.")],
    trace: Annotated[
        Path | None, typer.Option(help="Trace in Mooncake's format, in the place of its own.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Requests at most, in the place of its own.")
    ] = None,
    rate_scale: Annotated[
        float | None, typer.Option(help="Factor on the rate, in the place of its own.")
    ] = None,
    policy: Annotated[
        str, typer.Option(help="How instances are chosen, in the place of its own.")
    ] = "",
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
    json: JsonFlag = False,
) -> None:
    """Serve a trace with simulated instances; print what its users would have seen."""
    from tandem.bench.clients.report import draw_run, render_report
    from tandem.sim.cluster.run import open_load, run_scenario
    from tandem.sim.cluster.scenario import change_scenario, read_scenario

    wished = change_scenario(
        read_scenario(scenario), trace=trace, limit=limit, rate_scale=rate_scale, policy=policy
    )
    outcome = run_scenario(wished, open_load(wished.load), on_done=make_bar())
    report = outcome.report
    if output_file is not None:
        with output_file.open("ab") as file:
            file.write(msgspec.json.encode(report) + b"\n")
    if output_details is not None:
        _write_lines(output_details, outcome.records)
    if decisions is not None:
        _write_lines(decisions, outcome.decisions)
    if plot is not None:
        draw_run(outcome.records, plot)
    if json:
        print_json(report)
        return
    sys.stdout.write(render_report(report) + "\n")
    rows = [
        (
            each.name,
            each.role,
            f"{each.busy_s / max(report.virtual_s, 1e-9):.0%}",
            each.steps,
            each.requests,
            f"{each.hit_tokens / max(each.prompt_tokens, 1):.1%}",
            f"{each.sent_bytes / 1e9:.0f}",
            each.preemptions,
        )
        for each in report.instances
    ]
    columns = ("instance", "role", "busy", "steps", "prompts", "hits", "GB sent", "preempted")
    print_table(columns, rows, f"{report.events:,} events")


def _write_lines(path: Path, values: list[Any]) -> None:
    with path.open("wb") as file:
        encoder = msgspec.json.Encoder()
        for value in values:
            file.write(encoder.encode(value) + b"\n")


def make_bar() -> Any:
    """Return what shows how many requests ended and when, on a terminal; None elsewhere."""
    if not sys.stderr.isatty():
        return None
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.completed} requests, {task.description}"), TimeElapsedColumn())
    progress = Progress(*columns, console=Console(stderr=True), refresh_per_second=2)
    progress.start()
    task = progress.add_task("")

    def show(record: Any) -> None:
        progress.update(task, advance=1, description=f"virtual time {record.done_s:,.0f} s")

    return show
