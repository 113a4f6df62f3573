"""The model that is tuned: transformers' modules with frozen weights from our sources.

Attention, norms and dense blocks run in torch and take gradients there; routed experts are our
operator, whose backward pass is native (``tandem.kernels.cpu.experts``). Only adapters are trained.
"""

from dataclasses import dataclass
from typing import Any

import torch

from tandem._native import ThreadPool, read_topology, recommend_threads
from tandem.core.errors import ConfigError, UnsupportedError
from tandem.core.model.plan import ModulePlan
from tandem.finetune.recipes.targets import find_expert_shapes, find_targets
from tandem.finetune.training.expert_adapters import name_parameters
from tandem.finetune.training.frozen_linear import FrozenLinear
from tandem.kernels.operators.operator import Operator
from tandem.kernels.weights.formats import WeightFormat, find_format
from tandem.models.families import Checkpoint, open_checkpoint
from tandem.models.loading.builders import Resources, build_operator
from tandem.models.loading.injection import require_no_meta
from tandem.models.loading.loader import load_weights
from tandem.models.loading.skeleton import build_skeleton
from tandem.models.planning.describe import Describer, describe_experts
from tandem.models.planning.probes import UnfitModuleError
from tandem.models.sources.containers import open_source
from tandem.models.sources.source import Progress

__all__ = ["FrozenModel", "choose_format", "count_weight_bytes", "load_frozen", "load_tokenizer"]


@dataclass(frozen=True, slots=True)
class FrozenModel:
    """A loaded model, and how its weights are stored."""

    model: Any
    """transformers' model; no parameter takes a gradient."""
    checkpoint: Checkpoint
    expert_format: WeightFormat | None
    linear_format: WeightFormat | None


def choose_format(name: str, *, is_bf16: bool) -> WeightFormat | None:
    """Return the format of a setting; None keeps tensors.

    Args:
        name: of a format; ``none``, or ``auto``: bf16 packed where the run is in bf16.
        is_bf16: whether the run is in bf16.

    Raises: ConfigError.
    """
    if name == "none" or (name == "auto" and not is_bf16):
        return None
    if name == "auto":
        return find_format("bf16")
    try:
        return find_format(name)
    except KeyError as error:
        raise ConfigError("finetune.choose_format", str(error), field="expert_format") from error


def load_tokenizer(checkpoint: Checkpoint) -> Any:
    """Return transformers' tokenizer of a checkpoint.

    Raises: UnsupportedError (it would need code of the checkpoint, or is missing).
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint.folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        what = f"no tokenizer in {checkpoint.folder}: {error}"
        raise UnsupportedError("finetune.load_tokenizer", what) from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_frozen(
    path_or_id: str,
    *,
    is_bf16: bool = False,
    expert_format: str = "auto",
    linear_format: str = "none",
    pool: ThreadPool | None = None,
    num_threads: int | None = None,
    is_head_packed: bool = True,
    progress: Progress | None = None,
) -> FrozenModel:
    """Load a checkpoint to train adapters on it.

    Args:
        path_or_id: folder, hub id that was pulled before, or ``demo``.
        is_bf16: tensors in bfloat16 instead of float32.
        expert_format: weight format of routed experts; see ``choose_format``.
        linear_format: of attention, shared experts, dense blocks, and of a head that is not the
            embedding's matrix.
        pool: runs the native kernels, kept; None = one of ``num_threads``.
        num_threads: of that pool; None = as many as the machine allows.
        is_head_packed: whether ``linear_format`` is the head's as well.
        progress: called after each tensor.

    Raises: as ``load_model``.
    """
    checkpoint = open_checkpoint(path_or_id)
    if pool is None:
        pool = ThreadPool(num_threads or recommend_threads(read_topology()).threads)
    experts = choose_format(expert_format, is_bf16=is_bf16)
    linear = choose_format(linear_format, is_bf16=is_bf16)
    # The fastest that transformers has for this architecture.
    model = build_skeleton(checkpoint.config, None)
    replaced = {} if experts is None else _replace_experts(model, experts, pool)
    if linear is not None:
        heads = _find_own_head(model) if is_head_packed else []
        for name in [*find_targets(model, "all"), *heads]:
            old = model.get_submodule(name)
            model.set_submodule(name, FrozenLinear.of_shape(old, linear, pool))
    dtype = torch.bfloat16 if is_bf16 else torch.float32
    with open_source(
        checkpoint.folder, dtype=dtype, progress=progress, quantization=checkpoint.quantization
    ) as source:
        load_weights(model, checkpoint, source)
    require_no_meta(model)
    for name, shapes in replaced.items():
        name_parameters(model.get_submodule(name), shapes, dtype)
    model.requires_grad_(False)
    model.config.use_cache = False
    # What PEFT calls the base model.
    model.name_or_path = path_or_id
    return FrozenModel(model, checkpoint, experts, linear)


def _find_own_head(model: Any) -> list[str]:
    """Return the name of the head, or none where it shares the embedding's matrix."""
    if model.config.get_text_config().tie_word_embeddings:
        return []
    head = model.get_output_embeddings()
    return [name for name, module in model.named_modules() if module is head]


def _replace_experts(
    model: Any, weight_format: WeightFormat, pool: ThreadPool
) -> dict[str, dict[str, torch.Size]]:
    """Put packed experts in place; return the shapes of the parameters that were there."""
    replaced: dict[str, dict[str, torch.Size]] = {}
    describer = Describer(model)
    for name, module in list(model.named_modules()):
        if not (hasattr(module, "gate_up_proj") and hasattr(module, "down_proj")):
            continue
        if isinstance(module.gate_up_proj, torch.nn.Module):
            continue  # A dense block whose gate and up are one matrix.
        try:
            spec = describer.describe(name, describe_experts)
        except UnfitModuleError as error:
            what = f"{name}: {error}: set expert_format: none"
            raise UnsupportedError("finetune.load", what, field="expert_format") from error
        planned = ModulePlan(
            module=name,
            class_name=type(module).__name__,
            operator="Experts",
            spec=spec,
            weight_format=weight_format.name,
        )
        model.set_submodule(name, build_operator(planned, model, Resources(pool=pool)))
        replaced[name] = {key: getattr(module, key).shape for key in find_expert_shapes(module)}
    return replaced


def count_weight_bytes(model: Any) -> int:
    """Return the bytes of all weights of a loaded model, packed ones included."""
    seen = {p.untyped_storage().data_ptr(): p for p in model.parameters()}
    tensors = sum(p.untyped_storage().nbytes() for p in seen.values())
    packed = [m.packed_bytes for m in model.modules() if isinstance(m, Operator | FrozenLinear)]
    return tensors + sum(packed)
