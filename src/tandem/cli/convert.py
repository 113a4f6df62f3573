"""``tandem convert``: pack a model's experts before the first start."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from tandem.cli.output import JsonFlag, print_json

__all__ = ["convert"]

MIB = 1 << 20


def convert(
    model: Annotated[str, typer.Argument(help="Folder, hub id or `demo`.")],
    weight_format: Annotated[
        str, typer.Option("--format", help="Weight format of routed experts: int8, int4, bf16, ...")
    ],
    packed_cache: Annotated[
        str, typer.Option(help="Folder to keep them in; auto is under ~/.cache/tandem.")
    ] = "auto",
    rules: Annotated[Path | None, typer.Option(help="YAML rule file; may name formats.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read everything again and compare checksums.")
    ] = False,
    json: JsonFlag = False,
) -> None:
    """Pack the routed experts of a model for the CPU, so that `tandem serve` maps them.

    `tandem serve MODEL --model.expert-format FORMAT` does the same while it loads. An interrupted
    run goes on where it was; a changed model, format or layout is packed anew.
    """
    from tandem.models.convert import convert_model
    from tandem.models.hub import resolve_folder

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, TimeRemainingColumn(), disable=json, transient=True) as bars:
        task = bars.add_task(model, total=None)

        def show(done: int, total: int, what: str) -> None:
            bars.update(task, completed=done, total=total or None, description=what)

        report = convert_model(
            resolve_folder(model),
            weight_format,
            packed_cache=packed_cache,
            rules=rules,
            is_verified=verify,
            progress=show,
        )
    if json:
        print_json(asdict(report))
    else:
        sys.stdout.write(
            f"{report.folder}: {report.num_files} files in {report.weight_format}, "
            f"{report.size_bytes / MIB:.0f} MiB ({report.source_bytes / MIB:.0f} MiB before); "
            f"{report.num_packed} packed now, {report.num_files - report.num_packed} were there\n"
        )
