"""``tandem sim paper``: compare the tables of the Mooncake paper with simulated ones."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.output import JsonFlag, print_json, print_table

__all__ = ["paper"]


def paper(
    trace: Annotated[Path, typer.Option(help="The published conversation trace.")],
    table: Annotated[
        list[str] | None, typer.Option(help="A table by name; may be repeated. All without.")
    ] = None,
    requests: Annotated[
        int, typer.Option(min=0, help="Requests of each run at most; 0 is the whole trace.")
    ] = 1000,
    whole: Annotated[
        list[str] | None,
        typer.Option(
            help="A table whose runs are whole whatever --requests says; may be repeated."
        ),
    ] = None,
    fit: Annotated[
        bool,
        typer.Option("--fit", help="Run each fitted row at the values that are tried instead."),
    ] = False,
    work: Annotated[
        Path | None, typer.Option(help="File of runs; what is there is not run again.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the page, Markdown.")] = None,
    json: JsonFlag = False,
) -> None:
    """Simulate the tables of the Mooncake paper (FAST'25) and set ours beside theirs."""
    from tandem.core.loads.traces import read_rows
    from tandem.sim.study.paper import Runs, list_tables, read_fits, render_page

    def show(what: str, done: int) -> None:
        sys.stderr.write(f"run {done + 1}: {what}\n")

    complete = [*list_tables(whole)] if whole else []
    # Read one row first, so that an unreadable file is found before the first run.
    next(read_rows(trace), None)
    runs = Runs(trace, requests, work, show)
    if fit:
        for each in read_fits():
            found = runs.fit(each, 0 if each.table in complete else None)
            tried = [(f"{value:g}", f"{ours:.3g}") for value, ours in found]
            print_table((each.path, f"{each.row} of {each.table}"), tried)
        return
    tables = list_tables(table or [])
    results = {
        name: runs.measure(each, 0 if name in complete else None) for name, each in tables.items()
    }
    if output is not None:
        output.write_text(render_page(results, requests, complete), "utf-8")
    if json:
        print_json(results)
        return
    for name, rows in results.items():
        lines = [
            (
                each.row.name,
                "" if each.row.published is None else f"{each.row.published:g}",
                f"{each.ours:.3g}",
                "" if each.off is None else f"{each.off:+.0%}",
                "right" if each.is_right else "wrong",
            )
            for each in rows
        ]
        columns = ("row", "published", f"ours, {tables[name].unit}", "off", "direction")
        print_table(columns, lines, tables[name].title)
