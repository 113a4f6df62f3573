"""Odd configurations: tiny ones whose every field that changes values is away from its default."""

import random
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tandem.models.families import FAMILIES
from tandem.models.families.gate import take_layer
from tandem.models.proof.flips import OF_TRAINING, list_read_fields
from tandem.models.proof.shrink import NUM_TOKENS, USUAL_NAMES

__all__ = ["MODEL_TYPES", "list_untouched", "make_odd"]

MODEL_TYPES = [name for name, family in FAMILIES.items() if not family.config_type]
"""Families with a class of their own."""
OWNED = {
    "_name_or_path": "of the checkpoint",
    "dtype": "of the checkpoint",
    "chunk_size_feed_forward": "of encoders",
    "is_encoder_decoder": "of encoders",
    "vocab_size": "moved",
    "use_bidirectional_attention": "refused",
    "attn_logit_softcapping": "moved where eager attention has a cap",
    "pad_token_id": "says which row of the embedding is not trained",
    "num_nextn_predict_layers": "layers that are left out",
    "max_position_embeddings": "moved; matters to a dynamic RoPE",
    "topk_method": "moved with groups",
    "sliding_window_pattern": "summed up in layer_types",
    "full_attn_idxs": "summed up in layer_types",
    "mamba_hidden_act": "only SiLU runs",
    "use_mamba_kernels": "changes nothing any more",
    "z_loss_coefficient": "of training",
    "linear_a_log_max": "of training",
    "linear_a_log_min": "of training",
    "linear_dt_init_floor": "of training",
    "linear_dt_max": "of training",
    "linear_dt_min": "of training",
}
"""Fields that ``list_untouched`` passes over, and why."""
UNTIED = ("kimi_linear", "nemotron_h")
"""Families whose class ties nothing."""
WINDOWS = ("sliding_attention", "full_attention")


DEFAULTS: dict[str, dict[str, Any]] = {
    "lfm2_moe": {"layer_types": ["conv"] * 32},
    "granitemoehybrid": {"position_embedding_type": "rope"},
}
"""Fields without which a class makes no model."""
SWITCHES = (
    "attention_bias",
    "mlp_bias",
    "qkv_bias",
    "norm_topk_prob",
    "use_qk_norm",
    "conv_bias",
    "use_expert_bias",
    "block_auto_adjust_ff_dim",
    "mamba_conv_bias",
    "mamba_proj_bias",
    "use_conv_bias",
    "use_bias",
)


