"""Writes models of transformers as GGUF, as llama.cpp's converter does, with the ``gguf`` package.

Names of tensors are the package's own table, so that ours is compared with another. What the
converter rearranges is written out here: q and k of llama, Gemma's norms, experts of a layer.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf_facts import OWN_FACTS, add_more_facts
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

ARCHITECTURES = {
    "llama": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "olmoe": "olmoe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "glm4": "glm4",
    "glm4_moe": "glm4moe",
    "minimax_m2": "minimax-m2",
    "gpt_oss": "gpt-oss",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "ministral3": "mistral3",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
    "kimi_linear": "kimi-linear",
    "granitemoehybrid": "granitehybrid",
    "olmo3": "olmo2",
    "cohere": "command-r",
    "exaone_moe": "exaone-moe",
    "ernie4_5_moe": "ernie4_5-moe",
    "glm4_moe_lite": "deepseek2",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan-moe",
    "mimo_v2_flash": "mimo2",
    "gemma4_text": "gemma4",
    "llama4_text": "llama4",
    "glm_moe_dsa": "glm-dsa",
}

EXTRA_NAMES = {
    r"model\.layers\.(\d+)\.mlp\.router\.(weight|bias)": r"blk.\1.ffn_gate_inp.\2",
    r"model\.layers\.(\d+)\.self_attn\.sinks": r"blk.\1.attn_sinks.weight",
    r"model\.layers\.(\d+)\.mlp\.(?:gate\.)?(?:moe_statics\.)?e_score_correction_bias": (
        r"blk.\1.exp_probs_b.bias"
    ),
    r"model\.layers\.(\d+)\.mlp\.experts\.down_proj_bias": r"blk.\1.ffn_down_exps.bias",
    r"model\.layers\.(\d+)\.feed_forward\.expert_bias": r"blk.\1.exp_probs_b.bias",
    r"model\.layers\.(\d+)\.block_sparse_moe\.router\.weight": r"blk.\1.ffn_gate_inp.weight",
    r"model\.layers\.(\d+)\.block_sparse_moe\.experts\.down_proj": r"blk.\1.ffn_down_exps.weight",
    r"model\.layers\.(\d+)\.(?:mamba|mixer|self_attn\.forget_gate)\.dt_bias": (
        r"blk.\1.ssm_dt.bias"
    ),
    r"model\.layers\.(\d+)\.(?:mamba|mixer|self_attn\.forget_gate)\.A_log": r"blk.\1.ssm_a",
    r"model\.layers\.(\d+)\.(?:mamba|mixer)\.D": r"blk.\1.ssm_d",
    r"model\.layers\.(\d+)\.mlp\.expert_bias": r"blk.\1.exp_probs_b.bias",
    r"model\.layers\.(\d+)\.mixer\.gate\.e_score_correction_bias": r"blk.\1.exp_probs_b.bias",
    r"model\.layers\.(\d+)\.mixer\.experts\.(up|down)_proj": r"blk.\1.ffn_\2_exps.weight",
    r"model\.layers\.(\d+)\.mixer\.norm\.weight": r"blk.\1.ssm_norm.weight",
    r"model\.layers\.(\d+)\.router\.scale": r"blk.\1.ffn_gate_inp.scale",
    r"model\.layers\.(\d+)\.router\.per_expert_scale": r"blk.\1.ffn_down_exps.scale",
    r"model\.layers\.(\d+)\.experts\.gate_up_proj": r"blk.\1.ffn_gate_up_exps.weight",
}
"""Where the package's table has another name of transformers' than today's."""

Choose = Callable[[str, tuple[int, ...]], str]


