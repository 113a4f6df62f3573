"""A tiny configuration of the same class, with the same switches as a given one.

Sizes shrink, but their relations stay: heads that share KV, groups of experts, layers with and
without a window, the rotated share of a head. Windows, and the lengths at which a RoPE changes,
shrink below the length of the proof's sequence; caps and limits shrink to what random activations
reach; epsilons grow until they matter. Every switch keeps its value.
"""

import json
import re
from dataclasses import fields
from typing import Any

from torch import nn

from tandem.core.errors import UnsupportedError
from tandem.models.identity import list_config_values
from tandem.models.loading.skeleton import build_skeleton

__all__ = ["NUM_TOKENS", "TRAINED_CONTEXT", "WINDOW", "require_crossed", "shrink_config"]

NUM_TOKENS = 52
"""Tokens of the sequence that a proof computes, more than a tiny model's windows and RoPE
thresholds.
"""
WINDOW = 11
CHUNK = 13
FLOOR_SCALE = 6
"""Position in tokens from which the tiny model scales queries, in place of the model's own."""
TRAINED_CONTEXT = 24
"""Context length in tokens from which the tiny model's RoPE is scaled, in place of the model's own.
"""
MAX_LAYERS = 8

HIDDEN, INTERMEDIATE, EXPERT_INTERMEDIATE, SHARED_INTERMEDIATE = 48, 72, 40, 56
HEAD_DIM = 16
VALUE_DIM = 14
"""Items of a value, in models whose values are smaller than keys."""
WIDTH_STEP = 8
"""Step to which the widths of MLPs are rounded up."""
LATENT = 24
UNEVEN_HEAD_DIMS = (16, 24)
"""Head sizes of layers with a window and of other layers, in models where they differ."""
PER_LAYER_INPUT = 12
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
LATENT_SIZES = {
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 32,
    "v_head_dim": 24,
}
"""Tiny sizes of MLA; with fewer rotated items the ends of YaRN's ramp would not show."""
INDEX_SIZES = {"index_head_dim": 40, "index_n_heads": 8, "index_topk": 19}
"""Tiny sizes of an index: heads with more items than are rotated, enough heads that few scores are
all 0, fewer chosen tokens than the proof has.
"""
STATE_SIZES = {
    "linear_head_dim": 40,
    "linear_num_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 40,
    "linear_conv_kernel_dim": 4,
}
"""Tiny sizes of stateful layers; a head's values exceed a panel of the kernels."""
USUAL_NAMES = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
"""Usual names of fields that Kimi-Linear names differently; its class accepts these names too."""
LENGTHS = re.compile(
    r"window(?!_layers|_pattern)|chunk|distance|original_max_position|local_attention|index_topk|floor_scale|_floor$"
)
"""Names of fields that hold a number of tokens from which on a model computes something else."""
TOKEN_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

Values = dict[str, Any]


def shrink_config(config: Any, *, is_true_head: bool = False) -> Any:
    """Return a tiny configuration of the same class, with every kind of layer of the original.

    Args:
        config: transformers' configuration of a model.
        is_true_head: True to keep the sizes of heads and latents, with only one layer of each kind.

    Raises: UnsupportedError (a kind of layer occurs too late for a tiny model to have it; or as for
        ``require_crossed``).
    """
    wanted = _find_kinds(config)
    first = max(2, len(wanted)) + (0 if is_true_head else 1)
    for count in range(first, max(first, MAX_LAYERS) + 1):
        made = _shrink_to(config, count, is_true_head=is_true_head)
        if wanted <= _find_kinds(made):
            require_crossed(made)
            return made
    raise UnsupportedError(
        "models.shrink_config",
        f"{len(wanted)} kinds of layers are not all among the first {MAX_LAYERS}",
        field="num_hidden_layers",
    )


