"""Merging an adapter into the checkpoint's weights, one tensor at a time."""

import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tandem.core.errors import ConflictError, UnsupportedError
from tandem.finetune.artefacts import name_full_disk
from tandem.finetune.checkpoints import publish_folder
from tandem.models.adapter_files import AdapterFiles, read_adapter_files
from tandem.models.families import open_checkpoint
from tandem.models.sources.safetensors import read_header

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

    Raises: as ``read_adapter_files``; ConflictError (``export_dir`` holds something);
        UnsupportedError (the checkpoint is quantized, or has no such weight).
    """
    checkpoint = open_checkpoint(model)
    if checkpoint.quantization is not None:
        what = f"{model} stores quantized weights, to which nothing can be added: use a bf16 one"
        raise UnsupportedError(WHERE, what)
    files = sorted(checkpoint.folder.glob("*.safetensors"))
    shapes = _list_shapes(files)

    def find_shape(module: str) -> tuple[int, int]:
        shape = shapes.get(f"{module}.weight", ())
        if len(shape) != 2:
            what = f"the checkpoint has no matrix {module}.weight: the adapter is of another model"
            raise UnsupportedError(WHERE, what)
        return shape[0], shape[1]

    adapter = read_adapter_files(Path(adapter_folder), find_shape)
    final = Path(export_dir)
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise ConflictError(WHERE, f"{final} holds something: name a new folder")
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


def _list_shapes(files: list[Path]) -> dict[str, tuple[int, ...]]:
    return {name: entry.shape for path in files for name, entry in read_header(path).items()}


def _merge_file(source: Path, target: Path, adapter: AdapterFiles) -> None:
    tensors: dict[str, Tensor] = {}
    with safe_open(source, framework="pt") as file:
        metadata = file.metadata()
        for name in file.keys():  # noqa: SIM118 - not a mapping
            tensors[name] = _merge(name, file.get_tensor(name), adapter)
    save_file(tensors, target, metadata=metadata or {"format": "pt"})


def _merge(name: str, weight: Tensor, adapter: AdapterFiles) -> Tensor:
    lora = adapter.modules.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
    if lora is None:
        return weight
    update = lora.b_NR.to(torch.float32) @ lora.a_RK.to(torch.float32)
    return weight.to(torch.float32).add_(update, alpha=lora.scale).to(weight.dtype)