def write_model(
    model: Any,
    path: Path,
    kind: str | Choose = "F32",
    *,
    tokenizer: Callable[[gguf.GGUFWriter], None] | None = None,
    metadata: Callable[[gguf.GGUFWriter], None] | None = None,
    quantize: Callable[[np.ndarray, str], np.ndarray] | None = None,
    has_whole_kv: bool = False,
) -> None:
    """Write a model; matrices as ``kind`` where their rows allow it, vectors and routers in F32.

    Args:
        model: of transformers, with weights.
        path: of the new file.
        kind: name of a type, or ``kind(name, shape)``.
        tokenizer: adds what is to be said about it.
        metadata: adds what else is to be said.
        quantize: codes a float32 matrix; None = as the ``gguf`` package does.
        has_whole_kv: MLA as files of before April 2025 have it: its keys and values in one matrix,
            a KV head for each head.
    """
    config = model.config
    architecture = find_architecture(config)
    writer = gguf.GGUFWriter(path, architecture)
    state = model.state_dict()
    if config.model_type in OWN_FACTS:
        OWN_FACTS[config.model_type](writer, config)
        add_tokens(writer, config)
    else:
        add_facts(writer, config)
        add_more_facts(writer, config, state)
    if architecture in ("deepseek2", "mistral4", "glm-dsa"):
        add_latent_facts(writer, config, has_whole_kv=has_whole_kv)
    if tokenizer is not None:
        tokenizer(writer)
    if metadata is not None:
        metadata(writer)
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    for name, array in rename(architecture, config, state, has_whole_kv=has_whole_kv):
        wish = kind if isinstance(kind, str) else kind(name, array.shape)
        add_tensor(writer, name, array, wish, quantize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def find_architecture(config: Any) -> str:
    """Return the name of llama.cpp's architecture."""
    if config.model_type == "nemotron_h" and "moe" in config.layers_block_type:
        return "nemotron_h_moe"
    return ARCHITECTURES.get(config.model_type, config.model_type)


def add_tensor(
    writer: gguf.GGUFWriter,
    name: str,
    array: np.ndarray,
    kind: str,
    quantize: Callable[[np.ndarray, str], np.ndarray] | None = None,
) -> None:
    """Add a tensor in a type, or in F32 where that cannot be."""
    wanted = gguf.GGMLQuantizationType[kind]
    block = gguf.GGML_QUANT_SIZES[wanted][0]
    array = np.ascontiguousarray(array, np.float32)
    if array.ndim == 1 or "ffn_gate_inp" in name or "conv1d" in name or array.shape[-1] % block:
        wanted = gguf.GGMLQuantizationType.F32
    if wanted == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, array)
        return
    code = quantize or (lambda w, k: gguf.quants.quantize(w, gguf.GGMLQuantizationType[k]))
    data = code(array, kind)
    writer.add_tensor(name, data, raw_dtype=wanted)


