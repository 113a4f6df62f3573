"""What llama.cpp's converter says about models whose layers differ in size, and about some others.

The part of ``gguf_writing`` that is special to an architecture; tensors are written there.
"""

from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np
import torch

__all__ = ["OWN_FACTS", "add_more_facts"]


def add_more_facts(writer: gguf.GGUFWriter, config: Any, state: Mapping[str, torch.Tensor]) -> None:
    """Say what is special to architectures that are otherwise like most."""
    kind = config.model_type
    if kind == "afmoe":
        writer.add_expert_shared_count(config.num_shared_experts)
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_weights_norm(True)
        writer.add_expert_weights_scale(config.route_scale)
    if kind == "exaone_moe":
        writer.add_sliding_window_pattern([k == "sliding_attention" for k in config.layer_types])
        writer.add_expert_shared_count(config.num_shared_experts)
        shared_size = config.moe_intermediate_size * config.num_shared_experts
        writer.add_expert_shared_feed_forward_length(shared_size)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_nextn_predict_layers(0)
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if kind == "hunyuan_v1_moe":
        writer.add_expert_shared_feed_forward_length(config.intermediate_size)
        writer.add_expert_shared_count(1)
    if kind == "apertus":
        for part in ("alpha_p", "alpha_n", "beta", "eps"):
            values = [
                float(state[f"model.layers.{i}.mlp.act_fn.{part}"])
                for i in range(config.num_hidden_layers)
            ]
            getattr(writer, f"add_xielu_{part}")(values)
    if kind == "mistral4":
        rope = config.rope_parameters
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
        writer.add_attn_temperature_length(rope["original_max_position_embeddings"])
    if kind == "glm_moe_dsa":
        writer.add_indexer_head_count(config.index_n_heads)
        writer.add_indexer_key_length(config.index_head_dim)
        writer.add_indexer_top_k(config.index_topk)
        kinds = [kind == "full" for kind in config.indexer_types]
        writer.add_array("glm-dsa.attention.indexer.types", kinds)


def _add_sizes(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)


def _add_windows(writer: gguf.GGUFWriter, config: Any, window: int) -> list[bool]:
    is_windowed = [kind == "sliding_attention" for kind in config.layer_types]
    writer.add_sliding_window(window)
    writer.add_sliding_window_pattern(is_windowed)
    return is_windowed


def add_gemma4(writer: gguf.GGUFWriter, config: Any) -> None:
    """Say what is to be said about Gemma 4."""
    _add_sizes(writer, config)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    is_windowed = _add_windows(writer, config, config.sliding_window)
    local, whole = (
        config.per_layer_config[is_windowed.index(has_window)] for has_window in (True, False)
    )
    writer.add_head_count_kv(
        [(local if windowed else whole).num_key_value_heads for windowed in is_windowed]
    )
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_key_length(whole.head_dim)
    writer.add_value_length(whole.head_dim)
    writer.add_key_length_swa(local.head_dim)
    writer.add_value_length_swa(local.head_dim)
    width, first = config.intermediate_size, len(is_windowed) - config.num_kv_shared_layers
    if config.use_double_wide_mlp:
        widths = [width if i < first else 2 * width for i in range(len(is_windowed))]
        writer.add_feed_forward_length(widths)
    else:
        writer.add_feed_forward_length(width)
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    writer.add_rope_dimension_count(whole.head_dim)
    writer.add_rope_dimension_count_swa(local.head_dim)
    half = whole.head_dim // 2
    rotated = int(half * rope["full_attention"]["partial_rotary_factor"])
    factors = np.array([1.0] * rotated + [1e30] * (half - rotated), np.float32)
    writer.add_tensor("rope_freqs.weight", factors)


def add_mimo2(writer: gguf.GGUFWriter, config: Any) -> None:
    """Say what is to be said about MiMo-V2."""
    _add_sizes(writer, config)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_feed_forward_length(config.intermediate_size)
    # The hub's files have one less than transformers counts.
    is_windowed = _add_windows(writer, config, config.sliding_window - 1)
    heads = config.num_key_value_heads
    writer.add_head_count_kv([2 * heads if windowed else heads for windowed in is_windowed])
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.v_head_dim)
    writer.add_float32("mimo2.attention.value_scale", config.attention_value_scale)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    rope = config.rope_parameters
    share = rope["full_attention"]["partial_rotary_factor"]
    writer.add_rope_dimension_count(int(config.head_dim * share))
    writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])


def add_llama4(writer: gguf.GGUFWriter, config: Any) -> None:
    """Say what is to be said about the text of Llama 4."""
    _add_sizes(writer, config)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_feed_forward_length(config.intermediate_size_mlp)
    writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.intermediate_size)


def add_nemotron_h(writer: gguf.GGUFWriter, config: Any) -> None:
    """Say what is to be said about Nemotron-H and Nemotron 3."""
    _add_sizes(writer, config)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    kinds = config.layers_block_type
    is_moe = "moe" in kinds
    width = config.moe_intermediate_size if is_moe else config.intermediate_size
    heads = config.num_key_value_heads
    writer.add_head_count_kv([heads if kind == "full_attention" else 0 for kind in kinds])
    writer.add_feed_forward_length([width if kind in ("moe", "mlp") else 0 for kind in kinds])
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_state_size(config.ssm_state_size)
    writer.add_ssm_group_count(config.n_groups)
    writer.add_ssm_inner_size(config.mamba_num_heads * config.mamba_head_dim)
    writer.add_ssm_time_step_rank(config.mamba_num_heads)
    if not is_moe:
        return
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_group_count(config.n_group)
    if config.moe_latent_size:
        writer.add_moe_latent_size(config.moe_latent_size)


OWN_FACTS = {
    "gemma4_text": add_gemma4,
    "mimo_v2_flash": add_mimo2,
    "llama4_text": add_llama4,
    "nemotron_h": add_nemotron_h,
}
"""Functions that say all, by ``model_type``."""
