"""Tiny configurations of any transformers class, for the proof of its own cache object.

The fields' meanings are not known here: fields are recognised by their names, and sizes shrink by
one ratio, so that their relations stay. If transformers refuses the result, less is shrunk.
"""

import re
from collections.abc import Iterator
from typing import Any

from tandem.models.own.context import shrink_trained
from tandem.models.proof.shrink import NUM_TOKENS, TRAINED_CONTEXT

__all__ = ["MAX_WEIGHTS", "TINY_VOCAB", "list_tiny"]

Values = dict[str, Any]

TINY_VOCAB = 131
MAX_WEIGHTS = 64_000_000
"""Largest number of weights of a model for which a proof computes logits in float64."""
WINDOW, CHUNK, FLOOR, NUM_LAYERS, NUM_EXPERTS, TOP_K = 11, 16, 6, 3, 8, 3
CHOSEN_TOKENS = 16
"""Number of tokens that attention with an index chooses in the shrunk model, fewer than the proof
has.
"""
MIN_WIDTH = 8
INDEX_HEADS = 16
"""Heads of an index that chooses tokens; with fewer, scores behind a ReLU would tie at 0."""

HEAD_NAMES = (
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "decoder_attention_heads",
    "attention_heads",
    "num_decoder_attention_heads",
)
WIDTH_NAMES = ("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_dim")
LAYER_NAMES = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
HEADS = re.compile(
    r"(^|_)(n_heads?|num_heads|num_attention_heads|attention_heads|n_mamba_heads|mamba_n_heads"
    r"|mamba_num_heads|num_v_heads|linear_num_heads|linear_num_(key|value)_heads)$"
)
KV_HEADS = re.compile(r"(key_value_heads|num_kv_heads|num_query_groups|n_kv_heads)$")
LAYERS = re.compile(r"(^|_)(n_layers?|num_layers|num_hidden_layers|layers)$")
WIDTH = re.compile(
    r"hidden|intermediate|ffn|inner|dff|dim_ff|d_ff|d_model|n_embd|emb_dim|embedding_(dim|size)"
    r"|proj_dim|lru_width|backbone|d_ssm|feed_forward|mid_dim"
)
OTHER_WIDTH = re.compile(r"head_dim|lora|rank|per_layer|multiplier|ratio|dropout")
EXPERTS = re.compile(r"(num_experts|num_local_experts|routed_experts)$")
CHOSEN = re.compile(r"(experts_per_tok(en)?|top_k|moe_topk)$")
CHUNKS = re.compile(r"chunk_?size$|^block_size$|index_block_size|chunk_length$")
WINDOWS = re.compile(r"window(_size|_len|_length|s)?$|^local_attention$")
FLOORS = re.compile(r"^floor_scale$|n_floor$")
"""Fields with the number of tokens from which on scores are scaled by the position."""
PERIODS = re.compile(r"layer_period$|window_pattern$|attention_interval$|layer_group_size$")
INDICES = re.compile(r"(_indices|_layers|_layer_ids)$")
"""Pattern of fields that are lists of layer numbers."""
GROUPS = re.compile(r"^(n_groups|mamba_n_?groups|n_group|num_expert_group)$")
DROPPED = ("architectures", "transformers_version", "dtype", "_name_or_path")


def list_tiny(config: Any) -> Iterator[Any]:
    """Yield tiny configurations of the same class, smallest first.

    Configurations that transformers refuses to make are omitted; the caller checks whether models
    run.
    """
    for num_layers, is_narrow in ((NUM_LAYERS, True), (0, True), (NUM_LAYERS, False)):
        values = config.to_dict()
        _shrink(values, num_layers, is_narrow=is_narrow)
        try:
            yield type(config).from_dict(values)
        except Exception:  # noqa: BLE001, S112 - as its checks raise anything
            continue


