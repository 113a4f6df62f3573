"""Conversion of a ``ModelPlan`` for this machine to the cost model's view of the model."""

from collections.abc import Sequence
from math import prod

import msgspec

from tandem.core.model.layers import MlaSpec, StateMixerSpec
from tandem.core.model.plan import NO_FORMAT, LayerSpec, MatrixPlan, ModelPlan, MoeSpec
from tandem.core.spec import DTYPE_BYTES
from tandem.placement.costs import DENSE, EXPERTS, Efficiencies, FormatShares, Placement
from tandem.placement.shape import FORMAT_BYTES, ModelShape, ShapeLayer

__all__ = ["fit_formats", "place_served", "read_served"]

BF16_BYTES = 2
MIXER_ROLES = ("qkv", "q_up", "head_matrices", "attention_out", "gates", "other")
MEASURED_AS = (("int8", "int8"), ("q6k", "q6k"), ("q", "q4k"), ("iq", "q4k"))
"""Beginnings of the names of integer formats, each with the format whose measured speed is taken
for theirs; those that begin otherwise have 4 to 6 bits and are taken for int4g32."""
STORED_NAMES = {"f32": "f32", "bf16": "bf16", "float32": "f32", "bfloat16": "bf16"}


def read_served(plan: ModelPlan, *, kv_bytes: int) -> ModelShape:
    """Return the cost model's shape of a model that is planned for this machine.

    Args:
        plan: the model's plan.
        kv_bytes: bytes that a token's KV takes in all layers together.
    """
    spec = plan.spec
    latent = spec.kv_lora_rank + spec.rope_dim
    if spec.index_layers:
        # kv_bytes includes the index keys, which are counted separately, so only the latents' share
        # is kept.
        whole = latent * spec.num_kv_layers + spec.index_dim * len(spec.index_layers)
        kv_bytes = kv_bytes * latent * spec.num_kv_layers // whole
    per_layer = kv_bytes // max(1, spec.num_kv_layers)
    layers = tuple(_read_layer(layer, per_layer, plan) for layer in plan.layers)
    sizes = {m.role: prod(m.shape) for m in plan.other_matrices if m.size_bytes}
    return ModelShape(
        name=spec.name,
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        layers=layers,
        embedding_weights=sizes.get("embedding", spec.vocab_size * spec.hidden_size),
        # If the embedding has no bytes of its own (tied weights), it reads its rows from the head,
        # which then counts as no extra weights.
        head_weights=sizes.get("head", 0) if "embedding" in sizes else 0,
        max_context=spec.max_position_embeddings,
    )


def _read_layer(layer: LayerSpec, kv_bytes: int, plan: ModelPlan) -> ShapeLayer:
    mixer, mlp = layer.mixer, layer.mlp
    weights = {m: prod(m.shape) for m in layer.matrices}
    experts = sum(size for m, size in weights.items() if m.role == "experts")
    attention = sum(size for m, size in weights.items() if m.role in MIXER_ROLES)
    rest = sum(weights.values()) - experts - attention
    is_moe = isinstance(mlp, MoeSpec)
    read = ShapeLayer(
        kind="state",
        attention_weights=attention,
        dense_weights=0 if is_moe else rest,
        shared_weights=rest if is_moe else 0,
        expert_weights=experts // mlp.num_experts if isinstance(mlp, MoeSpec) else 0,
        num_experts=mlp.num_experts if isinstance(mlp, MoeSpec) else 0,
        top_k=mlp.top_k if isinstance(mlp, MoeSpec) else 0,
        row_items=sum(_count_items(m, layer) for m in layer.matrices),
    )
    if mixer is None:
        return read
    if isinstance(mixer, StateMixerSpec):
        layout = plan.spec.state_layout
        size = 0 if layout is None else layout.bytes_per_state // plan.spec.num_state_layers
        return msgspec.structs.replace(read, state_bytes=size)
    if isinstance(mixer, MlaSpec):
        # MLA attention runs on the compressed latents without expanding them, for prompts too.
        ops = 2 * mixer.num_heads * (2 * mixer.rank + mixer.rope)
        kind, window = "mla", 0
        index = mixer.index
        read = msgspec.structs.replace(
            read,
            top_tokens=mixer.top,
            index_bytes=0 if index is None else index.dim * BF16_BYTES,
            index_ops=0 if index is None else 2 * index.num_heads * index.dim,
        )
    else:
        ops, kind, window = 4 * mixer.num_heads * mixer.head_dim, "gqa", mixer.reach
    return msgspec.structs.replace(
        read,
        kind=kind,
        kv_items=kv_bytes // BF16_BYTES,
        window=window,
        prefill_ops=ops,
        decode_ops=ops,
    )