def make_odd(model_type: str, seed: int) -> Any:
    """Return a tiny configuration of a family.

    Seed 0 moves each field from its default, with a plain RoPE whose fields other types read; the
    others draw values at random.
    """
    draw = random.Random(f"{model_type}-{seed}")
    kind = type(CONFIG_MAPPING[model_type](**DEFAULTS.get(model_type, {})))
    default = kind(**DEFAULTS.get(model_type, {})).to_dict()
    default = {USUAL_NAMES.get(name, name): value for name, value in default.items()}
    values: dict[str, Any] = {"vocab_size": draw.choice((97, 131))}
    values |= {"pad_token_id": 1, "bos_token_id": 1, "eos_token_id": 2}
    _put_sizes(values, default, draw)
    for name in SWITCHES:
        if name in default and not (model_type == "deepseek_v2" and name == "norm_topk_prob"):
            values[name] = not default[name] if seed == 0 else draw.random() < 0.5
    for name in ("tie_word_embeddings", "rope_interleave"):
        if name == "tie_word_embeddings" and model_type in UNTIED:
            continue
        if name in default or (name == "rope_interleave" and model_type == "deepseek_v3"):
            values[name] = not default.get(name, True) if seed == 0 else draw.random() < 0.5
    act = "hidden_activation" if "hidden_activation" in default else "hidden_act"
    acts = [a for a in ("silu", "gelu", "gelu_pytorch_tanh") if a != default.get(act)]
    if act in default and model_type != "gpt_oss" and not _has_states(default):
        values[act] = draw.choice(acts if seed == 0 else [default[act], *acts])
    eps = next(n for n in ("norm_eps", "layer_norm_epsilon", "rms_norm_eps") if n in default)
    values[eps] = draw.choice((1e-3, 1e-2, 0.05))
    if "query_pre_attn_scalar" in default:
        values["query_pre_attn_scalar"] = draw.choice((7, 33))
        values["attn_logit_softcapping"] = draw.choice((3.0, 5.0, None))
        values["final_logit_softcapping"] = draw.choice((2.0, 4.0))
        if model_type == "gemma3_text":
            # Its eager code has no cap within attention.
            values["attn_logit_softcapping"] = None
    for name, choices in (
        ("routed_scaling_factor", (0.6, 1.7)),
        ("swiglu_limit", (0.7, 1.5)),
        ("swiglu_alpha", (0.9, 2.5)),
        ("embedding_multiplier", (0.5, 3.0)),
        ("residual_multiplier", (0.3, 0.8)),
        ("attention_multiplier", (0.2, 0.6)),
        ("logits_scaling", (0.5, 4.0)),
        ("mlp_hidden_act", ("silu", "gelu")),
        ("moe_latent_size", (None, 24)),
        ("moe_shared_expert_intermediate_size", (24, 56)),
        ("shared_intermediate_size", (40, 72)),
        ("position_embedding_type", (None, "rope")),
    ):
        if name in default:
            values[name] = draw.choice(choices)
    _put_experts(values, default, draw, model_type)
    _put_windows(values, default, draw, seed)
    _put_states(values, default, draw)
    ropes = [_make_rope(draw, model_type, seed) for _ in WINDOWS]
    if "rope_parameters" not in default:
        return kind(**values)
    is_layered = any(isinstance(value, dict) for value in default["rope_parameters"].values())
    if "llama_4_scaling_beta" in default["rope_parameters"]:
        _put_position_scale(values, ropes[0], draw)
    values["rope_parameters"] = dict(zip(WINDOWS, ropes, strict=True)) if is_layered else ropes[0]
    if any(rope["rope_type"] == "dynamic" for rope in ropes) and values.get("sliding_window") == 1:
        # Eager runs token by token then, and its cache keeps all of a window of one.
        values["sliding_window"] = 2
    if "attention_chunk_size" in default:
        _put_chunks(values, draw)
    if "num_kv_shared_layers" in default:
        _put_sharing(values, default, draw)
    values["max_position_embeddings"] = draw.choice((NUM_TOKENS // 2, 4 * NUM_TOKENS))
    if "original_max_position_embeddings" in default:
        values["original_max_position_embeddings"] = 24
    return kind(**values)


def _put_sizes(values: dict[str, Any], default: dict[str, Any], draw: random.Random) -> None:
    kv_heads = draw.choice((1, 2, 3))
    heads = kv_heads * draw.choice((1, 2, 3))
    head_dim = draw.choice((8, 16, 24))
    values |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    values |= {"num_hidden_layers": draw.choice((2, 3, 4)), "hidden_size": heads * head_dim}
    values["intermediate_size"] = draw.choice((40, 72, 88))
    if "kv_lora_rank" in default:
        rope, nope, value = draw.choice((8, 16, 32)), draw.choice((8, 16)), draw.choice((8, 24))
        values |= {"qk_rope_head_dim": rope, "qk_nope_head_dim": nope, "v_head_dim": value}
        values |= {"kv_lora_rank": draw.choice((16, 32)), "q_lora_rank": draw.choice((None, 24))}
        values |= {"num_key_value_heads": heads, "hidden_size": heads * draw.choice((6, 10, 14))}
        if "index_topk" in default:
            _put_index(values, default, draw)
    elif "head_dim" in default:
        values |= {"head_dim": head_dim, "hidden_size": heads * draw.choice((6, 10, 14))}
        if "v_head_dim" in default:
            values["v_head_dim"] = draw.choice((5, 8))
            values["attention_value_scale"] = draw.choice((0.5, 1.5, None))
            # Layers with a window have twice as many KV heads.
            values |= {"num_attention_heads": 2 * kv_heads * draw.choice((1, 2))}


def _put_index(values: dict[str, Any], default: dict[str, Any], draw: random.Random) -> None:
    """Attention that chooses its tokens, by heads enough that few scores are sums of none."""
    values |= {"q_lora_rank": 24, "index_topk": draw.choice((1, 7, 16, 17))}
    values |= {"index_n_heads": draw.choice((8, 11)), "index_head_dim": draw.choice((32, 36))}
    if "indexer_types" in default:
        count, kinds = values["num_hidden_layers"], ("full", "shared")
        values["indexer_types"] = ["full", *(draw.choice(kinds) for _ in range(count - 1))]


def _put_experts(
    values: dict[str, Any], default: dict[str, Any], draw: random.Random, model_type: str
) -> None:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    name = next((name for name in names if name in default), None)
    if name is None:
        return
    count = draw.choice((4, 8))
    values[name], values["num_experts_per_tok"] = count, draw.choice((1, 2, 3, 4))
    if "moe_intermediate_size" in default:
        values["moe_intermediate_size"] = draw.choice((24, 40))
    if "shared_expert_intermediate_size" in default:
        values["shared_expert_intermediate_size"] = draw.choice((24, 56))
    if "n_shared_experts" in default:
        values["n_shared_experts"] = draw.choice((1, 2))
    if "first_k_dense_replace" in default:
        values["first_k_dense_replace"] = draw.choice((0, 1, 2))
    if "num_dense_layers" in default:
        values["num_dense_layers"] = draw.choice((0, 1, 2))
    if "decoder_sparse_step" in default:
        values["decoder_sparse_step"] = draw.choice((1, 2))
        values["mlp_only_layers"] = draw.choice(([], [0], [1]))
    if "n_group" in default:
        groups = draw.choice((1, 2, 2))
        values |= {"n_group": groups, "topk_group": draw.choice((1, groups))}
        values["num_experts_per_tok"] = draw.choice((1, 2))
        if model_type == "deepseek_v2":
            methods = ("greedy", "group_limited_greedy", "group_limited_greedy")
            values["topk_method"] = draw.choice(methods)


def _put_windows(
    values: dict[str, Any], default: dict[str, Any], draw: random.Random, seed: int
) -> None:
    if "sliding_window" not in default:
        return
    values["sliding_window"] = draw.choice((1, 5, 16, 17))
    if "use_sliding_window" in default:
        values["use_sliding_window"] = seed == 0 or draw.random() < 0.7
        values["max_window_layers"] = draw.choice((0, 1, 2))
    elif "layer_types" in default:
        if "mlp_layer_types" in default:
            kinds = ("dense", "sparse")
            values["mlp_layer_types"] = [
                draw.choice(kinds) for _ in range(values["num_hidden_layers"])
            ]
        count = values["num_hidden_layers"]
        values["layer_types"] = [draw.choice(WINDOWS) for _ in range(count - 1)]
        values["layer_types"] += ["full_attention" if seed == 0 else draw.choice(WINDOWS)]


def _has_states(default: dict[str, Any]) -> bool:
    """Return True if layers have a convolution, with the model's activation: only SiLU runs."""
    return "linear_conv_kernel_dim" in default or "mamba_n_heads" in default


def _put_states(values: dict[str, Any], default: dict[str, Any], draw: random.Random) -> None:
    count = values["num_hidden_layers"]
    if "conv_L_cache" in default:
        values["conv_L_cache"] = draw.choice((2, 4, 5))
        kinds = ("conv", "full_attention")
        drawn = [draw.choice(kinds) for _ in range(count - 2)]
        values["layer_types"] = draw.sample([*drawn, *kinds], count)
        if "block_multiple_of" in default:
            values["block_multiple_of"] = draw.choice((8, 24))
            values["block_ffn_dim_multiplier"] = draw.choice((0.75, 1.5))
    _put_state_spaces(values, default, draw)
    if "linear_conv_kernel_dim" not in default:
        return
    if "mlp_layer_types" in default:
        kinds = ("dense", "sparse")
        drawn = [draw.choice(kinds) for _ in range(count - 2)]
        values["mlp_layer_types"] = draw.sample([*drawn, *kinds], count)
    keys = draw.choice((1, 2, 3))
    values |= {"linear_num_heads": keys, "linear_head_dim": draw.choice((5, 12, 36))}
    values |= {"linear_num_key_heads": keys, "linear_num_value_heads": keys * draw.choice((1, 2))}
    values["linear_key_head_dim"] = draw.choice((5, 8, 12))
    values["linear_value_head_dim"] = draw.choice((7, 32, 36))
    values["linear_conv_kernel_dim"] = draw.choice((2, 3, 5))
    if "linear_allow_neg_eigval" in default:
        values["linear_allow_neg_eigval"] = draw.choice((True, False))
    kinds = ("linear_attention", "full_attention")
    drawn = [draw.choice(kinds) for _ in range(count - 2)]
    values["layer_types"] = draw.sample([*drawn, *kinds], count)


def _put_chunks(values: dict[str, Any], draw: random.Random) -> None:
    """Llama 4: chunks, layers without RoPE whose queries grow, experts in some layers."""
    count = values["num_hidden_layers"]
    values["no_rope_layers"] = draw.sample([0, 1, *(draw.choice((0, 1)) for _ in range(2))], 4)
    values["no_rope_layers"] = [0, 1, *values["no_rope_layers"]][:count]
    values["moe_layers"] = [i for i in range(count) if i == 0 or draw.random() < 0.5]
    values |= {"attention_chunk_size": draw.choice((5, 16, 17)), "floor_scale": draw.choice((4, 9))}
    values |= {
        "attn_scale": draw.choice((0.3, 0.8)),
        "intermediate_size_mlp": draw.choice((40, 56)),
    }
    values["attn_temperature_tuning"] = draw.choice((True, False))


def _put_position_scale(values: dict[str, Any], rope: dict[str, Any], draw: random.Random) -> None:
    """Ministral 3 and Mistral 4: queries grow with the position."""
    rope["llama_4_scaling_beta"] = draw.choice((0.2, 0.7))
    rope["original_max_position_embeddings"] = draw.choice((12, 16))
    rope.pop("partial_rotary_factor", None)
    if "qk_rope_head_dim" in values:
        # Its class makes the angles of a share of the whole head.
        rotated = values["qk_rope_head_dim"]
        rope["partial_rotary_factor"] = rotated / (rotated + values["qk_nope_head_dim"])


def _put_state_spaces(values: dict[str, Any], default: dict[str, Any], draw: random.Random) -> None:
    groups, count = draw.choice((1, 2)), values["num_hidden_layers"]
    heads, state = groups * draw.choice((1, 2)), draw.choice((5, 8, 12))
    kinds = ("linear_attention", "full_attention")
    if "mamba_n_heads" in default:
        expand = draw.choice((1, 3))
        values |= {"mamba_n_heads": heads, "mamba_n_groups": groups, "mamba_d_state": state}
        values["mamba_expand"], values["mamba_d_conv"] = expand, draw.choice((2, 3, 5))
        # Its heads make up the width.
        values["hidden_size"] = values["num_attention_heads"] * draw.choice((8, 16, 24))
        values["hidden_size"] *= 4 // draw.choice((2, 4))
        values["mamba_d_head"] = expand * values["hidden_size"] // heads
        values["time_step_limit"] = draw.choice(([0.3, 1.1], [0.0, 0.9]))
        values["mamba_chunk_size"] = draw.choice((8, 64))
        drawn = draw.sample([*(draw.choice(kinds) for _ in range(count - 2)), *kinds], count)
        if "attn_layer_indices" in default:
            values["attn_layer_indices"] = [i for i, k in enumerate(drawn) if k == kinds[1]]
        else:
            values["layer_types"] = drawn
    elif "mamba_num_heads" in default:
        values |= {"mamba_num_heads": heads, "n_groups": groups, "ssm_state_size": state}
        values["mamba_head_dim"], values["conv_kernel"] = draw.choice((7, 36)), draw.choice((2, 3))
        values["time_step_min"], values["chunk_size"] = (
            draw.choice((0.3, 0.6)),
            draw.choice((8, 64)),
        )
        values["layers_block_type"] = draw.sample([*kinds, "moe", "mlp", "linear_attention"], 5)
        values.pop("num_hidden_layers")


def _put_sharing(values: dict[str, Any], default: dict[str, Any], draw: random.Random) -> None:
    """Gemma 4: sizes that differ by type of layer, layers that share KV, inputs of each layer."""
    num_shared = draw.choice((0, 1, 2))
    own = draw.sample(WINDOWS, 2)
    kinds = [*own, *(draw.choice(WINDOWS) for _ in range(num_shared - 1)), "full_attention"]
    values |= {"layer_types": kinds, "num_hidden_layers": len(kinds)}
    values |= {
        "num_kv_shared_layers": num_shared,
        "final_logit_softcapping": draw.choice((2.0, 4.0)),
    }
    values["use_double_wide_mlp"] = draw.choice((True, False))
    values |= {
        "attention_k_eq_v": draw.choice((True, False)),
        "global_head_dim": draw.choice((20, 32)),
    }
    values["num_global_key_value_heads"] = draw.choice((None, 1))
    values["rope_parameters"]["full_attention"] = {
        "rope_type": "proportional",
        "rope_theta": draw.choice((50.0, 3e3)),
        "partial_rotary_factor": draw.choice((0.25, 0.5)),
    }
    if "hidden_size_per_layer_input" in default:
        # Without inputs of each layer transformers' own code fails where layers share KV.
        values["hidden_size_per_layer_input"] = draw.choice((0, 7, 12)) or (7 if num_shared else 0)
        values["vocab_size_per_layer_input"] = values["vocab_size"]
    if "enable_moe_block" in default:
        values["enable_moe_block"] = draw.choice((True, False))
        values |= {"num_experts": 6, "top_k_experts": draw.choice((1, 2, 4))}
        values["moe_intermediate_size"] = draw.choice((24, 40))


PARTIAL = (
    "phi3",
    "glm4",
    "glm4_moe",
    "minimax_m2",
    "mimo_v2_flash",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
)
"""Families whose attention takes the share of a head that a scaled RoPE rotates."""


def _make_rope(draw: random.Random, model_type: str, seed: int) -> dict[str, Any]:
    rope_type = draw.choice(("default", "linear", "dynamic", "yarn", "llama3"))
    if seed == 0 or model_type == "phi3":
        # Phi-3 has no other but LongRoPE, which is refused.
        rope_type = "default"
    if model_type == "mistral4":
        # Its class rotates all of a head with a plain RoPE, which its attention does not.
        rope_type = "yarn"
    rope: dict[str, Any] = {"rope_type": rope_type, "rope_theta": draw.choice((50.0, 3e3, 7e5))}
    if rope_type == "default" or model_type in PARTIAL:
        rope["partial_rotary_factor"] = draw.choice((0.5, 0.75))
    if rope_type != "default":
        rope["factor"] = draw.choice((1.5, 4.0))
    if rope_type in ("yarn", "llama3"):
        rope["original_max_position_embeddings"] = draw.choice((16, 24))
    if rope_type == "yarn":
        rope |= {"beta_fast": draw.choice((2.0, 8.0)), "beta_slow": draw.choice((0.05, 0.5))}
        rope |= draw.choice(({}, {"attention_factor": 0.8}, {"mscale": 0.7, "mscale_all_dim": 0.4}))
        rope |= draw.choice(({}, {"truncate": False}))
    if rope_type == "llama3":
        rope |= {"low_freq_factor": draw.choice((0.5, 1.0)), "high_freq_factor": 3.0}
    return rope


def list_untouched(model_type: str) -> list[str]:
    """Return the fields that transformers reads and that are at their defaults in all of 20 odd
    configurations of a family."""
    default = CONFIG_MAPPING[model_type](**DEFAULTS.get(model_type, {}))
    made = [take_layer(make_odd(model_type, seed)) for seed in range(20)]
    plain = take_layer(default)
    return [
        name
        for name in sorted(list_read_fields(default) & default.to_dict().keys())
        if name not in OWNED
        if not (name == "tie_word_embeddings" and model_type in UNTIED)
        if not (name == "hidden_act" and _has_states(default.to_dict()))
        if not any(word in name for word in OF_TRAINING)
        if all(getattr(config, name) == getattr(plain, name) for config in made)
    ]
