"""``tandem export``: merge an adapter into a checkpoint."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.extras import require_extra

__all__ = ["export"]


def export(
    model: Annotated[str, typer.Argument(help="Folder, hub id or `demo`.")],
    adapter: Annotated[Path, typer.Option(help="Folder of a LoRA adapter.")],
    out: Annotated[Path, typer.Option(help="New folder for the merged checkpoint.")],
) -> None:
    """Write a checkpoint whose weights include the adapter, as safetensors."""
    require_extra("finetune", "safetensors")
    from tandem.finetune.export import export_merged

    sys.stdout.write(f"{export_merged(model, adapter, out)}\n")