def _count_items(matrix: MatrixPlan, layer: LayerSpec) -> int:
    """Return the inputs and outputs of a matrix for a token; of experts, those that it chooses."""
    items = matrix.shape[-1] + matrix.shape[-2]
    if matrix.role == "experts" and isinstance(layer.mlp, MoeSpec):
        return layer.mlp.top_k * items
    return items


def place_served(plan: ModelPlan, *, chunk_tokens: int) -> Placement:
    """Return the placement of a model that is served on this machine: everything on the CPU.

    Args:
        plan: the model's plan.
        chunk_tokens: most tokens of a step.
    """
    experts = [m for m in plan.matrices if m.role == "experts"]
    dense = [m for m in plan.matrices if m.role not in ("experts", "embedding")]
    dtype = plan.spec.dtype
    return Placement(
        expert_format=_name_group(EXPERTS if experts else DENSE, experts or dense, dtype),
        expert_item_bytes=_mean_bytes(experts or dense, dtype),
        dense_format=_name_group(DENSE, dense, dtype),
        dense_item_bytes=_mean_bytes(dense, dtype),
        is_dense_on_gpu=False,
        is_attention_on_gpu=False,
        deferred=plan.num_deferred_experts,
        chunk_tokens=chunk_tokens,
    )


def fit_formats(plan: ModelPlan, eff: Efficiencies) -> Efficiencies:
    """Return the efficiencies with the shares that a planned model's own mixtures of integer
    formats reach, under the names that ``place_served`` gives them.

    Args:
        plan: the model's plan.
        eff: efficiencies of this machine by format.
    """
    groups = {
        EXPERTS: [m for m in plan.matrices if m.role == "experts"],
        DENSE: [m for m in plan.matrices if m.role not in ("experts", "embedding")],
    }
    dtype = plan.spec.dtype
    mixed = {
        name: _combine_shares(group, eff, dtype)
        for name, group in groups.items()
        if group and _is_integer(_name_kind(group, dtype))
    }
    return msgspec.structs.replace(eff, formats={**eff.formats, **mixed})


def _combine_shares(matrices: Sequence[MatrixPlan], eff: Efficiencies, dtype: str) -> FormatShares:
    """Return the shares that matrices of several formats reach together: means by the time that
    their bytes, and their weights, take.
    """
    default = FormatShares(bandwidth=eff.cpu_bandwidth, compute=eff.cpu_avx)
    total_bytes = total_weights = reading = computing = 0.0
    for matrix in matrices:
        weights, size = prod(matrix.shape), _count_bytes(matrix, dtype)
        names = [dtype] if matrix.weight_format == NO_FORMAT else matrix.weight_format.split("+")
        for name in names:
            shares = eff.formats.get(_find_measured(name), default)
            reading += size / len(names) / shares.bandwidth
            computing += weights / len(names) / shares.compute
        total_bytes, total_weights = total_bytes + size, total_weights + weights
    return FormatShares(bandwidth=total_bytes / reading, compute=total_weights / computing)


def _find_measured(name: str) -> str:
    """Return the measured format whose speed is taken for that of a weight format."""
    stored = STORED_NAMES.get(name)
    if stored is not None or name.startswith("fp8"):
        return stored or name
    return next((known for begin, known in MEASURED_AS if name.startswith(begin)), "int4g32")


def _is_integer(name: str) -> bool:
    return name not in STORED_NAMES.values() and not name.startswith("fp8")


def _count_bytes(matrix: MatrixPlan, dtype: str) -> int:
    # A head that is tied to the embedding stores no bytes of its own but still reads the
    # embedding's, so it is counted at its full size.
    return matrix.size_bytes or prod(matrix.shape) * DTYPE_BYTES[dtype]


def _mean_bytes(matrices: Sequence[MatrixPlan], dtype: str) -> float:
    """Return the average bytes per weight of all matrices; 0 if there are none."""
    num_weights = sum(prod(m.shape) for m in matrices)
    size = sum(_count_bytes(m, dtype) for m in matrices)
    return size / num_weights if num_weights else 0.0


def _name_group(group: str, matrices: Sequence[MatrixPlan], dtype: str) -> str:
    name = _name_kind(matrices, dtype)
    return group if _is_integer(name) else name


def _name_kind(matrices: Sequence[MatrixPlan], dtype: str) -> str:
    """Return the planning format that most of the weights have.

    The format decides between integer and float products; sizes are counted separately.
    """
    sizes: dict[str, int] = {}
    for matrix in matrices:
        name = dtype if matrix.weight_format == NO_FORMAT else matrix.weight_format
        sizes[name] = sizes.get(name, 0) + prod(matrix.shape)
    name = max(sizes, key=lambda each: sizes[each], default=dtype)
    name = STORED_NAMES.get(name, name)
    if name in FORMAT_BYTES:
        return name
    return name[:3] if name.startswith("fp8") else "int8"
