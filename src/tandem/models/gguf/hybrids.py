"""Configurations of GGUF files of hybrid models: some layers have a state, others attention.

A layer's tensors tell its type. Values that llama.cpp's code fixes for an architecture are repeated
here, with their source file.
"""

from math import prod
from typing import Any

from tandem.core.errors import UnsupportedError
from tandem.models.gguf.experts import list_experts
from tandem.models.gguf.facts import WHERE, Config, Facts

__all__ = [
    "WITHOUT_ROPE",
    "make_granite",
    "make_kimi_linear",
    "make_lfm2",
    "make_lfm2_moe",
    "make_nemotron_h",
]

WITHOUT_ROPE = ("kimi_linear", "nemotron_h")
"""Model types whose configuration has no RoPE."""


def _list_layers(facts: Facts, part: str, kind: str) -> list[str]:
    """Return the type of each layer: ``kind`` if it has the tensor ``part``, else attention."""
    return [
        kind if facts.has(f"blk.{i}.{part}") else "full_attention"
        for i in range(facts.count("block_count"))
    ]


def _list_convolutions(facts: Facts) -> Config:
    layers = _list_layers(facts, "shortconv.conv.weight", "conv")
    first = layers.index("conv") if "conv" in layers else 0
    return {
        "norm_eps": facts.number("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": facts.count("shortconv.l_cache"),
        "conv_bias": facts.has(f"blk.{first}.shortconv.conv.bias"),
        "layer_types": layers,
    }


def make_lfm2(facts: Facts) -> Config:
    """Return the configuration fields that ``lfm2`` has beside those of all architectures."""
    # The file stores the MLP's final width, so transformers must not adjust it again.
    return {"model_type": "lfm2", "block_auto_adjust_ff_dim": False} | _list_convolutions(facts)


def make_lfm2_moe(facts: Facts) -> Config:
    """Return the configuration fields that ``lfm2moe`` has beside those of all architectures."""
    dense = facts.count("leading_dense_block_count", 0)
    # norm_topk_prob is True, as norm_w is in llama.cpp's src/models/lfm2.cpp.
    return (
        {
            "model_type": "lfm2_moe",
            "num_dense_layers": dense,
            "norm_topk_prob": True,
            "routed_scaling_factor": facts.number("expert_weights_scale", 1.0),
            "use_expert_bias": facts.has(f"blk.{dense}.exp_probs_b.bias"),
        }
        | list_experts(facts)
        | _list_convolutions(facts)
    )


def make_kimi_linear(facts: Facts) -> Config:
    """Return the configuration fields that ``kimi-linear`` has beside those of all
    architectures.
    """
    layers = _list_layers(facts, "ssm_a", "linear_attention")
    states = [i for i, kind in enumerate(layers) if kind == "linear_attention"]
    rates = facts.tensors[f"blk.{states[0]}.ssm_a"].shape if states else (0,)
    rotated = facts.count("rope.dimension_count")
    return {
        "model_type": "kimi_linear",
        "num_key_value_heads": facts.num_heads,
        "head_dim": rotated,
        "q_lora_rank": facts.count("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": facts.count("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": facts.count("attention.key_length_mla") - rotated,
        "v_head_dim": facts.count("attention.value_length_mla"),
        "linear_num_heads": prod(rates),
        "linear_head_dim": facts.count("kda.head_dim"),
        "linear_conv_kernel_dim": facts.count("ssm.conv_kernel"),
        "layer_types": layers,
        "mlp_layer_types": [
            "sparse" if facts.has(f"blk.{i}.ffn_gate_inp.weight") else "dense"
            for i in range(len(layers))
        ],
        "num_experts": facts.count("expert_count"),
        "num_experts_per_token": facts.count("expert_used_count"),
        "moe_intermediate_size": facts.count("expert_feed_forward_length"),
        "num_shared_experts": facts.count("expert_shared_count"),
        "num_expert_group": facts.count("expert_group_count", 1),
        "topk_group": facts.count("expert_group_used_count", 1),
        # moe_renormalize is True, as norm_w is in llama.cpp's src/models/kimi-linear.cpp.
        "moe_renormalize": True,
        "routed_scaling_factor": facts.number("expert_weights_scale"),
    }


def make_granite(facts: Facts) -> Config:
    """Return the configuration fields that ``granitehybrid`` has beside those of all architectures.

    Raises: UnsupportedError (a Bamba model, which llama.cpp also calls ``granitehybrid``).
    """
    if facts.find("embedding_scale") is None:
        text = "a granitehybrid file without embedding_scale is of Bamba: name its safetensors"
        raise UnsupportedError(WHERE, text)
    layers = _list_layers(facts, "ssm_a", "linear_attention")
    first = layers.index("linear_attention") if "linear_attention" in layers else 0
    heads, inner = facts.count("ssm.time_step_rank"), facts.count("ssm.inner_size")
    experts = facts.count("expert_count", 0)
    config: dict[str, Any] = {
        "model_type": "granitemoehybrid",
        "layer_types": layers,
        "embedding_multiplier": facts.number("embedding_scale"),
        "residual_multiplier": facts.number("residual_scale"),
        "attention_multiplier": facts.number("attention.scale"),
        "logits_scaling": facts.number("logit_scale"),
        "shared_intermediate_size": facts.count("expert_shared_feed_forward_length"),
        "num_local_experts": experts,
        "mamba_n_heads": heads,
        "mamba_n_groups": facts.count("ssm.group_count"),
        "mamba_d_state": facts.count("ssm.state_size"),
        "mamba_d_conv": facts.count("ssm.conv_kernel"),
        "mamba_d_head": inner // max(heads, 1),
        "mamba_expand": inner // max(facts.count("embedding_length"), 1),
        "mamba_conv_bias": facts.has(f"blk.{first}.ssm_conv1d.bias"),
        "mamba_proj_bias": facts.has(f"blk.{first}.ssm_in.bias"),
        "position_embedding_type": "rope"
        if facts.flag("rope.scaling.finetuned", default=False)
        else None,
    }
    return config | ({"num_experts_per_tok": facts.count("expert_used_count")} if experts else {})


LAYER_PARTS = {
    "ssm_a": "linear_attention",
    "attn_q.weight": "full_attention",
    "ffn_gate_inp.weight": "moe",
}
"""Layer types of Nemotron-H by a tensor that only such layers have; other layers are MLPs."""


def make_nemotron_h(facts: Facts) -> Config:
    """Return the configuration fields that ``nemotron_h`` and ``nemotron_h_moe`` have beside those
    of all architectures.
    """
    kinds = [
        next((k for part, k in LAYER_PARTS.items() if facts.has(f"blk.{i}.{part}")), "mlp")
        for i in range(facts.num_layers)
    ]

    def has(kind: str, part: str) -> bool:
        return kind in kinds and facts.has(f"blk.{kinds.index(kind)}.{part}")

    heads = facts.count("ssm.time_step_rank")
    config: dict[str, Any] = {
        "model_type": "nemotron_h",
        "layers_block_type": kinds,
        "layer_norm_epsilon": facts.number("attention.layer_norm_rms_epsilon"),
        "attention_bias": has("full_attention", "attn_q.bias"),
        "mlp_bias": has("mlp", "ffn_up.bias"),
        # llama.cpp's src/models/nemotron-h.cpp uses LLM_FFN_RELU_SQR: squared ReLU.
        "mlp_hidden_act": "relu2",
        "mamba_num_heads": heads,
        "mamba_head_dim": facts.count("ssm.inner_size") // max(heads, 1),
        "n_groups": facts.count("ssm.group_count"),
        "ssm_state_size": facts.count("ssm.state_size"),
        "conv_kernel": facts.count("ssm.conv_kernel"),
        "use_conv_bias": has("linear_attention", "ssm_conv1d.bias"),
        "use_bias": has("linear_attention", "ssm_in.bias"),
    }
    if "moe" not in kinds:
        return config
    config |= list_experts(facts, "n_routed_experts")
    return config | {
        "n_shared_experts": facts.count("expert_shared_count", 1),
        "moe_shared_expert_intermediate_size": facts.count("expert_shared_feed_forward_length"),
        "moe_latent_size": facts.count("moe_latent_size", 0) or None,
        "norm_topk_prob": facts.flag("expert_weights_norm", default=False),
        "routed_scaling_factor": facts.number("expert_weights_scale", 1.0),
        "n_group": facts.count("expert_group_count", 1),
        "topk_group": facts.count("expert_group_used_count", 1),
    }
