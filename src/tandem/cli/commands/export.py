"""``tandem export``: merge an adapter into a checkpoint."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.extras import require_extra
from tandem.cli.output import JsonFlag, print_json, print_next, show_work

__all__ = ["export"]


def export(
    model: Annotated[str, typer.Argument(help="Folder, hub id or `demo`.")],
    adapter: Annotated[Path, typer.Option(help="Folder of a LoRA adapter.")],
    out: Annotated[Path, typer.Option(help="New folder for the merged checkpoint.")],
    json: JsonFlag = False,
) -> None:
    """Write a checkpoint whose weights include the adapter, as safetensors."""
    require_extra("finetune", "safetensors")
    from tandem.finetune.export import export_merged

    with show_work(f"adding {adapter} to the weights of {model}"):
        folder = export_merged(model, adapter, out)
    if json:
        print_json({"folder": str(folder)})
    else:
        sys.stdout.write(f"{folder}\n")
        print_next("tandem", "serve", folder)
