"""Writes checkpoints of the model benchmark as GGUF files. Like the peers' scripts it imports no
module of Tandem.

The files are laid out as by llama.cpp's converter and quantised by the ``gguf`` package from the
same weights that ours uses: qwen3_moe, deepseek_v2, glm4_moe_lite, gemma4 and qwen3_5_moe. In
layers with a recurrent state, which only the last has, llama.cpp interleaves the value heads (first
the first one of each key head, then the second one of each) and stores the negative decay rate
instead of its logarithm.
"""

import json
from pathlib import Path

import gguf
import numpy as np

LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "self_attn.q_a_proj.weight": "attn_q_a.weight",
    "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.shared_experts.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
    "mlp.shared_expert.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_expert.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_expert.down_proj.weight": "ffn_down_shexp.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
}
STATE_NAMES = {
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
}
"""Tensor names of models whose layers have a recurrent state; they add to or replace
``LAYER_NAMES``.
"""
GEMMA4_NAMES = {
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
    "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
    "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
    "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
    "router.proj.weight": "ffn_gate_inp.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "layer_scalar": "layer_output_scale.weight",
}
"""Tensor names of Gemma 4; they add to or replace ``LAYER_NAMES``."""
IN_FLOAT32 = ("ffn_gate_inp", "ssm_conv1d")
"""Parts of the names of matrices that llama.cpp does not quantise."""
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def read_tensors(path):
    """Yield (name, float32 array) of a safetensors file of bfloat16 tensors."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        base = file.tell()
    header.pop("__metadata__", None)
    data = np.memmap(path, np.uint8, "r")
    for name, entry in header.items():
        assert entry["dtype"] == "BF16", (name, entry["dtype"])
        begin, end = entry["data_offsets"]
        raw = data[base + begin : base + end].view(np.uint16).astype(np.uint32) << 16
        yield name, raw.view(np.float32).reshape(entry["shape"])


def write_gguf(folder, path, kind):
    """Write all tensors of a checkpoint to a file, and return the file's bytes.

    Vectors, routers and convolutions are float32, embedding and head Q8_0, all others of type
    ``kind``.
    """
    folder, path = Path(folder), Path(path)
    config = json.loads((folder / "config.json").read_text())
    is_latent, has_states = "kv_lora_rank" in config, "linear_num_key_heads" in config
    is_gemma4 = config["model_type"] == "gemma4_text"
    architecture = "deepseek2" if is_latent else "qwen35moe" if has_states else "qwen3moe"
    architecture = "gemma4" if is_gemma4 else architecture
    writer = gguf.GGUFWriter(path, architecture, use_temp_file=True)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    if "intermediate_size" in config:
        writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    if is_latent:
        describe_latents(writer, config)
    elif is_gemma4:
        describe_gemma4(writer, config)
    else:
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if has_states:
        describe_states(writer, config)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    ropes = config["rope_parameters"]
    writer.add_rope_freq_base(ropes.get("full_attention", ropes)["rope_theta"])
    # transformers has named the number of experts differently in its versions and model classes.
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    writer.add_expert_count(next(config[name] for name in names if config.get(name)))
    writer.add_expert_used_count(config.get("num_experts_per_tok") or config["top_k_experts"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in read_tensors(file):
            for new_name, part in rename(name, tensor, config):
                add_tensor(writer, new_name, part, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.stat().st_size


def describe_latents(writer, config):
    """Write the metadata for latent attention of DeepSeek-V2 and GLM-4.7-Flash."""
    is_glm = config["model_type"] == "glm4_moe_lite"
    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_head_count_kv(1)
    writer.add_key_length(rank + rope)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rope)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_kv_lora_rank(rank)
    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_rope_dimension_count(rope)
    kinds = config.get("mlp_layer_types") or ["dense"] * config["first_k_dense_replace"]
    writer.add_leading_dense_block_count(kinds.count("dense"))
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(is_glm)
    functions = gguf.ExpertGatingFuncType
    writer.add_expert_gating_func(functions.SIGMOID if is_glm else functions.SOFTMAX)


def describe_gemma4(writer, config):
    """Write the metadata of Gemma 4, which has two kinds of layers."""
    is_windowed = [kind == "sliding_attention" for kind in config["layer_types"]]
    whole = config["per_layer_config"][str(is_windowed.index(False))]
    heads, size, wide = config["num_key_value_heads"], config["head_dim"], whole["head_dim"]
    writer.add_head_count_kv(
        [heads if windowed else whole["num_key_value_heads"] for windowed in is_windowed]
    )
    writer.add_key_length(wide)
    writer.add_value_length(wide)
    writer.add_key_length_swa(size)
    writer.add_value_length_swa(size)
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(is_windowed)
    writer.add_shared_kv_layers(0)
    writer.add_embedding_length_per_layer_input(0)
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    ropes = config["rope_parameters"]
    writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    writer.add_rope_dimension_count(wide)
    writer.add_rope_dimension_count_swa(size)
    # Gemma 4 rotates only some pairs of a head: a factor of 1e30 makes the frequencies of the
    # remaining pairs zero in effect.
    half = wide // 2
    turned = int(half * ropes["full_attention"]["partial_rotary_factor"])
    factors = np.array([1.0] * turned + [1e30] * (half - turned), np.float32)
    writer.add_tensor("rope_freqs.weight", factors)


def describe_states(writer, config):
    """Write the metadata of Qwen3.5-MoE's layers with recurrent states."""
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)
    rotated = config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]
    writer.add_rope_dimension_count(int(rotated))
    # The sections of multimodal rotary embedding are time, height and width; text has the same
    # position in all three.
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def rename(name, tensor, config):
    """Yield (name, values) of each tensor of llama.cpp's format that one tensor of a transformers
    checkpoint becomes.
    """
    has_states = "linear_num_key_heads" in config
    if has_states and name.endswith("norm.weight") and ".linear_attn." not in name:
        # These RMSNorms multiply by (1 + weight), and llama.cpp's multiply by the weight: the 1 is
        # added here.
        tensor = tensor + 1
    if name in NAMES:
        yield NAMES[name], tensor
        return
    _, _, layer, rest = name.split(".", 3)
    if rest == "mlp.experts.gate_up_proj":
        gate, up = np.split(tensor, 2, axis=1)
        yield f"blk.{layer}.ffn_gate_exps.weight", gate
        yield f"blk.{layer}.ffn_up_exps.weight", up
    elif rest == "self_attn.kv_b_proj.weight":
        heads = tensor.reshape(config["num_attention_heads"], -1, config["kv_lora_rank"])
        keys, values = np.split(heads, [config["qk_nope_head_dim"]], axis=1)
        yield f"blk.{layer}.attn_k_b.weight", keys.transpose(0, 2, 1)
        yield f"blk.{layer}.attn_v_b.weight", values
    elif rest == "mlp.shared_expert_gate.weight":
        yield f"blk.{layer}.ffn_gate_inp_shexp.weight", tensor[0]
    elif config["model_type"] == "gemma4_text" and rest in GEMMA4_NAMES:
        yield f"blk.{layer}.{GEMMA4_NAMES[rest]}", tensor
    elif has_states and rest in STATE_NAMES:
        yield f"blk.{layer}.{STATE_NAMES[rest]}", rearrange_heads(rest, tensor, config)
    else:
        yield f"blk.{layer}.{LAYER_NAMES[rest]}", tensor