def require_crossed(config: Any) -> None:
    """Check that the proof's prompts cross each length that a tiny decoder's configuration names
    in a field of its class. (Others are in files, but nothing reads them.)

    Raises: UnsupportedError (one stays beyond them, so that the proof would not see what the model
        computes there).
    """
    text = config.get_text_config(decoder=True)
    stated: Values = text.to_dict()
    own = stated.get("per_layer_config")
    values = {field.name: stated.get(field.name) for field in fields(text)}
    places = [values, *_list_ropes(values), *(own.values() if isinstance(own, dict) else ())]
    for place in places:
        for name, value in place.items():
            lengths = value if isinstance(value, list) else [value]
            longest = max((n for n in lengths if isinstance(n, int)), default=0)
            if LENGTHS.search(name) and longest > NUM_TOKENS:
                what = f"{name} is {longest} in the tiny model, beyond the proof's {NUM_TOKENS} "
                what += "tokens: what the model computes there is not proved"
                raise UnsupportedError("models.shrink_config", what, field=name)


def _find_kinds(config: Any) -> set[object]:
    """Return the kinds of a model's layers: the classes of their modules and the switches of these,
    whatever their sizes.
    """
    key = (type(config), json.dumps(list_config_values(config), sort_keys=True))
    if key not in _KINDS:
        if len(_KINDS) >= MAX_KEPT_KINDS:
            _KINDS.clear()
        model: Any = build_skeleton(config)
        layers = getattr(getattr(model, "model", None), "layers", None) or ()
        _KINDS[key] = {_describe_layer(layer) for layer in layers}
    return _KINDS[key]


_KINDS: dict[object, set[object]] = {}
"""Layer kinds by configuration, cached because building a skeleton of many layers takes time."""
MAX_KEPT_KINDS = 16


def _describe_layer(layer: nn.Module) -> object:
    return tuple(
        (
            name,
            type(module).__name__,
            tuple(sorted((key, _describe(value)) for key, value in vars(module).items())),
        )
        for name, module in layer.named_modules()
    )


def _describe(value: object) -> str:
    """Return what an attribute of a module adds to the kind of its layer: a switch's value; of a
    size, only that there is one; of other values nothing.
    """
    if isinstance(value, (bool, str)):
        return repr(value)
    return "size" if isinstance(value, (int, float)) else "none" if value is None else ""


def _shrink_to(config: Any, num_layers: int, *, is_true_head: bool) -> Any:
    stated: Values = config.to_dict()
    values = {USUAL_NAMES.get(name, name): value for name, value in stated.items()}
    for name in ("architectures", "transformers_version", "dtype", "_name_or_path"):
        values.pop(name, None)
    values.pop("quantization_config", None)
    # Kimi-Linear's configuration class summarises this field in fields of its own and would read it
    # again, so it is removed.
    values.pop("linear_attn_config", None)
    _shrink_layers(values, num_layers)
    if hasattr(config, "kv_sharing_modes"):
        _choose_sharing_layers(values, num_layers)
    _shrink_heads(values, is_true_head=is_true_head)
    if getattr(config, "is_heterogeneous", False):
        _shrink_uneven(values, config, is_true_head=is_true_head)
    _shrink_experts(values)
    _shrink_rope(values)
    _shrink_scales(values)
    values["vocab_size"] = 131
    if values.get("hidden_size_per_layer_input"):
        values["hidden_size_per_layer_input"] = PER_LAYER_INPUT
        values["vocab_size_per_layer_input"] = 131
    values["max_position_embeddings"] = 4 * NUM_TOKENS
    if _has_rope_type(values, "dynamic"):
        values["max_position_embeddings"] = TRAINED_CONTEXT
    for name, value in TOKEN_IDS.items():
        if values.get(name) is not None:
            values[name] = value
    return type(config).from_dict(values)


