"""Plan of a model that transformers' own modules run, and the choice between them and our
operators.
"""

from math import prod
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from tandem.core.errors import ConfigError, TandemError, UnsupportedError
from tandem.core.model.plan import (
    NO_FORMAT,
    FormatChoice,
    MatrixPlan,
    ModelPlan,
    OwnModules,
)
from tandem.core.spec import DTYPE_BYTES, ModelSpec
from tandem.models.families import Checkpoint, open_checkpoint
from tandem.models.identity import list_config_values
from tandem.models.own.context import find_steady_context
from tandem.models.own.gate import find_class, open_own
from tandem.models.own.prove import require_own_proof
from tandem.models.planning.planner import plan_model
from tandem.models.planning.precision import choose_dtype, set_auto_dtype
from tandem.models.proof.require import ProofPolicy, require_proof

__all__ = ["open_served", "plan_own", "plan_served"]

CHOICE = FormatChoice(weight_format=NO_FORMAT, reason="transformers' own modules hold tensors")
PIECE = 256
"""Tokens of a piece of a prompt: enough for torch to multiply at nearly full speed."""
MEASURED = (32, 96)
"""Token counts at which the bytes of a cache object are measured."""


def plan_served(
    path_or_id: str | Path, *, proof: ProofPolicy = "auto", **settings: Any
) -> ModelPlan:
    """Plan a model with our operators, or, if these do not support it, with transformers' own
    modules.

    Args:
        path_or_id: as for ``plan_model``.
        proof: as for ``require_proof``.
        **settings: further arguments of ``plan_model``.

    Raises: the errors of ``plan_model`` and ``require_proof``, with the reason why transformers'
        own modules cannot run the model either.
    """
    try:
        _open_for_operators(path_or_id)
        plan = plan_model(path_or_id, **settings)
        require_proof(path_or_id, proof)
    except UnsupportedError as refusal:
        try:
            wishes = {name: settings[name] for name in ("dtype", "device") if name in settings}
            return plan_own(path_or_id, refusal, proof=proof, **wishes)
        except UnsupportedError as error:
            what = f"{refusal.what}; nor by transformers' own modules: {error.what}"
            raise UnsupportedError(refusal.where, what, field=refusal.field) from error
    return plan


def open_served(path_or_id: str | Path) -> Checkpoint:
    """Open a checkpoint for our operators, or else for transformers' own modules, without trying
    either on a tiny model.

    Raises: the errors of ``open_checkpoint``.
    """
    try:
        return _open_for_operators(path_or_id)
    except UnsupportedError as refusal:
        try:
            return open_own(path_or_id)
        except UnsupportedError:
            raise refusal from None


def _open_for_operators(path_or_id: str | Path) -> Checkpoint:
    """Open a checkpoint for our operators; if only transformers accepts it, it counts as
    unsupported.

    Raises: the errors of ``open_checkpoint``.
    """
    try:
        return open_checkpoint(path_or_id)
    except ConfigError as refusal:
        try:
            open_own(path_or_id)
        except TandemError:
            raise refusal from None
        raise UnsupportedError(refusal.where, refusal.what, field=refusal.field) from refusal


