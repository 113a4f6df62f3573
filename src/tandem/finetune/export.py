"""Merging an adapter into the checkpoint's weights, one tensor at a time."""

import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tandem.core.errors import ConflictError, ShapeError, UnsupportedError
from tandem.finetune.adapters import Adapter, read_adapter
from tandem.finetune.artefacts import name_full_disk
from tandem.finetune.checkpoints import publish_folder
from tandem.models.families import open_checkpoint

__all__ = ["export_merged"]

WHERE = "finetune.export"


def export_merged(model: str, adapter_folder: str | Path, export_dir: str | Path) -> Path:
    """Write the checkpoint with the adapter added to its weights, as safetensors.

    Each sum is taken in float32 and rounded once to the stored dtype. At most one file of the
    checkpoint is in memory. The folder gets its name when all of it is on disk.

    Args:
        model: folder, hub id that was pulled before, or ``demo``.
        adapter_folder: of an adapter in PEFT's format.
        export_dir: made here; must not exist, or be empty.

    Raises: as ``read_adapter``; ConflictError (``export_dir`` holds something); UnsupportedError
        (the checkpoint is quantized, or has no such weight); ShapeError (an update does not fit).
    """
    checkpoint = open_checkpoint(model)
    if checkpoint.quantization is not None:
        what = f"{model} stores quantized weights, to which nothing can be added: use a bf16 one"
        raise UnsupportedError(WHERE, what)
    adapter = read_adapter(Path(adapter_folder))
    final = Path(export_dir)
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise ConflictError(WHERE, f"{final} holds something: name a new folder")
    files = sorted(checkpoint.folder.glob("*.safetensors"))
    missing = {f"{name}.weight" for name in adapter.pairs} - _list_names(files)
    if missing:
        first = min(missing)
        what = f"the checkpoint has no tensor {first}: {len(missing)} of the adapter's do not fit"
        raise UnsupportedError(WHERE, what)
    partial = final.with_name(f".{final.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        with name_full_disk(final.parent, "free space there, or name a folder elsewhere"):
            for path in files:
                _merge_file(path, partial / path.name, adapter)
            for path in checkpoint.folder.iterdir():
                if path.suffix in (".json", ".jinja", ".txt", ".model") and path.is_file():
                    shutil.copyfile(path, partial / path.name)
            if final.exists():
                final.rmdir()
            publish_folder(partial, final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return final


def _list_names(files: list[Path]) -> set[str]:
    names: set[str] = set()
    for path in files:
        with safe_open(path, framework="pt") as file:
            names |= set(file.keys())
    return names


def _merge_file(source: Path, target: Path, adapter: Adapter) -> None:
    tensors: dict[str, Tensor] = {}
    with safe_open(source, framework="pt") as file:
        metadata = file.metadata()
        for name in file.keys():  # noqa: SIM118 - not a mapping
            tensors[name] = _merge(name, file.get_tensor(name), adapter)
    save_file(tensors, target, metadata=metadata or {"format": "pt"})


def _merge(name: str, weight: Tensor, adapter: Adapter) -> Tensor:
    pair = adapter.pairs.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
    if pair is None:
        return weight
    if weight.shape != (len(pair.b_NR), pair.a_RK.shape[1]):
        what = f"{name} is {tuple(weight.shape)}, its update {(len(pair.b_NR), pair.a_RK.shape[1])}"
        raise ShapeError(WHERE, what)
    update = pair.b_NR.to(torch.float32) @ pair.a_RK.to(torch.float32)
    return weight.to(torch.float32).add_(update, alpha=adapter.scale).to(weight.dtype)
