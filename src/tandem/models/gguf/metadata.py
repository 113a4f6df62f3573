"""Conversion of transformers' configuration to GGUF metadata: the inverse of ``config``.

The result is at once read back by ``make_config`` and compared with the configuration, so a model
that metadata cannot describe, for example because of its RoPE, is refused, not changed.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem.core.errors import UnsupportedError
from tandem.models.gguf.config import make_config
from tandem.models.gguf.latents import SIGMOID
from tandem.models.gguf.mixtures import ModelSizes
from tandem.models.gguf.rope import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS
from tandem.models.sources.gguf_header import GgufTensor, Value

__all__ = ["ARCHITECTURE_OF", "check_metadata", "list_rope_factors", "make_metadata", "read_sizes"]

ARCHITECTURE_OF = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "olmoe": "olmoe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "glm4": "glm4",
    "glm4_moe": "glm4moe",
    "minimax_m2": "minimax-m2",
}
"""Architectures that can be written: llama.cpp's name by transformers' ``model_type``."""

WHERE = "models.export"
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Configuration fields for the number of routed experts."""
FILE_VERSION = 2
"""Value of ``general.quantization_version``."""

UNSAID = frozenset(
    {
        *("architectures", "dtype", "torch_dtype", "transformers_version", "auto_map"),
        *("model_type", "use_cache"),
        *("initializer_range", "attention_dropout", "router_aux_loss_coef", "router_jitter_noise"),
        *("output_router_logits", "quantization_config", "compression_config", "rope_theta"),
        *("pretraining_tp", "id2label", "label2id", "problem_type", "max_window_layers"),
        *("return_dict", "output_hidden_states", "output_attentions", "chunk_size_feed_forward"),
        *(
            "is_encoder_decoder",
            "num_nextn_predict_layers",
            "use_sliding_window",
            "layer_types",
            "rope_parameters",
            "tie_encoder_decoder",
        ),
    }
)
"""Configuration fields that may differ when the written metadata is read back: they do not affect
the model's results, or another field that is compared covers them.
"""
LABELS = ("_", "unsloth_")
"""First letters of fields that are labels of the program that wrote the file, such as the model's
name or a commit.
"""
ENDING = "_token_id"
"""Last letters of fields that number a special token, which the tokenizer's metadata says."""


def _find(config: Any, *names: str) -> Any:
    """Return the first of the fields that is present and not None; None if there is none."""
    return next((v for n in names if (v := getattr(config, n, None)) is not None), None)


def read_sizes(config: Any) -> ModelSizes:
    """Return the sizes of a model on which the rules of mixtures depend.

    Raises: UnsupportedError (the model cannot be written as GGUF).
    """
    architecture = ARCHITECTURE_OF.get(config.model_type)
    if architecture is None:
        known = ", ".join(ARCHITECTURE_OF)
        what = (
            f"{config.model_type} is not written as GGUF here, which {known} are: convert it with "
            "llama.cpp, or use another format"
        )
        raise UnsupportedError(WHERE, what)
    return ModelSizes(
        architecture,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        _find(config, *EXPERT_COUNTS) or 0,
    )


def make_metadata(config: Any, name: str, file_type: int) -> dict[str, Value]:
    """Return the GGUF metadata of a model, without its tokenizer.

    Args:
        config: transformers' configuration.
        name: the model's name.
        file_type: llama.cpp's number of the mixture.

    Raises: the errors of ``read_sizes``.
    """
    sizes = read_sizes(config)
    head_dim = _find(config, "head_dim") or config.hidden_size // config.num_attention_heads
    facts: dict[str, Value] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "vocab_size": config.vocab_size,
    }
    if _find(config, "intermediate_size"):
        facts["feed_forward_length"] = config.intermediate_size
    facts |= _list_rope(config, head_dim)
    if sizes.num_experts:
        facts |= _list_experts(config)
    if sizes.architecture in ("gemma2", "gemma3"):
        facts["attention.sliding_window"] = config.sliding_window
    if sizes.architecture == "phi3":
        facts["attention.sliding_window"] = config.sliding_window or 0
        facts["rope.scaling.original_context_length"] = config.original_max_position_embeddings
    if sizes.architecture == "gemma2":
        facts["attn_logit_softcapping"] = float(config.attn_logit_softcapping)
        facts["final_logit_softcapping"] = float(config.final_logit_softcapping)
    if sizes.architecture == "olmoe" and _find(config, "clip_qkv"):
        facts["attention.clamp_kqv"] = float(config.clip_qkv)
    return {
        "general.architecture": sizes.architecture,
        "general.type": "model",
        "general.name": name,
        "general.file_type": file_type,
        "general.quantization_version": FILE_VERSION,
    } | {f"{sizes.architecture}.{key}": value for key, value in facts.items()}


def _list_experts(config: Any) -> dict[str, Value]:
    facts: dict[str, Value] = {
        "expert_count": _find(config, *EXPERT_COUNTS),
        "expert_used_count": config.num_experts_per_tok,
    }
    if config.model_type == "minimax_m2":
        facts["expert_feed_forward_length"] = config.intermediate_size
        facts["expert_gating_func"] = SIGMOID
    if config.model_type == "glm4_moe":
        facts["expert_gating_func"] = SIGMOID
        facts["expert_shared_count"] = config.n_shared_experts
        facts["leading_dense_block_count"] = config.first_k_dense_replace
        facts["expert_weights_norm"] = bool(config.norm_topk_prob)
        facts["expert_weights_scale"] = float(config.routed_scaling_factor)
        facts["expert_group_count"] = config.n_group
        facts["expert_group_used_count"] = config.topk_group
    if _find(config, "moe_intermediate_size"):
        facts["expert_feed_forward_length"] = config.moe_intermediate_size
    if _find(config, "shared_expert_intermediate_size"):
        shared = config.shared_expert_intermediate_size
        facts["expert_shared_feed_forward_length"] = shared
    return facts


