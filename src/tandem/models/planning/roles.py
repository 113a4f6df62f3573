"""Roles of a skeleton's modules, recognised by their parts: roles, matrices and counts.

transformers names the parts of attention, MLPs and experts alike in all families, so no family
needs its own arithmetic: sizes are read from the modules that its class builds on the meta device.
"""

import re
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import nn

from tandem.core.model.plan import AdapterPlace, MatrixRole
from tandem.models.planning.probes import (
    ROTARY_NAMES,
    AttentionCall,
    UnfitModuleError,
    key_module,
    observe_attention,
)

__all__ = [
    "FEED_FORWARD_NAMES",
    "LAYER_NORMS",
    "MIXER_NAMES",
    "RawMatrix",
    "Vectors",
    "count_experts",
    "count_kv_heads",
    "find_base_part",
    "find_down",
    "find_gate_up",
    "find_kv_source",
    "find_output",
    "find_projections",
    "find_qk_norms",
    "has_layered_rope",
    "is_experts",
    "is_gated",
    "is_gated_experts",
    "list_adapter_places",
    "list_matrices",
    "observe_attentions",
]

LAYER_NORMS: tuple[tuple[str, str, str, str], ...] = (
    ("input_layernorm", "", "post_attention_layernorm", ""),
    (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    (
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    ),
    ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    ("operator_norm", "", "ffn_norm", ""),
    ("input_layernorm", "", "pre_ff_layernorm", ""),
)
"""Names of a decoder layer's norms: before and after attention, before and after the MLP; empty:
none. The names that a layer has decide which row applies.
"""

MIXER_NAMES = ("self_attn", "linear_attn", "conv", "mamba", "mixer")
"""Attribute names of a decoder layer's token mixer."""

FEED_FORWARD_NAMES = ("mlp", "feed_forward")
"""Attribute names of a decoder layer's MLP or block of experts."""

OUTPUT_NAMES = ("o_proj", "out_proj")
EXPERT_PARTS = ("gate_up_proj", "up_proj")
"""Names of the first parameter of experts: gate and up, or up alone."""
STEP_PARTS = ("in_proj", "A_log", "dt_bias", "D", "num_heads")
"""Attributes by which a state-space mixer is recognised whose first projection also gives time
steps (Mamba2).
"""
QK_NORM_NAMES = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"))
BASE_NAMES = {
    "embedding": ("embed_tokens", "embeddings"),
    "norm": ("norm", "embedding_norm", "final_layernorm", "norm_f"),
    "rotary": ROTARY_NAMES,
}
"""Attribute names of a decoder's parts outside of its layers."""

ROLES: dict[str, MatrixRole] = {
    "qkv_proj": "qkv",
    "q_proj": "qkv",
    "q_a_proj": "qkv",
    "q_b_proj": "q_up",
    "kv_a_proj_with_mqa": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "kv_b_proj": "q_up",
    "wq_b": "q_up",
    "wk": "qkv",
    "weights_proj": "gates",
    "o_proj": "attention_out",
    "in_proj_qkvz": "qkv",
    "in_proj_qkv": "qkv",
    "in_proj_z": "qkv",
    "g_proj": "qkv",
    "in_proj_ba": "gates",
    "in_proj_b": "gates",
    "in_proj_a": "gates",
    "b_proj": "gates",
    "a_proj": "gates",
    "f_a_proj": "gates",
    "f_b_proj": "gates",
    "g_a_proj": "qkv",
    "g_b_proj": "qkv",
    "in_proj": "qkv",
    "out_proj": "attention_out",
    "gate_up_proj": "gate_up",
    "gate_proj": "gate_up",
    "up_proj": "gate_up",
    "down_proj": "down",
    "w1": "gate_up",
    "w3": "gate_up",
    "w2": "down",
    "input_linear": "gate_up",
    "output_linear": "down",
    "per_layer_input_gate": "other",
    "per_layer_projection": "other",
    "c_fc": "gate_up",
    "c_proj": "down",
    "lm_head": "head",
}
"""Role of a linear module, by the last word of its path."""


ROUTER_NAMES = re.compile(r"\.(gate|router|router\.proj)$")
"""Pattern of the paths of linear modules that score experts."""


@dataclass(frozen=True, slots=True)
class RawMatrix:
    """A matrix of the skeleton as transformers has it, before placement rules choose operators."""

    module: str
    role: MatrixRole
    shape: tuple[int, ...]
    """Shape: [N, K]; experts [E, 3 F, D]; one matrix per attention head [H, N, K]."""
    is_shared: bool = False
    """True if another module listed before holds the same tensor."""


@dataclass(slots=True)
class Vectors:
    """Numbers of the weights of a checkpoint that are not matrices: norms, biases and buffers."""

    num_weights: int = 0
    """Number of weights in norms and biases, which have the model's dtype."""
    num_buffered: int = 0
    """Number of weights in buffers, such as routers' correction biases."""
    buffered_bytes: int = 0
    """Bytes of the buffers, which keep the skeleton's dtype."""


def list_matrices(model: Any, *, is_absorbed: bool = True) -> tuple[list[RawMatrix], Vectors]:
    """Return the matrices of a skeleton, and its other weights.

    Args:
        model: the skeleton.
        is_absorbed: True to split latent attention's up-projection by head, as serving absorbs it;
            False to leave it whole, as training runs it.
    """
    matrices: list[RawMatrix] = []
    vectors = Vectors()
    seen: set[int] = set()
    heads_of: dict[str, Any] = {}
    steps_of: dict[str, int] = {}
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if is_experts(module):
            count, hidden, inner = count_experts(module, model.config.hidden_size)
            rows = (3 if is_gated_experts(module) else 2) * inner
            matrices.append(RawMatrix(name, "experts", (count, rows, hidden)))
            parts = (*EXPERT_PARTS, "down_proj")
            own = {key: p for key, p in own.items() if key not in parts}
        if is_absorbed and hasattr(module, "kv_b_proj"):
            heads_of[f"{name}.kv_b_proj"] = module
        if name in heads_of:
            matrices += _list_head_matrices(name, heads_of[name])
            own.clear()
        if is_absorbed and all(hasattr(module, part) for part in STEP_PARTS):
            steps_of[f"{name}.in_proj"] = module.num_heads
        if name in steps_of:
            matrices += _list_step_matrices(name, own.pop("weight"), steps_of[name])
        for key, buffer in module.named_buffers(recurse=False):
            if key not in module._non_persistent_buffers_set:
                vectors.num_buffered += buffer.numel()
                vectors.buffered_bytes += buffer.numel() * buffer.itemsize
        for key, parameter in own.items():
            if key.endswith("bias") or _is_vector(parameter) or isinstance(module, nn.Conv1d):
                vectors.num_weights += parameter.numel()
                continue
            role = _find_role(name, module)
            is_shared = id(parameter) in seen or _is_tied_head(model, module)
            matrices.append(RawMatrix(name, role, tuple(parameter.shape), is_shared))
            seen.add(id(parameter))
    return matrices, vectors


def list_adapter_places(model: Any) -> list[AdapterPlace]:
    """Return the linear modules that can take adapters: all except routers and the head."""
    head = model.get_output_embeddings()
    return [
        AdapterPlace(module=name, in_features=module.in_features, out_features=module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module is not head
        and _find_role(name, module) != "router"
        and not ROUTER_NAMES.search(name)
    ]


def _is_vector(parameter: nn.Parameter) -> bool:
    """Return True if a parameter has only one dimension larger than 1 and is not a matrix."""
    is_matrix = parameter.dim() == 2
    return not is_matrix and parameter.numel() == max(parameter.shape, default=1)


def _list_head_matrices(name: str, attention: Any) -> list[RawMatrix]:
    """Return the per-head matrices into which latent attention splits its absorbed
    up-projection.
    """
    heads, rank = attention.num_heads, attention.kv_lora_rank
    return [
        RawMatrix(name, "head_matrices", (heads, rank, attention.qk_nope_head_dim)),
        RawMatrix(name, "head_matrices", (heads, attention.v_head_dim, rank)),
    ]


def _list_step_matrices(name: str, weight: Any, num_heads: int) -> list[RawMatrix]:
    """Return the matrices into which a state space's first projection is split: that to time steps
    is apart, as it is stored without loss.
    """
    rows, size = weight.shape
    return [
        RawMatrix(name, "qkv", (rows - num_heads, size)),
        RawMatrix(name, "gates", (num_heads, size)),
    ]


def is_experts(module: Any) -> bool:
    """Return True if a module holds the weights of all its experts in two parameters."""
    first = next((n for n in EXPERT_PARTS if hasattr(module, n)), EXPERT_PARTS[0])
    if hasattr(module, "gate_proj"):
        return False
    tensors = [getattr(module, name, None) for name in (first, "down_proj")]
    return all(isinstance(t, nn.Parameter) and t.dim() == 3 for t in tensors)


def is_gated_experts(module: Any) -> bool:
    """Return True if the experts of a module have a gate beside the up projection."""
    return hasattr(module, EXPERT_PARTS[0])


def count_experts(experts: Any, hidden_size: int) -> tuple[int, int, int]:
    """Return (E, D, F) of experts, whose last two dimensions may be in either order."""
    count, *sizes = experts.down_proj.shape
    if not is_gated_experts(experts):
        # Ungated experts may take latents as inputs, which are narrower than the hidden size, so
        # the width is read from the tensor.
        return count, sizes[0], sizes[1]
    return count, hidden_size, prod(sizes) // hidden_size


def _find_role(name: str, module: nn.Module) -> MatrixRole:
    if isinstance(module, nn.Embedding):
        return "embedding"
    if isinstance(getattr(module, "top_k", None), int) or name.endswith(".router.proj"):
        return "router"
    return ROLES.get(name.rpartition(".")[2], "other")


def _is_tied_head(model: Any, module: nn.Module) -> bool:
    return bool(model.config.tie_word_embeddings) and model.get_output_embeddings() is module


def has_layered_rope(config: Any) -> bool:
    """Return True if layers of different types rotate positions by RoPEs of their own."""
    ropes: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    return any(isinstance(value, dict) for value in ropes.values())


def find_projections(module: Any) -> tuple[str, ...]:
    """Return the names of an attention's projections to q, k and v; empty: it is no attention.

    Without a v projection, keys serve as values; with q alone, another layer's KV is used. A module
    with a convolution keeps a state and is no attention.
    """
    if hasattr(module, "conv1d"):
        return ()
    if getattr(module, "is_kv_shared_layer", False):
        kinds: tuple[tuple[str, ...], ...] = (("q_proj",),)
    else:
        kinds = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",), ("q_proj", "k_proj"))
    for names in kinds:
        parts = (*names, "head_dim")
        if find_output(module) and all(getattr(module, n, None) is not None for n in parts):
            return names
    return ()


def find_output(module: Any) -> str:
    """Return the name of an attention's output projection; empty if there is none."""
    return next((name for name in OUTPUT_NAMES if hasattr(module, name)), "")


def find_qk_norms(module: Any) -> tuple[str, str]:
    """Return the attribute names of the norms of queries and keys, present or not."""
    found = (pair for pair in QK_NORM_NAMES if any(hasattr(module, name) for name in pair))
    return next(found, QK_NORM_NAMES[0])


def find_base_part(model: Any, part: str) -> tuple[str, Any]:
    """Return (path, module) of a decoder's part outside of its layers.

    Args:
        model: the skeleton.
        part: a key of ``BASE_NAMES``.

    Returns: the first name that the decoder has; if it has none, the first name of all, and None.
    """
    names = BASE_NAMES[part]
    name = next((name for name in names if getattr(model.model, name, None) is not None), names[0])
    return f"model.{name}", getattr(model.model, name, None)


def find_kv_source(model: Any, module: Any) -> int:
    """Return the number of the layer whose KV an attention reads instead of its own; -1: none."""
    if not getattr(module, "is_kv_shared_layer", False):
        return -1
    earlier = [layer.self_attn for layer in list(model.model.layers)[: module.layer_idx]]
    sources = [
        other.layer_idx
        for other in earlier
        if not other.is_kv_shared_layer and other.layer_type == module.layer_type
    ]
    return sources[-1] if sources else -1


def observe_attentions(model: Any) -> dict[str, AttentionCall | str]:
    """Return how each attention module calls attention, by path; an error text if it cannot be run.

    The skeleton must be unchanged by rules, since its modules are run.
    """
    found: dict[str, AttentionCall | str] = {}
    # A layer runs for milliseconds even on the meta device, so layers that differ in their index
    # alone are run once.
    seen: dict[object, AttentionCall | str] = {}
    for name, module in model.named_modules():
        if not find_projections(module):
            continue
        key = key_module(module)
        if key not in seen:
            try:
                seen[key] = observe_attention(model, module)
            except UnfitModuleError as error:
                seen[key] = str(error)
        found[name] = seen[key]
    return found


def count_kv_heads(attention: Any, projections: tuple[str, ...]) -> int:
    """Return the number of KV heads of an attention with these projections."""
    heads = getattr(attention, find_output(attention)).in_features // attention.head_dim
    if projections == ("qkv_proj",):
        rows = getattr(attention, projections[0]).out_features // attention.head_dim
        return (rows - heads) // 2
    return attention.k_proj.out_features // attention.head_dim


MLP_NAMES = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("gate_up_proj",), "down_proj"),
    (("up_proj",), "down_proj"),
    (("c_fc",), "c_proj"),
    (("w1", "w3"), "w2"),
    (("input_linear",), "output_linear"),
)
"""Names of a dense MLP's matrices: gate and up, then down."""
UNGATED = (("up_proj",), ("c_fc",))
"""Names of the first matrix of an MLP without a gate."""


def find_gate_up(module: Any) -> tuple[str, ...]:
    """Return the names of a dense MLP's gate and up, or of up alone; empty: it is no such MLP."""
    for names, down in MLP_NAMES:
        if all(isinstance(getattr(module, n, None), nn.Linear) for n in (*names, down)):
            return names
    return ()


def find_down(module: Any) -> str:
    """Return the name of the last matrix of an MLP that ``find_gate_up`` recognises."""
    names = find_gate_up(module)
    return next(down for each, down in MLP_NAMES if each == names)


def is_gated(names: tuple[str, ...]) -> bool:
    """Return True if the matrices named by ``find_gate_up`` include a gate."""
    return names not in UNGATED