def rename(
    architecture: str, config: Any, state: dict[str, torch.Tensor], *, has_whole_kv: bool = False
) -> Any:
    """Yield the tensors of llama.cpp."""
    number = {v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    table = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for name, tensor in state.items():
        w = tensor.detach().float().numpy()
        if ".act_fn." in name:
            continue  # Metadata there.
        if ".experts.gate_up_proj" in name and architecture != "gemma4":
            is_turned = architecture in ("gpt-oss", "llama4")
            in_turn = architecture == "gpt-oss"
            yield from split_experts(name, w, is_turned=is_turned, in_turn=in_turn)
            continue
        if name.endswith("self_attn.conv1d.weight"):
            for part, own in zip("qkv", np.split(w, 3), strict=True):
                new = f"blk.{name.split('.')[2]}.ssm_conv1d_{part}.weight"
                yield new, own.reshape(1, len(own), 1, -1)
            continue
        if ".shared_mlp." in name and architecture == "granitehybrid":
            yield from split_shared(config, name, w)
            continue
        if name.endswith("A_log") and ".linear_attn." not in name:
            w = -np.exp(w)
        if (".mamba." in name or ".mixer." in name) and name.endswith((".A_log", ".D")):
            w = w[:, None]
        if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
            groups = getattr(config, "mamba_n_groups", None) or config.n_groups
            w = w.reshape(groups, -1)
        if name.endswith((".conv.conv.weight", "mamba.conv1d.weight", "mixer.conv1d.weight")):
            w = w[:, 0]
        if ".linear_attn." in name:
            yield from rearrange_state(architecture, config, name, w)
            continue
        if name.endswith("kv_b_proj.weight") and not has_whole_kv:
            layer = name.split(".")[2]
            heads = w.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
            keys, values = np.split(heads, [config.qk_nope_head_dim], axis=1)
            yield f"blk.{layer}.attn_k_b.weight", keys.swapaxes(1, 2)
            yield f"blk.{layer}.attn_v_b.weight", values
            continue
        new = next(
            (re.sub(p, r, name) for p, r in EXTRA_NAMES.items() if re.fullmatch(p, name)), None
        )
        if new is None:
            module, _, ending = name.rpartition(".")
            if ending not in ("weight", "bias"):
                module, ending = name, "weight"
            module = module.replace(".forget_gate.", ".")
            if architecture.startswith("nemotron_h"):
                module = module.replace("model.", "backbone.")
            new = table.get_name(module)
            assert new is not None, name
            new = f"{new}.{ending}"
        if architecture in PERMUTED and re.search(r"\.(q|k)_proj\.", name):
            size = getattr(config, "head_dim", None)
            size = size or config.hidden_size // config.num_attention_heads
            w = (
                w.reshape(w.shape[0] // size, 2, size // 2, *w.shape[1:])
                .swapaxes(1, 2)
                .reshape(w.shape)
            )
        is_centred = architecture in (
            "gemma",
            "nemotron",
            "gemma2",
            "gemma3",
            "qwen3next",
            "qwen35",
            "qwen35moe",
        )
        if is_centred and name.endswith("norm.weight") and "linear_attn." not in name:
            w = w + 1
        if architecture in ("gpt-oss", "llama4") and name.endswith("experts.down_proj"):
            w = w.swapaxes(1, 2)
        if name.endswith("shared_expert_gate.weight"):
            w = w[0]
        yield new, w


PERMUTED = (
    "llama",
    "mistral3",
    "smollm3",
    "arcee",
    "granite",
    "granitemoe",
    "granitehybrid",
    "olmo",
)


def split_shared(config: Any, name: str, w: np.ndarray) -> Any:
    """Yield Granite's MLP that every token uses: beside experts by another name."""
    start = f"blk.{name.split('.')[2]}.ffn"
    ending = "_shexp.weight" if config.num_local_experts else ".weight"
    if name.endswith("output_linear.weight"):
        yield f"{start}_down{ending}", w
        return
    for part, own in zip(("gate", "up"), np.split(w, 2), strict=True):
        yield f"{start}_{part}{ending}", own


STATE_NAMES = {
    "in_proj_qkv.weight": "attn_qkv.weight",
    "in_proj_z.weight": "attn_gate.weight",
    "in_proj_b.weight": "ssm_beta.weight",
    "in_proj_a.weight": "ssm_alpha.weight",
    "in_proj_ba.weight": "ssm_ba.weight",
    "conv1d.weight": "ssm_conv1d.weight",
    "dt_bias": "ssm_dt.bias",
    "A_log": "ssm_a",
    "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight",
}


def rearrange_state(architecture: str, config: Any, name: str, w: np.ndarray) -> Any:
    """Yield the tensors of a layer with a state: heads of values in turn, or rows by kind."""
    layer, part = name.split(".")[2], name.partition(".linear_attn.")[2]
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    group = values // keys
    if part == "in_proj_qkvz.weight":
        heads = w.reshape(keys, -1, w.shape[-1])
        ends = np.cumsum((key_dim, key_dim, group * value_dim))
        q, k, v, z = (kind.reshape(-1, w.shape[-1]) for kind in np.split(heads, ends, axis=1))
        yield f"blk.{layer}.attn_qkv.weight", np.concatenate((q, k, v))
        yield f"blk.{layer}.attn_gate.weight", z
        return
    if part == "conv1d.weight":
        w = w[:, 0]
    if part == "A_log":
        w = -np.exp(w)

    def turn(rows: np.ndarray, size: int) -> np.ndarray:
        by_head = rows.reshape(keys, group, size, *rows.shape[1:])
        return by_head.swapaxes(0, 1).reshape(rows.shape)

    if architecture != "qwen3next":
        first = 2 * keys * key_dim
        if part in ("in_proj_qkv.weight", "conv1d.weight"):
            w = np.concatenate((w[:first], turn(w[first:], value_dim)))
        elif part == "in_proj_z.weight":
            w = turn(w, value_dim)
        elif part in ("in_proj_b.weight", "in_proj_a.weight", "A_log", "dt_bias"):
            w = turn(w, 1)
        elif part == "out_proj.weight":
            w = turn(w.T, value_dim).T
    yield f"blk.{layer}.{STATE_NAMES[part]}", w


def split_experts(name: str, w: np.ndarray, *, is_turned: bool, in_turn: bool) -> Any:
    layer = name.split(".")[2]
    ending = "bias" if name.endswith("bias") else "weight"
    if is_turned and w.ndim == 3:
        w = w.swapaxes(-1, -2)
    parts = (w[:, 0::2], w[:, 1::2]) if in_turn else np.split(w, 2, axis=1)
    for part, array in zip(("gate", "up"), parts, strict=True):
        yield f"blk.{layer}.ffn_{part}_exps.{ending}", array


def add_facts(writer: gguf.GGUFWriter, config: Any) -> None:
    """Say what the converter says about a model."""
    get = lambda name, default=None: getattr(config, name, default)  # noqa: E731
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    if get("intermediate_size"):
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    head_dim = get("head_dim") or config.hidden_size // config.num_attention_heads
    states = [kind in ("conv", "linear_attention") for kind in get("layer_types") or ()]
    kv_heads: Any = 1 if get("kv_lora_rank") else config.num_key_value_heads
    if any(states) and not get("linear_num_key_heads"):
        kv_heads = [0 if has_state else kv_heads for has_state in states]
    if not get("kv_lora_rank") or any(states):
        writer.add_head_count_kv(kv_heads)
    if not get("kv_lora_rank") and config.model_type != "granitemoehybrid":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if get("layer_norm_eps") or config.model_type in ("nemotron", "olmo"):
        writer.add_layer_norm_eps(get("layer_norm_eps") or get("norm_eps") or 1e-5)
    else:
        writer.add_layer_norm_rms_eps(get("norm_eps") or config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    add_hybrid_facts(writer, config)
    rope = get("rope_parameters") or {"rope_theta": 10_000.0, "partial_rotary_factor": 1.0}
    if "full_attention" in rope:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    factor = rope.get("partial_rotary_factor") or 1.0
    rotated = get("rotary_dim") or int(head_dim * factor)
    if config.model_type != "kimi_linear":
        writer.add_rope_dimension_count(rotated)
    if rope.get("rope_type") in ("linear", "yarn"):
        kind = (
            gguf.RopeScalingType.LINEAR
            if rope["rope_type"] == "linear"
            else gguf.RopeScalingType.YARN
        )
        writer.add_rope_scaling_type(kind)
        writer.add_rope_scaling_factor(rope["factor"])
        if rope.get("original_max_position_embeddings"):
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope.get("rope_type") == "longrope":
        # As llama.cpp's converter of Phi-3, which writes no type of scaling.
        original = rope["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(ROPE_INIT_FUNCTIONS["longrope"](config)[1])
        for length in ("long", "short"):
            factors = np.array(rope[f"{length}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(rope, head_dim))
    experts = next(
        (get(n) for n in ("num_experts", "num_local_experts", "n_routed_experts") if get(n)), 0
    )
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if get("moe_intermediate_size"):
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        elif config.model_type in ("minimax_m2", "gpt_oss", "hunyuan_v1_moe"):
            writer.add_expert_feed_forward_length(config.intermediate_size)
        if get("shared_expert_intermediate_size"):
            writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
        if get("n_routed_experts"):
            writer.add_expert_shared_count(config.n_shared_experts)
            writer.add_leading_dense_block_count(config.first_k_dense_replace)
            writer.add_expert_weights_norm(bool(config.norm_topk_prob))
            writer.add_expert_weights_scale(config.routed_scaling_factor)
            if config.n_group:
                writer.add_expert_group_count(config.n_group)
                writer.add_expert_group_used_count(config.topk_group)
    if get("linear_num_key_heads"):
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
        writer.add_full_attention_interval(config.layer_types.index("full_attention") + 1)
        if config.model_type != "qwen3_next":
            writer.add_rope_dimension_sections([11, 11, 10, 0])
    if get("sliding_window"):
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "olmo3":
        writer.add_sliding_window_pattern([k == "sliding_attention" for k in config.layer_types])
    if config.model_type in ("cohere", "cohere2"):
        writer.add_logit_scale(config.logit_scale)
    if config.model_type == "olmo" and config.clip_qkv:
        writer.add_clamp_kqv(config.clip_qkv)
    if config.model_type == "stablelm":
        writer.add_parallel_residual(config.use_parallel_residual)
    if config.model_type == "ernie4_5_moe":
        writer.add_expert_count(config.moe_num_experts)
        writer.add_expert_used_count(config.moe_k)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_count(config.moe_num_shared_experts)
        shared_size = config.moe_intermediate_size * config.moe_num_shared_experts
        writer.add_expert_shared_feed_forward_length(shared_size)
        writer.add_leading_dense_block_count(config.moe_layer_start_index)
        writer.add_interleave_moe_layer_step(config.moe_layer_interval)
    if config.model_type in ("granite", "granitemoe"):
        add_multipliers(writer, config)
    if config.model_type == "dots1":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    add_tokens(writer, config)


def add_tokens(writer: gguf.GGUFWriter, config: Any) -> None:
    """Say which tokens frame a text."""
    for name, add in (
        ("bos", writer.add_bos_token_id),
        ("eos", writer.add_eos_token_id),
        ("pad", writer.add_pad_token_id),
    ):
        token_id = getattr(config, f"{name}_token_id", None)
        if isinstance(token_id, int):
            add(token_id)


def add_hybrid_facts(writer: gguf.GGUFWriter, config: Any) -> None:
    """Say what the converters of models with states of other kinds, and of Ministral, say."""
    kind = config.model_type
    if kind in ("lfm2", "lfm2_moe"):
        writer.add_shortconv_l_cache(config.conv_L_cache)
    if kind == "lfm2_moe":
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if kind == "ministral3":
        rope = config.rope_parameters
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if kind == "kimi_linear":
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_kda_head_dim(config.linear_head_dim)
        if config.q_lora_rank:
            writer.add_q_lora_rank(config.q_lora_rank)
        writer.add_kv_lora_rank(config.kv_lora_rank)
        writer.add_rope_dimension_count(config.qk_rope_head_dim)
        writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
        writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
        writer.add_value_length_mla(config.v_head_dim)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_leading_dense_block_count(1)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
    if kind == "granitemoehybrid":
        add_multipliers(writer, config)
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
        writer.add_ssm_conv_kernel(config.mamba_d_conv)
        writer.add_ssm_state_size(config.mamba_d_state)
        writer.add_ssm_group_count(config.mamba_n_groups)
        writer.add_ssm_inner_size(config.mamba_expand * config.hidden_size)
        writer.add_ssm_time_step_rank(config.mamba_n_heads)
        writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")


def add_multipliers(writer: gguf.GGUFWriter, config: Any) -> None:
    """Say Granite's factors."""
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def add_latent_facts(writer: gguf.GGUFWriter, config: Any, *, has_whole_kv: bool) -> None:
    """Say what the converter says about DeepSeek-V2 and V3."""
    rank, rope = config.kv_lora_rank, config.qk_rope_head_dim
    key = config.qk_nope_head_dim + rope
    if has_whole_kv:
        writer.add_head_count_kv(config.num_attention_heads)
        writer.add_key_length(key)
        writer.add_value_length(config.v_head_dim)
    else:
        writer.add_head_count_kv(1)
        writer.add_key_length(rank + rope)
        writer.add_value_length(rank)
        writer.add_key_length_mla(key)
        writer.add_value_length_mla(config.v_head_dim)
    writer.add_kv_lora_rank(rank)
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    if config.model_type in ("deepseek_v3", "glm4_moe_lite"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    scale = config.rope_parameters.get("mscale_all_dim")
    if scale:
        writer.add_rope_scaling_yarn_log_mul(0.1 * scale)


def llama3_factors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    """Return the factors that llama.cpp divides RoPE frequencies by, as its converter does."""
    base, old = rope["rope_theta"], rope["original_max_position_embeddings"]
    factors = []
    for freq in 1.0 / (base ** (np.arange(0, head_dim, 2) / head_dim)):
        wavelen = 2 * np.pi / freq
        if wavelen < old / rope["high_freq_factor"]:
            factors.append(1.0)
        elif wavelen > old / rope["low_freq_factor"]:
            factors.append(rope["factor"])
        else:
            smooth = (old / wavelen - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)