def rearrange_heads(rest, tensor, config):
    """Return a tensor with its value heads interleaved as in llama.cpp. A convolution loses its
    dimension of size 1, and the logarithm of a decay rate becomes the negative rate.
    """
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    size = config["linear_value_head_dim"]
    first = 2 * keys * config["linear_key_head_dim"]
    part = rest.removeprefix("linear_attn.").removesuffix(".weight")

    def take_turns(rows, size):
        by_head = rows.reshape(keys, values // keys, size, *rows.shape[1:])
        return by_head.swapaxes(0, 1).reshape(rows.shape)

    if part == "conv1d":
        tensor = tensor[:, 0]
    if part == "A_log":
        tensor = -np.exp(tensor)
    if part in ("in_proj_qkv", "conv1d"):
        return np.concatenate((tensor[:first], take_turns(tensor[first:], size)))
    if part == "in_proj_z":
        return take_turns(tensor, size)
    if part == "out_proj":
        return take_turns(tensor.T, size).T
    if part in ("in_proj_b", "in_proj_a", "A_log", "dt_bias"):
        return take_turns(tensor, 1)
    return tensor


def add_tensor(writer, name, tensor, kind):
    if tensor.ndim == 1 or any(part in name for part in IN_FLOAT32):
        writer.add_tensor(name, np.ascontiguousarray(tensor))
        return
    # Embedding and head are always Q8_0, since llama.cpp's own quantiser gives them at least 8 bits
    # too.
    wish = "Q8_0" if name in NAMES.values() else kind.upper()
    quantised = gguf.GGMLQuantizationType[wish]
    data = gguf.quants.quantize(np.ascontiguousarray(tensor), quantised)
    writer.add_tensor(name, data, raw_dtype=quantised)