def _shrink_layers(values: Values, count: int) -> None:
    """Choose ``count`` layers: the first of each kind in the lists of layers, then the first
    others.

    A list with an item for each layer, such as ``layer_types``, keeps the chosen layers' items.
    """
    total = values.setdefault("num_hidden_layers", len(values.get("layers_block_type") or ()))
    lists = [n for n, v in values.items() if isinstance(v, list) and len(v) == total and total > 1]
    moe_layers = values.get("moe_layers") or []
    if "moe_layers" in lists:
        lists.remove("moe_layers")
    rows = [repr([*(values[n][i] for n in lists), i in moe_layers]) for i in range(total)]
    begins = [i for i, row in enumerate(rows) if row not in rows[:i]]
    others = [i for i in range(total) if i not in begins]
    chosen = (begins + others * count + begins * count)[:count]
    for name in lists:
        values[name] = [values[name][i] for i in chosen]
    values["num_hidden_layers"] = count
    for name in ("first_k_dense_replace", "num_dense_layers"):
        if (values.get(name) or 0) > 1:
            values[name] = 1
    if values.get("attn_layer_indices"):
        kept = [i for i in values["attn_layer_indices"] if i < count]
        values["attn_layer_indices"] = kept or [count - 1]
    if isinstance(values.get("moe_layers"), list):
        values["moe_layers"] = [i for i, old in enumerate(chosen) if old in moe_layers]
    if values.get("mlp_only_layers"):
        values["mlp_only_layers"] = [i for i in values["mlp_only_layers"] if i < count] or [0]
    if isinstance(values.get("max_window_layers"), int):
        values["max_window_layers"] = min(values["max_window_layers"], 1)


def _choose_sharing_layers(values: Values, count: int) -> None:
    """Alternate two types of layers, so that some layers of each type own KV and some share it."""
    kinds = ("full_attention", "sliding_attention")
    values["layer_types"] = [kinds[(count - 1 - i) % 2] for i in range(count)]
    values["num_kv_shared_layers"] = min(values["num_kv_shared_layers"], 2)


def _shrink_uneven(values: Values, config: Any, *, is_true_head: bool) -> None:
    """Give each type of layer tiny sizes of its own, if the model's types differ in size."""
    values["per_layer_config"] = {}
    for index, kind in enumerate(values["layer_types"]):
        whole = config.per_layer_config[config.layer_types.index(kind)]
        own = {n: getattr(whole, n) for n in config.per_layer_attributes}
        if not is_true_head:
            own["head_dim"] = UNEVEN_HEAD_DIMS[kind == "full_attention"]
        if "num_key_value_heads" in own:
            own["num_key_value_heads"] = 1 if kind == "full_attention" else 2
        values["per_layer_config"][index] = own