def _list_rope(config: Any, head_dim: int) -> dict[str, Value]:
    rope = config.rope_parameters
    facts: dict[str, Value] = {}
    if "full_attention" in rope:
        facts["rope.freq_base_swa"] = float(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    facts["rope.freq_base"] = float(rope["rope_theta"])
    facts["rope.dimension_count"] = int(head_dim * (rope.get("partial_rotary_factor") or 1.0))
    if rope.get("rope_type") in ("linear", "yarn"):
        facts["rope.scaling.type"] = rope["rope_type"]
        facts["rope.scaling.factor"] = float(rope["factor"])
        original = rope.get("original_max_position_embeddings")
        if original:
            facts["rope.scaling.original_context_length"] = original
    if rope.get("rope_type") == "longrope":
        facts["rope.scaling.type"] = "longrope"
        original = rope["original_max_position_embeddings"]
        facts["rope.scaling.original_context_length"] = original
        facts["rope.scaling.attn_factor"] = _find_attention_factor(config)
    return facts


def _find_attention_factor(config: Any) -> float:
    """Return the factor on cos and sin of a LongRoPE, as transformers computes it."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    return float(ROPE_INIT_FUNCTIONS["longrope"](config)[1])


def list_rope_factors(config: Any) -> dict[str, NDArray[np.float32]]:
    """Return the divisors of a RoPE's frequencies by the name of their tensor: one of Llama 3.1's,
    two of LongRoPE's, none of others.
    """
    rope = config.rope_parameters
    if rope.get("rope_type") == "longrope":
        named = {LONG_FACTORS: rope["long_factor"], SHORT_FACTORS: rope["short_factor"]}
        return {name: np.array(values, np.float32) for name, values in named.items()}
    if rope.get("rope_type") != "llama3":
        return {}
    head_dim = _find(config, "head_dim") or config.hidden_size // config.num_attention_heads
    inverse = rope["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = rope["original_max_position_embeddings"] * inverse / (2 * np.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return {ROPE_FACTORS: (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)}


def check_metadata(
    config: Any, metadata: Mapping[str, Value], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Check that the metadata describes the same model as its configuration.

    Args:
        config: transformers' configuration.
        metadata: the result of ``make_metadata``.
        shapes: shapes of the tensors.

    Raises: UnsupportedError (the metadata cannot express a field; the text names it).
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    tensors = {name: GgufTensor(name, "F32", shape, 0, 0) for name, shape in shapes.items()}
    factors = {name: values.tolist() for name, values in list_rope_factors(config).items()}
    made = make_config(metadata, tensors, factors)
    assert factors.keys() <= tensors.keys(), factors.keys()
    ours = CONFIG_MAPPING[made["model_type"]].from_dict(dict(made))
    for name, wanted in config.to_dict().items():
        got = getattr(ours, name, None)
        is_label = name.startswith(LABELS) or name.endswith(ENDING)
        is_said = name not in UNSAID and not is_label
        if is_said and not _is_same(got, wanted):
            raise _refuse(name, wanted, got)
    pair = [_list_ropes(c, c.rope_parameters) for c in (config, ours)]
    if not _is_same(*pair):
        raise _refuse("rope_parameters", *pair)
    windows = [_list_windows(c) for c in (config, ours)]
    if windows[0] != windows[1]:
        raise _refuse("layer_types", *windows)


def _refuse(name: str, wanted: object, got: object) -> UnsupportedError:
    what = f"{name} is {wanted!r}, and a GGUF file of this model would say {got!r}"
    return UnsupportedError(WHERE, f"{what}: use another format")


def _is_same(got: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict) and isinstance(got, dict):
        keys = wanted.keys() | got.keys()
        return all(_is_same(got.get(key), wanted.get(key)) for key in keys)
    if isinstance(wanted, list) and isinstance(got, list) and len(got) == len(wanted):
        return all(map(_is_same, got, wanted))
    if isinstance(wanted, float) and isinstance(got, (int, float)):
        return bool(np.isclose(got, wanted, rtol=1e-6))
    # A missing field equals a field with an empty or zero value.
    return got == wanted or (not got and not wanted)


def _list_ropes(config: Any, rope: dict[str, Any]) -> dict[str, Any]:
    if any(isinstance(value, dict) for value in rope.values()):
        return {name: _list_ropes(config, value) for name, value in rope.items()}
    said = {"rope_type": "default", "partial_rotary_factor": 1.0} | {
        name: value for name, value in rope.items() if value is not None
    }
    if said["rope_type"] == "yarn":
        said = {"beta_fast": 32.0, "beta_slow": 1.0} | said
    if said["rope_type"] == "longrope":
        # The file has the factor on cos and sin, not the ratio that it is computed from.
        said["attention_factor"] = _find_attention_factor(config)
        said.pop("factor", None)
    return said


def _list_windows(config: Any) -> list[int]:
    """Return the size of the sliding window of each layer in tokens; 0: the layer has none."""
    window = getattr(config, "sliding_window", None) or 0
    kinds = getattr(config, "layer_types", None) or []
    if kinds:
        return [window if kind == "sliding_attention" else 0 for kind in kinds]
    is_used = getattr(config, "use_sliding_window", True)
    return [window if is_used else 0] * config.num_hidden_layers
