"""Conversion of GGUF metadata to the configuration that transformers would have.

An architecture of llama.cpp is one of transformers, or, if llama.cpp uses one name for several
(``llama`` with experts is Mixtral, ``deepseek2`` with sigmoid gates is DeepSeek-V3), the one that
the metadata shows. The gate in ``families`` decides whether it is supported, as for any checkpoint.
Values that llama.cpp's code fixes for an architecture and does not write into the file are repeated
here, with their source file.

A file may be hostile: a number in its metadata is compared with the file's contents before it is
used, so memory is bounded by the file's size.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path

from tandem.core.errors import ConfigError, UnsupportedError
from tandem.models.gguf.attention_only import ATTENTION_ONLY
from tandem.models.gguf.experts import list_deepseek_experts, list_experts
from tandem.models.gguf.facts import WHERE, Config, Facts
from tandem.models.gguf.hybrids import (
    WITHOUT_ROPE,
    make_granite,
    make_kimi_linear,
    make_lfm2,
    make_lfm2_moe,
    make_nemotron_h,
)
from tandem.models.gguf.latents import LATENT
from tandem.models.gguf.rope import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS, make_rope
from tandem.models.gguf.states import read_state_sizes
from tandem.models.gguf.tokenizer import find_end_tokens
from tandem.models.sources.gguf_files import GgufFiles
from tandem.models.sources.gguf_header import GgufTensor, Value

__all__ = ["ARCHITECTURES", "make_config", "read_gguf_config"]

UNEVEN = ("gemma4", "mimo2")
"""Architectures whose two layer types have different KV heads or MLP sizes."""


def make_config(
    metadata: Mapping[str, Value],
    tensors: Mapping[str, GgufTensor],
    rope_factors: Mapping[str, list[float]],
) -> Config:
    """Return the equivalent of ``config.json`` for a GGUF file.

    Args:
        metadata: metadata of the first file.
        tensors: tensors of all parts.
        rope_factors: values of the tensors with divisors of RoPE frequencies, by name.

    Raises:
        ConfigError: metadata is missing or of another type; the text names its key.
        UnsupportedError: an unknown architecture, RoPE factors other than Llama's, or a value that
            would change the answer and that models of the architecture do not obey.
    """
    facts = Facts(metadata, tensors, rope_factors)
    special = ARCHITECTURES.get(facts.architecture)
    if special is None:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedError(
            WHERE, f"architecture {facts.architecture!r} of a GGUF file: known are {known}"
        )
    config = _list_common(facts) | special(facts)
    facts.require_read()
    if config["model_type"] in WITHOUT_ROPE:
        config.pop("rope_parameters")
    return config


def read_gguf_config(path: Path) -> tuple[Config, list[int]]:
    """Return a GGUF file's equivalent of config.json, and the ids that end a text.

    Raises: the errors of ``make_config`` and ``GgufFiles.open``.
    """
    files = GgufFiles.open(path)
    names = (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)
    factors = {name: files.read_floats(name) for name in names if name in files.tensors}
    ends = find_end_tokens(files.metadata, files.architecture)
    return make_config(files.metadata, files.tensors, factors), ends


def _list_common(facts: Facts) -> Config:
    embedding = facts.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ConfigError(WHERE, "no tensor token_embd.weight [vocabulary, hidden] in the file")
    heads, is_uneven = facts.num_heads, facts.architecture in UNEVEN
    num_blocks = facts.count("block_count")
    # Each block has tensors of its own, so a block count above the number of tensors is false.
    # Libraries make lists of that length.
    if num_blocks > len(facts.tensors):
        text = f"{facts.architecture}.block_count is {num_blocks}: {len(facts.tensors)} tensors"
        raise ConfigError(WHERE, text)
    config: Config = {
        "hidden_size": facts.count("embedding_length"),
        "num_hidden_layers": facts.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads
        if is_uneven
        else facts.count_where_any("attention.head_count_kv", heads),
        "head_dim": facts.head_dim,
        "max_position_embeddings": facts.count("context_length"),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": not facts.has("output.weight"),
        "attention_bias": facts.has("blk.0.attn_q.bias"),
        "rope_parameters": make_rope(facts),
        "dtype": _find_dtype(facts),
    }
    if facts.find("attention.layer_norm_epsilon") is None:
        config["rms_norm_eps"] = facts.number("attention.layer_norm_rms_epsilon")
    if facts.find("feed_forward_length") is not None and not is_uneven:
        config["intermediate_size"] = facts.count_where_any("feed_forward_length", 0)
    # Token ids are always set, to None if the file has none: transformers' defaults name the tokens
    # of the first model of a family.
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        token_id = facts.metadata.get(f"tokenizer.ggml.{key}_token_id")
        config[f"{name}_token_id"] = token_id if type(token_id) is int else None
    return config


def _find_dtype(facts: Facts) -> str:
    """Return the dtype in which most weights of the file are stored; bfloat16 if most are
    quantized.
    """
    weights: Counter[str] = Counter()
    for tensor in facts.tensors.values():
        weights[tensor.kind] += prod(tensor.shape)
    kind = max(weights, key=lambda kind: weights[kind])
    return {"F32": "float32", "F16": "float16"}.get(kind, "bfloat16")


def _llama(facts: Facts) -> Config:
    if facts.count("expert_count", 0):
        return {"model_type": "mixtral"} | list_experts(facts, "num_local_experts")
    return {"model_type": "llama"}


def _mistral3(facts: Facts) -> Config:
    beta = facts.find("attention.temperature_scale")
    if beta is None:
        return {"model_type": "mistral", "sliding_window": None}
    rope = make_rope(facts)
    # The GGUF converter writes mscale_all_dim only; in published models mscale equals it.
    multiplier = facts.number("rope.scaling.yarn_log_multiplier", 0.0)
    rope |= {"mscale": multiplier, "mscale_all_dim": multiplier}
    rope |= {"llama_4_scaling_beta": facts.number("attention.temperature_scale")}
    return {"model_type": "ministral3", "sliding_window": None, "rope_parameters": rope}


def _qwen2(facts: Facts) -> Config:
    del facts
    return {"model_type": "qwen2", "use_sliding_window": False}


def _qwen2_moe(facts: Facts) -> Config:
    # norm_topk_prob is False, as norm_w is in llama.cpp's src/models/qwen2moe.cpp.
    shared = facts.count("expert_shared_feed_forward_length", 0)
    config = {"model_type": "qwen2_moe", "norm_topk_prob": False, "use_sliding_window": False}
    if shared:
        config["shared_expert_intermediate_size"] = shared
    return config | list_experts(facts)


def _qwen3(facts: Facts) -> Config:
    del facts
    return {"model_type": "qwen3", "use_sliding_window": False}


def _qwen3_moe(facts: Facts) -> Config:
    # norm_topk_prob is True, as norm_w is in llama.cpp's src/models/qwen3moe.cpp.
    config = {"model_type": "qwen3_moe", "norm_topk_prob": True, "use_sliding_window": False}
    return config | list_experts(facts)


def _list_states(facts: Facts) -> Config:
    try:
        sizes = read_state_sizes(facts.architecture, facts.count)
    except ValueError as error:
        raise ConfigError(WHERE, f"{facts.architecture}: {error}") from error
    return {
        "linear_num_key_heads": sizes.num_k_heads,
        "linear_num_value_heads": sizes.num_v_heads,
        "linear_key_head_dim": sizes.key_dim,
        "linear_value_head_dim": sizes.value_dim,
        "linear_conv_kernel_dim": facts.count("ssm.conv_kernel"),
        "layer_types": [
            "linear_attention" if facts.has(f"blk.{i}.ssm_a") else "full_attention"
            for i in range(facts.num_layers)
        ],
    }


def _qwen3_next(facts: Facts) -> Config:
    # norm_topk_prob is True, as norm_w is in llama.cpp's src/models/qwen3next.cpp.
    config = {"model_type": "qwen3_next", "norm_topk_prob": True} | _list_states(facts)
    return config | _list_shared(facts) | list_experts(facts)


def _qwen35(facts: Facts) -> Config:
    return {"model_type": "qwen3_5_text"} | _list_states(facts)


def _qwen35_moe(facts: Facts) -> Config:
    config = {"model_type": "qwen3_5_moe_text"} | _list_states(facts)
    return config | _list_shared(facts) | list_experts(facts)


def _list_shared(facts: Facts) -> Config:
    return {
        "shared_expert_intermediate_size": facts.count("expert_shared_feed_forward_length"),
    }


def _olmoe(facts: Facts) -> Config:
    # norm_topk_prob is False, as norm_w is in llama.cpp's src/models/olmoe.cpp.
    clip = facts.number("attention.clamp_kqv", 0.0)
    config = {"model_type": "olmoe", "norm_topk_prob": False, "clip_qkv": clip or None}
    return config | list_experts(facts)


def _gemma2(facts: Facts) -> Config:
    # As in llama.cpp's src/models/gemma2.cpp, the 27B model (46 layers) has another attention
    # scale, which the file does not store.
    is_27b = facts.count("block_count") == 46
    per_head = facts.count("embedding_length") // facts.num_heads
    return {
        "model_type": "gemma2",
        "sliding_window": facts.count("attention.sliding_window"),
        "attn_logit_softcapping": facts.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": facts.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": per_head if is_27b else facts.head_dim,
    }


def _gemma3(facts: Facts) -> Config:
    # As in llama.cpp's src/models/gemma3.cpp, the 27B model (62 layers) has another attention
    # scale, which the file does not store; layers with a window use the RoPE base freq_base_swa.
    is_27b = facts.count("block_count") == 62
    per_head = facts.count("embedding_length") // facts.num_heads
    local = {"rope_type": "default", "rope_theta": facts.number("rope.freq_base_swa", 10_000.0)}
    return {
        "model_type": "gemma3_text",
        "sliding_window": facts.count("attention.sliding_window"),
        "query_pre_attn_scalar": per_head if is_27b else facts.head_dim,
        "rope_parameters": {"full_attention": make_rope(facts), "sliding_attention": local},
    }


def _phi3(facts: Facts) -> Config:
    window = facts.count("attention.sliding_window", 0)
    config: Config = {"model_type": "phi3", "sliding_window": window or None}
    original = facts.count("rope.scaling.original_context_length", 0)
    if original:
        config["original_max_position_embeddings"] = original
    return config


def _glm4(facts: Facts) -> Config:
    del facts
    return {"model_type": "glm4"}


def _glm4_moe(facts: Facts) -> Config:
    return {
        "model_type": "glm4_moe",
        "use_qk_norm": facts.has("blk.0.attn_q_norm.weight"),
    } | list_deepseek_experts(facts)


def _gpt_oss(facts: Facts) -> Config:
    size = facts.count("expert_feed_forward_length", facts.count("feed_forward_length", 0))
    config = {
        "model_type": "gpt_oss",
        "intermediate_size": size,
        "sliding_window": facts.count("attention.sliding_window"),
        "attention_bias": True,
        "rope_parameters": make_rope(facts) | {"truncate": False},
    } | list_experts(facts, "num_local_experts")
    config.pop("moe_intermediate_size", None)
    return config


def _minimax_m2(facts: Facts) -> Config:
    config = {
        "model_type": "minimax_m2",
        "intermediate_size": facts.count(
            "expert_feed_forward_length", facts.count("feed_forward_length", 0)
        ),
        "rotary_dim": facts.count("rope.dimension_count", facts.head_dim),
        "use_routing_bias": True,
        "use_qk_norm": True,
        "scoring_func": "sigmoid",
    } | list_experts(facts, "num_local_experts")
    config.pop("moe_intermediate_size", None)
    return config


ARCHITECTURES: dict[str, Callable[[Facts], Config]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen2moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "qwen3next": _qwen3_next,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35_moe,
    "olmoe": _olmoe,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "glm4": _glm4,
    "glm4moe": _glm4_moe,
    "gpt-oss": _gpt_oss,
    "minimax-m2": _minimax_m2,
    "mistral3": _mistral3,
    "lfm2": make_lfm2,
    "lfm2moe": make_lfm2_moe,
    "kimi-linear": make_kimi_linear,
    "granitehybrid": make_granite,
    "nemotron_h": make_nemotron_h,
    "nemotron_h_moe": make_nemotron_h,
    **LATENT,
    **ATTENTION_ONLY,
}
"""Function that makes an architecture's special configuration fields, by llama.cpp's name of it."""
