"""Merging an adapter into the checkpoint's weights, one tensor at a time."""

import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tandem.core.errors import ConflictError, UnsupportedError
from tandem.finetune.artefacts import name_full_disk
from tandem.finetune.recipes.targets import find_expert_shapes
from tandem.finetune.training.checkpoints import publish_folder
from tandem.models.adapter_files import ExpertShapes, LoraWeights, read_adapter_files
from tandem.models.families import open_checkpoint
from tandem.models.loading.skeleton import build_skeleton
from tandem.models.sources.safetensors import read_header

__all__ = ["export_merged"]

WHERE = "finetune.export"
Merge = Callable[[Tensor], Tensor]
"""A function that returns a stored weight with the adapter added to it."""


def export_merged(model: str, adapter_folder: str | Path, export_dir: str | Path) -> Path:
    """Write a copy of a checkpoint with an adapter added to its weights, as safetensors; return its
    folder.

    Sums are computed in float32 and rounded once to the stored dtype. At most one file of the
    checkpoint is in memory. The files are written to another folder, which is renamed when all of
    it is on the disk.

    Args:
        model: the checkpoint: a folder, a hub id that was pulled before, or ``demo``.
        adapter_folder: folder of an adapter in PEFT's format.
        export_dir: the folder to make; it must not exist, or be empty.

    Raises: the errors of ``read_adapter_files``; ConflictError (``export_dir`` has files);
        UnsupportedError (the checkpoint is quantized, or lacks a weight of the adapter);
        CapacityError (the disk is full).
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

    skeleton = dict(build_skeleton(checkpoint.config, None).named_modules())

    def find_experts(name: str) -> ExpertShapes:
        return find_expert_shapes(skeleton[name]) if name in skeleton else {}

    adapter = read_adapter_files(Path(adapter_folder), find_shape, find_experts=find_experts)
    merges: dict[str, Merge] = {
        f"{name}.weight": partial(_add, lora) for name, lora in adapter.modules.items()
    }
    for name, lora in adapter.experts.items():
        base, _, key = name.rpartition(".")
        module = skeleton[base]
        count = find_expert_shapes(module)[key][0]
        is_transposed = bool(getattr(module, "is_transposed", False))
        merges |= _list_expert_merges(name, lora, count, shapes, is_transposed=is_transposed)
    final = Path(export_dir)
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise ConflictError(WHERE, f"{final} holds something: name a new folder")
    unfinished = final.with_name(f".{final.name}.partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        with name_full_disk(final.parent, "free space there, or name a folder elsewhere"):
            for path in files:
                _merge_file(path, unfinished / path.name, merges)
            for path in checkpoint.folder.iterdir():
                if path.suffix in (".json", ".jinja", ".txt", ".model") and path.is_file():
                    shutil.copyfile(path, unfinished / path.name)
            if final.exists():
                final.rmdir()
            publish_folder(unfinished, final)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return final


def _list_shapes(files: list[Path]) -> dict[str, tuple[int, ...]]:
    return {name: entry.shape for path in files for name, entry in read_header(path).items()}


def _list_expert_merges(
    name: str,
    lora: LoraWeights,
    count: int,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    is_transposed: bool,
) -> dict[str, Merge]:
    """Return, by tensor of the checkpoint, the function that adds an adapter of routed experts to
    it.

    The checkpoint has one tensor for all experts of a layer, or tensors for each expert.

    Args:
        name: dotted name of the experts' parameter.
        lora: the adapter's factors for all experts.
        count: number of experts.
        shapes: shapes of the checkpoint's tensors by name.
        is_transposed: True if the tensor for all experts has inputs first.

    Raises: UnsupportedError (the checkpoint has the experts in neither form).
    """
    a_ERK = lora.a_RK.to(torch.float32).view(count, -1, lora.a_RK.shape[1])  # noqa: N806
    b_NRE = lora.b_NR.to(torch.float32).view(len(lora.b_NR), -1, count)  # noqa: N806
    own = [LoraWeights(a_ERK[i], b_NRE[..., i].contiguous(), lora.scale) for i in range(count)]
    if name in shapes:
        return {name: partial(_add_stacked, own, is_transposed=is_transposed)}
    base, _, key = name.rpartition(".")
    parts = ("gate_proj", "up_proj") if key == "gate_up_proj" else (key,)
    size = len(lora.b_NR) // len(parts)
    merges: dict[str, Merge] = {}
    for i, weights in enumerate(own):
        for j, part in enumerate(parts):
            stored = f"{base}.{i}.{part}.weight"
            if stored not in shapes:
                what = (
                    f"the checkpoint has neither {name} nor {stored}: such experts are not merged"
                )
                raise UnsupportedError(WHERE, what)
            rows = weights.b_NR[j * size : (j + 1) * size]
            merges[stored] = partial(_add, LoraWeights(weights.a_RK, rows, lora.scale))
    return merges


def _merge_file(source: Path, target: Path, merges: Mapping[str, Merge]) -> None:
    tensors: dict[str, Tensor] = {}
    with safe_open(source, framework="pt") as file:
        metadata = file.metadata()
        for name in file.keys():  # noqa: SIM118 - not a mapping
            weight = file.get_tensor(name)
            tensors[name] = merges[name](weight) if name in merges else weight
    save_file(tensors, target, metadata=metadata or {"format": "pt"})


def _add(lora: LoraWeights, weight: Tensor) -> Tensor:
    update = lora.b_NR.to(torch.float32) @ lora.a_RK.to(torch.float32)
    return weight.to(torch.float32).add_(update, alpha=lora.scale).to(weight.dtype)


def _add_stacked(own: list[LoraWeights], weight: Tensor, *, is_transposed: bool) -> Tensor:
    merged = torch.empty_like(weight, memory_format=torch.contiguous_format)
    for out, lora, matrix in zip(merged, own, weight, strict=True):
        out.copy_(_add(lora, matrix.t()).t() if is_transposed else _add(lora, matrix))
    return merged