def _shrink(values: Values, num_layers: int, *, is_narrow: bool) -> None:
    """Shrink the values of a configuration's fields in place; ``num_layers`` 0 keeps all layers."""
    for name in DROPPED:
        values.pop(name, None)
    for name, value in values.items():
        if isinstance(value, dict) and name.endswith("_config") and name != "per_layer_config":
            _shrink(value, num_layers, is_narrow=is_narrow)
    shrink_trained(values, NUM_TOKENS, TRAINED_CONTEXT)
    total = _find(values, LAYER_NAMES)
    chosen = _choose_layers(values, total, num_layers or total)
    heads, width = _find(values, HEAD_NAMES), _find(values, WIDTH_NAMES)
    small = (2 if heads % 2 == 0 else 1) if heads else 0
    ratio = heads // small if small else max(width // 64, 1)
    while width % ratio or heads % ratio:
        ratio -= 1
    _shrink_fields(values, len(chosen), ratio, small, heads, is_narrow=is_narrow)
    inner = values.get("per_layer_config")
    if isinstance(inner, dict):
        kept = {chosen.index(int(key)): v for key, v in inner.items() if int(key) in chosen}
        for own in kept.values():
            if isinstance(own, dict):
                _shrink_fields(own, len(chosen), ratio, small, heads, is_narrow=is_narrow)
        values["per_layer_config"] = kept


def _find(values: Values, names: tuple[str, ...]) -> int:
    return next((values[n] for n in names if _is_count(values.get(n))), 0)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _choose_layers(values: Values, total: int, num_layers: int) -> list[int]:
    """Choose layers of every kind that the lists of layers distinguish, and cut these lists."""
    lists = [n for n, v in values.items() if isinstance(v, list) and len(v) == total and total > 1]
    inner = values.get("per_layer_config")
    own = inner if isinstance(inner, dict) else {}
    rows = [
        repr([*(values[n][i] for n in lists), own.get(i, own.get(str(i)))]) for i in range(total)
    ]
    begins = [i for i, row in enumerate(rows) if row not in rows[:i]]
    others = [i for i in range(total) if i not in begins]
    count = max(num_layers, len(begins))
    chosen = sorted((begins + others)[:count])
    for name in lists:
        values[name] = [values[name][i] for i in chosen]
    return chosen


def _shrink_fields(
    values: Values, num_layers: int, ratio: int, small: int, heads: int, *, is_narrow: bool
) -> None:
    for name, value in list(values.items()):
        if name.endswith("token_id"):
            is_list = isinstance(value, list)
            if is_list or (_is_count(value) and value >= TINY_VOCAB):
                values[name] = TOKENS.get(name, 3)
        elif _is_count(value):
            made = _shrink_count(name, value, num_layers)
            if made == value and is_narrow:
                made = (
                    value if name == "index_n_heads" else _narrow(name, value, ratio, small, heads)
                )
            values[name] = made
        elif value and isinstance(value, list) and all(_is_count(v) or v == 0 for v in value):
            if WIDTH.search(name) and is_narrow:
                values[name] = [_narrow(name, v, ratio, small, heads) for v in value]
            elif INDICES.search(name) and num_layers not in (0, len(value)):
                values[name] = sorted({v for v in value if v < num_layers} or {num_layers - 1})


def _shrink_count(name: str, value: int, num_layers: int) -> int:
    """Return a smaller value for a field that is a count, such as of layers, experts or tokens."""
    if "vocab_size" in name:
        return min(value, TINY_VOCAB)
    if name == "num_kv_shared_layers":
        return 1
    if LAYERS.search(name):
        return min(value, num_layers) if num_layers else value
    for pattern, most in (
        (EXPERTS, NUM_EXPERTS),
        (CHOSEN, TOP_K),
        (PERIODS, 2),
        (GROUPS, 2),
        (CHUNKS, CHUNK),
        (WINDOWS, WINDOW),
        (FLOORS, FLOOR),
    ):
        if pattern.search(name):
            return min(value, most)
    if name == "index_n_heads":
        return min(value, INDEX_HEADS)
    if name.endswith(("layer_offset", "topk_group")):
        return 1
    if name.startswith("index_topk"):
        return min(value, CHOSEN_TOKENS if name == "index_topk" else 2)
    return value


def _narrow(name: str, value: int, ratio: int, small: int, heads: int) -> int:
    """Return a smaller value for a field that is a width or a number of heads, divided by the ratio
    common to all; other fields keep theirs.
    """
    if KV_HEADS.search(name):
        return max(1, min(value // ratio, small)) if small and value != heads else small or value
    if HEADS.search(name):
        return max(1, value // ratio) if value % ratio == 0 or value < ratio else value
    if not WIDTH.search(name) or OTHER_WIDTH.search(name):
        return value
    if value % ratio == 0 and value // ratio >= MIN_WIDTH:
        return value // ratio
    return min(value, 64) if "intermediate" in name or "ffn" in name else value