def _shrink_heads(values: Values, *, is_true_head: bool) -> None:
    heads = values["num_attention_heads"]
    kv_heads = values.get("num_key_value_heads") or heads
    stated = values.get("head_dim")
    is_whole = stated is None or stated * heads == values["hidden_size"]
    tiny_kv = min(kv_heads, 2)
    group = 1 if kv_heads == heads else min(heads // kv_heads, 2)
    tiny_heads = tiny_kv * group
    true_head = stated or values["hidden_size"] // heads
    head_dim = true_head if is_true_head else _choose_head_dim(values)
    values["num_attention_heads"] = tiny_heads
    if values.get("num_key_value_heads") is not None:
        values["num_key_value_heads"] = tiny_kv
    if stated is not None:
        values["head_dim"] = head_dim
        if isinstance(values.get("v_head_dim"), int) and not is_true_head:
            values["v_head_dim"] = min(VALUE_DIM, values["v_head_dim"])
    values["hidden_size"] = tiny_heads * head_dim if is_whole else HIDDEN
    if "kv_lora_rank" in values:
        # MLA's heads have sizes of their own, from which transformers derives `head_dim`, so that
        # field is removed.
        values["hidden_size"] = HIDDEN
        values.pop("head_dim", None)
        share = _find_rotated_share(values)
        for name, size in LATENT_SIZES.items():
            if values.get(name) is not None and not is_true_head:
                values[name] = size
        for rope in _list_ropes(values):
            if share is not None and rope.get("partial_rotary_factor") == share:
                rope["partial_rotary_factor"] = _find_rotated_share(values)
    for name, size in INDEX_SIZES.items():
        if isinstance(values.get(name), int) and not (is_true_head and name == "index_head_dim"):
            values[name] = size
    for name, size in STATE_SIZES.items():
        if isinstance(values.get(name), int) and not is_true_head:
            values[name] = min(values[name], size)
    keys, heads_v = values.get("linear_num_key_heads"), values.get("linear_num_value_heads")
    if isinstance(keys, int) and isinstance(heads_v, int):
        tiny_keys = min(keys, 2)
        values["linear_num_key_heads"] = tiny_keys
        values["linear_num_value_heads"] = tiny_keys * min(heads_v // keys, 3)
    _shrink_state_space(values, is_true_head=is_true_head)
    scalar = values.get("query_pre_attn_scalar")
    if scalar is not None:
        scaled = scalar * head_dim / true_head
        values["query_pre_attn_scalar"] = round(scaled) if isinstance(scalar, int) else scaled
    if isinstance(values.get("block_multiple_of"), int):
        values["block_multiple_of"] = min(values["block_multiple_of"], WIDTH_STEP)
    for name, size in (
        ("intermediate_size", INTERMEDIATE),
        ("intermediate_size_mlp", SHARED_INTERMEDIATE),
        ("moe_intermediate_size", EXPERT_INTERMEDIATE),
        ("shared_expert_intermediate_size", SHARED_INTERMEDIATE),
        ("shared_intermediate_size", SHARED_INTERMEDIATE),
        ("moe_shared_expert_intermediate_size", SHARED_INTERMEDIATE),
    ):
        if isinstance(values.get(name), int):
            values[name] = size


def _choose_head_dim(values: Values) -> int:
    """Return a head size of which an even number of items is rotated, as in the original model."""
    shares = [rope.get("partial_rotary_factor") or 1.0 for rope in _list_ropes(values)]
    sizes = (HEAD_DIM, HEAD_DIM + 8, HEAD_DIM + 4)
    return next((d for d in sizes if all(int(d * s) % 2 == 0 for s in shares)), HEAD_DIM)


def _find_rotated_share(values: Values) -> float | None:
    """Return the share of a latent attention's head that is rotated; None without such
    attention.
    """
    rope, nope = values.get("qk_rope_head_dim"), values.get("qk_nope_head_dim")
    return rope / (rope + nope) if isinstance(rope, int) and isinstance(nope, int) else None


def _shrink_state_space(values: Values, *, is_true_head: bool) -> None:
    """Choose sizes of Mamba2's heads; some classes require that the heads make up a given width."""
    width = values.get("mamba_expand")
    groups, heads = (
        next((n for n in names if isinstance(values.get(n), int)), "")
        for names in (("mamba_n_groups", "n_groups"), ("mamba_n_heads", "mamba_num_heads"))
    )
    if not groups or not heads:
        return
    tiny_groups = min(values[groups], 2)
    size, state = (
        next((n for n in names if n in values), "")
        for names in (("mamba_d_head", "mamba_head_dim"), ("mamba_d_state", "ssm_state_size"))
    )
    if not is_true_head:
        values[state] = min(values[state], 8)
    tiny_heads = 2 * tiny_groups
    if heads == "mamba_n_heads" and width:
        whole = width * values["hidden_size"]
        fits = is_true_head and whole % (values[size] * tiny_groups) == 0
        if fits:
            tiny_heads = whole // values[size]
        values[size] = whole // tiny_heads
    elif not is_true_head:
        values[size] = min(values[size], 40)
    if isinstance(values.get("moe_latent_size"), int):
        values["moe_latent_size"] = LATENT
    if isinstance(values.get("time_step_min"), float):
        # The floor of the time step is set high enough that steps of the tiny model reach it.
        values["time_step_min"] = 0.5
    values[heads], values[groups] = tiny_heads, tiny_groups
    for name in ("mamba_chunk_size", "chunk_size"):
        if isinstance(values.get(name), int):
            values[name] = 16


def _shrink_experts(values: Values) -> None:
    count_name = next((n for n in EXPERT_COUNTS if isinstance(values.get(n), int)), None)
    if count_name is None or not values[count_name]:
        return
    top_name = "top_k_experts" if "top_k_experts" in values else "num_experts_per_tok"
    count, top_k = values[count_name], values.get(top_name) or 1
    groups = values.get("n_group") or 1
    tiny_groups = min(groups, 4)
    tiny_count = min(count, 8) if groups == 1 else 2 * tiny_groups
    kept = values.get("topk_group") or groups
    tiny_kept = tiny_groups if kept >= groups else max(1, min(kept, tiny_groups // 2))
    most = tiny_count // tiny_groups * tiny_kept
    for name in EXPERT_COUNTS:
        if isinstance(values.get(name), int):
            values[name] = tiny_count
    values[top_name] = tiny_count if top_k >= count else min(top_k, 3, most)
    if values.get("n_group") is not None:
        values["n_group"], values["topk_group"] = tiny_groups, tiny_kept
    if isinstance(values.get("n_shared_experts"), int):
        values["n_shared_experts"] = min(values["n_shared_experts"], 2)


def _list_ropes(values: Values) -> list[Values]:
    ropes = values.get("rope_parameters")
    if not isinstance(ropes, dict):
        return []
    nested = [value for value in ropes.values() if isinstance(value, dict)]
    return nested or [ropes]


def _has_rope_type(values: Values, rope_type: str) -> bool:
    return any(rope.get("rope_type") == rope_type for rope in _list_ropes(values))


def _shrink_rope(values: Values) -> None:
    for rope in _list_ropes(values):
        trained = rope.get("original_max_position_embeddings") or values["max_position_embeddings"]
        if rope.get("original_max_position_embeddings") is not None:
            rope["original_max_position_embeddings"] = TRAINED_CONTEXT
        if rope.get("rope_type") == "yarn":
            # beta_fast and beta_slow count rotations over the trained context, so they shrink with
            # it.
            for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):
                rope[name] = (rope.get(name) or default) * TRAINED_CONTEXT / trained
        for name in ("short_factor", "long_factor"):
            if isinstance(rope.get(name), list):
                rope[name] = _shrink_factors(rope[name], _count_rotated(values, rope) // 2)
    if isinstance(values.get("original_max_position_embeddings"), int):
        values["original_max_position_embeddings"] = TRAINED_CONTEXT


def _count_rotated(values: Values, rope: Values) -> int:
    """Return the number of rotated items of a head, of the values of a shrunk configuration."""
    if "kv_lora_rank" in values:
        return values["qk_rope_head_dim"]
    size = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    return int(size * (rope.get("partial_rotary_factor") or 1.0))


def _shrink_factors(factors: list[float], count: int) -> list[float]:
    """Return ``count`` of a LongRoPE's factors, evenly spaced; a list of another length than the
    configuration needs keeps being wrong.
    """
    if count < 1 or len(factors) < count:
        return factors
    return [factors[i * len(factors) // count] for i in range(count)]


def _shrink_scales(values: Values) -> None:
    """Shrink windows, caps and length limits in place, so that the tiny model's short sequence
    reaches them.
    """
    if isinstance(values.get("sliding_window"), int) and values["sliding_window"]:
        values["sliding_window"] = WINDOW
    if isinstance(values.get("attention_chunk_size"), int):
        values["attention_chunk_size"] = CHUNK
    if isinstance(values.get("floor_scale"), int):
        values["floor_scale"] = FLOOR_SCALE
    for name, value in values.items():
        if name.endswith(("_eps", "epsilon")) and isinstance(value, float):
            values[name] = max(value, 1e-3)
        elif name.endswith("softcapping") and isinstance(value, (int, float)) and value:
            values[name] = value / 10
    if isinstance(values.get("swiglu_limit"), (int, float)):
        values["swiglu_limit"] = values["swiglu_limit"] / 7
