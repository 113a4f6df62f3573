"""Models refused by name: their sequences keep more than KV, or they are no text decoders.

A prefix cache that reuses KV without the state belonging to it would give wrong tokens, so such a
model is refused until its state is stored with its blocks.
"""

import re
from typing import Any

__all__ = ["UNEVEN", "UNEVEN_BY_TYPE", "WITH_STATES", "find_refusal"]

STATE_LAYERS = re.compile(r"linear|mamba|conv|recurrent|state|rwkv|delta|lightning")
"""Words in ``layer_types`` of layers that do not attend over all earlier tokens."""
STATE_FIELDS = re.compile(
    r"^(ssm_|mamba_|linear_(attn|conv|num|key|value)|state_size$|conv_(kernel|L_cache)|lru_width"
    r"|time_step|rwkv|attn_layer_(period|indices|offset)$)"
)
INPUT_FIELDS = re.compile(r"^(vision|image|audio|speech|video)_\w*config$|^vision_tower$")
WITH_INDEX = ("deepseek_v32", "glm_moe_dsa")
"""Families whose attention chooses tokens by an index that is supported."""
INDEXED_FIELDS = ("index_topk", "index_n_heads")
STATEFUL = {
    "falcon_mamba": "state-space layers",
    "jamba": "state-space layers",
    "mamba": "state-space layers",
    "mamba2": "state-space layers",
    "minimax": "linear attention",
    "recurrent_gemma": "recurrent layers",
    "rwkv": "recurrent layers",
    "xlstm": "recurrent layers",
    "zamba": "state-space layers",
    "zamba2": "state-space layers",
}
GATED_DELTA = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid")
"""Families whose stateful layers are gated delta rules, which are supported."""
KIMI_DELTA = ("kimi_linear",)
"""Families whose stateful layers are Kimi delta attention, which is supported."""
SHORT_CONVOLUTIONS = ("lfm2", "lfm2_moe")
"""Families whose stateful layers are short convolutions, which are supported."""
STATE_SPACES = ("granitemoehybrid", "bamba", "nemotron_h")
"""Families whose stateful layers are Mamba2, which is supported."""
WITH_STATES = {
    **dict.fromkeys((*GATED_DELTA, *KIMI_DELTA), ("linear_attention",)),
    **dict.fromkeys(SHORT_CONVOLUTIONS, ("conv",)),
    **dict.fromkeys(STATE_SPACES, ("linear_attention", "mamba")),
}
"""Values of ``layer_types`` for supported stateful layers, by family."""
UNEVEN_BY_TYPE = {
    "gemma4_text": ("head_dim", "num_key_value_heads"),
    "gemma4_unified_text": ("head_dim", "num_key_value_heads"),
}
"""Families in which these fields differ between layer types, but not within a type."""
UNEVEN = "its configuration changes from layer to layer (per_layer_config)"
"""Reason for refusing a model whose sizes or switches differ between single layers: the proof of a
model computes only a few layers, so it would miss some of them.
"""
BESIDE_KV = "keeps a state beside KV, which no prefix cache here holds"


def find_refusal(raw: dict[str, Any]) -> tuple[str, str] | None:
    """Return (field, reason) of a configuration that cannot run, whatever its modules are."""
    model_type = raw.get("model_type")
    if raw.get("is_encoder_decoder"):
        return "is_encoder_decoder", f"{model_type} is an encoder-decoder: only decoders run here"
    inputs = next((key for key in raw if INPUT_FIELDS.search(key) and raw[key]), None)
    if inputs is not None:
        return inputs, f"{model_type} takes images or sound ({inputs}): only text runs here"
    if model_type in STATEFUL:
        return "model_type", f"{model_type} has {STATEFUL[model_type]}: it {BESIDE_KV}"
    if raw.get("per_layer_config") and model_type not in UNEVEN_BY_TYPE:
        return "per_layer_config", f"{model_type}: {UNEVEN}"
    listed = raw.get("layer_types")
    kinds = [kind for kind in listed if isinstance(kind, str)] if isinstance(listed, list) else []
    has_states = model_type in WITH_STATES
    served = WITH_STATES.get(str(model_type), ())
    kinds = [kind for kind in kinds if kind not in served]
    kind = next((kind for kind in kinds if STATE_LAYERS.search(kind)), None)
    if kind is not None:
        return "layer_types", f"{model_type} has layers of {kind}: it {BESIDE_KV}"
    states = [] if has_states else [key for key in raw if STATE_FIELDS.search(key)]
    field = next((key for key in states if raw[key]), None)
    if field is not None:
        return field, f"{model_type} has {field}: it {BESIDE_KV}"
    has_index = model_type in WITH_INDEX
    field = next((key for key in INDEXED_FIELDS if raw.get(key) and not has_index), None)
    if field is not None:
        return field, f"{model_type} has {field}: its attention chooses tokens by an index"
    return None