def plan_own(
    path_or_id: str | Path,
    refusal: TandemError,
    *,
    proof: ProofPolicy = "auto",
    dtype: str = "auto",
    device: str = "cpu",
) -> ModelPlan:
    """Plan a checkpoint with transformers' own modules.

    Args:
        path_or_id: its folder, or a hub id that was pulled before.
        refusal: the reason why our operators do not run it.
        proof: ``off`` accepts the class without proof.
        dtype: as for ``plan_model``.
        device: must be ``cpu``.

    Raises: the errors of ``open_own``; UnsupportedError (the class computes something else when its
        cache is continued, or transformers fails).
    """
    if device != "cpu":
        what = f"transformers' own modules run on the CPU here, not on {device}"
        raise UnsupportedError("models.plan_own", what, field="model.device")
    checkpoint = open_own(path_or_id)
    proved = None if proof == "off" else require_own_proof(checkpoint)
    piece = PIECE if proved is None else proved.piece or PIECE
    skeleton = build_own_skeleton(checkpoint.config)
    spec = _complete_spec(checkpoint, skeleton)
    spec = choose_dtype(set_auto_dtype(spec, is_coded=False), dtype)
    token_bytes, fixed_bytes = _count_cache_bytes(skeleton, spec)
    context, context_reason = find_steady_context(checkpoint.config, spec.max_position_embeddings)
    spec = replace(spec, max_position_embeddings=context)
    parameters = dict(skeleton.named_parameters())
    vectors = sum(p.numel() for p in parameters.values() if p.dim() < 2)
    return ModelPlan(
        folder=str(checkpoint.folder),
        spec=spec,
        device="cpu",
        config=list_config_values(checkpoint.config),
        layers=(),
        modules=(),
        other_matrices=tuple(
            MatrixPlan(
                module=name.rpartition(".")[0],
                role="other",
                shape=tuple(parameter.shape),
                weight_format=NO_FORMAT,
                device="cpu",
                size_bytes=prod(parameter.shape) * DTYPE_BYTES[spec.dtype],
                plain_bytes=prod(parameter.shape) * DTYPE_BYTES[spec.dtype],
                reason=CHOICE.reason,
            )
            for name, parameter in parameters.items()
            if parameter.dim() >= 2
        ),
        vector_bytes=vectors * DTYPE_BYTES[spec.dtype],
        experts=CHOICE,
        linear=CHOICE,
        router=CHOICE,
        expert_parts=1,
        packed_cache="off",
        context_reason=context_reason,
        own=OwnModules(
            reason=refusal.what,
            piece=piece,
            token_bytes=token_bytes,
            fixed_bytes=fixed_bytes,
            has_our_experts=proved is not None and proved.has_our_experts,
        ),
    )


def build_own_skeleton(config: Any) -> nn.Module:
    """Build transformers' model of a configuration on the meta device.

    Raises: UnsupportedError (transformers fails).
    """
    try:
        with torch.device("meta"):
            return find_class(config)(config).eval()
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        what = f"transformers fails: {type(error).__name__}: {text}"
        raise UnsupportedError("models.build_own", what) from error


def _complete_spec(checkpoint: Checkpoint, skeleton: nn.Module) -> ModelSpec:
    """Return the checkpoint's spec, completed with what only the skeleton's modules tell, such as
    the number of weights and positions.
    """
    spec = checkpoint.spec
    total = sum(p.numel() for p in skeleton.parameters())
    positions = [
        m.num_embeddings - m.padding_idx - 1
        for name, m in skeleton.named_modules()
        if name.endswith("position_embeddings")
        and isinstance(m, nn.Embedding)
        and m.padding_idx is not None
    ]
    return replace(
        spec,
        num_parameters=total,
        num_active_parameters=total,
        max_position_embeddings=min([spec.max_position_embeddings, *positions]),
    )


def _count_cache_bytes(skeleton: Any, spec: ModelSpec) -> tuple[int, int]:
    """Return the bytes that a token adds to a cache object, and the bytes that do not grow."""
    own_bytes = DTYPE_BYTES[spec.dtype] / DTYPE_BYTES["float32"]
    sizes: list[float] = []
    try:
        for count in MEASURED:
            with torch.device("meta"), torch.inference_mode():
                ids = torch.zeros(1, count, dtype=torch.int64)
                output = skeleton(input_ids=ids, use_cache=True)
            held = [v for k, v in output.items() if k not in ("logits", "loss")]
            sizes.append(_count_bytes(held, set()) * own_bytes)
    except Exception:  # noqa: BLE001 - code that looks at values does not run without any
        # If measuring fails, estimate bytes per token as keys and values of every KV head in every
        # layer.
        items = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim
        return items * DTYPE_BYTES[spec.dtype], 0
    growth = (sizes[1] - sizes[0]) / (MEASURED[1] - MEASURED[0])
    return int(growth), max(int(sizes[0] - growth * MEASURED[0]), 0)


def _count_bytes(value: Any, seen: set[int]) -> int:
    """Return the bytes of all tensors that an object holds."""
    if id(value) in seen or isinstance(value, nn.Module):
        return 0
    seen.add(id(value))
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(_count_bytes(v, seen) for v in value.values())
    if isinstance(value, (list, tuple)):
        return sum(_count_bytes(v, seen) for v in value)
    return _count_bytes(vars(value), seen) if hasattr(value, "__dict__") else 0
