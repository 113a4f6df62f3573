"""llama.cpp or its fork ik_llama.cpp as a peer, by argument; imports nothing of ours.

Run by its own interpreter (see ``peers``). Writes a qwen3_moe or deepseek_v2 checkpoint as GGUF,
quantised by the ``gguf`` package from the very same weights, and runs it through the C interface
that both have: batches of several sequences, greedy. The fork repacks the weights as it loads them.
"""

import ctypes
import json
import sys
import time
from pathlib import Path

import gguf
import numpy as np
from peer_loop import answer_calls

IS_FORK = sys.argv[1] == "ik_llama.cpp"
if IS_FORK:
    from ik_llama_cpp import _ctypes_api as llama_cpp

    # The binding leaves it out.
    llama_cpp.llama_print_system_info = llama_cpp._lib.llama_print_system_info
else:
    import llama_cpp

DECODE_STEPS = 8
ISAS = {
    "AMX_INT8": "amx",
    "AVX512_BF16": "avx512_bf16",
    "AVX512_VNNI": "avx512_vnni",
    "AVX512": "avx512_bw",
    "AVX2": "avx2",
}
"""Names in the library's account of itself, widest first, and ours."""

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
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
}
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
    """Write every tensor of the checkpoint; norms and routers in float32, the rest as ``kind``."""
    folder, path = Path(folder), Path(path)
    config = json.loads((folder / "config.json").read_text())
    is_latent = "kv_lora_rank" in config
    architecture = "deepseek2" if is_latent else "qwen3moe"
    writer = gguf.GGUFWriter(path, architecture, use_temp_file=True)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    if is_latent:
        describe_latents(writer, config)
    else:
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    # transformers has written either name.
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    writer.add_expert_count(next(config[name] for name in names if config.get(name)))
    writer.add_expert_used_count(config["num_experts_per_tok"])
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
    """Write what DeepSeek-V2 has beyond others."""
    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_head_count_kv(1)
    writer.add_key_length(rank + rope)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rope)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_kv_lora_rank(rank)
    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_rope_dimension_count(rope)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(False)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)


def rename(name, tensor, config):
    """Yield the tensors of llama.cpp that one of transformers is."""
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
    else:
        yield f"blk.{layer}.{LAYER_NAMES[rest]}", tensor


def add_tensor(writer, name, tensor, kind):
    if tensor.ndim == 1 or "ffn_gate_inp" in name:
        writer.add_tensor(name, np.ascontiguousarray(tensor))
        return
    # As llama.cpp's own quantiser does, the embedding and the head get no fewer than 8 bits.
    wish = "Q8_0" if name in NAMES.values() else kind.upper()
    quantised = gguf.GGMLQuantizationType[wish]
    data = gguf.quants.quantize(np.ascontiguousarray(tensor), quantised)
    writer.add_tensor(name, data, raw_dtype=quantised)


def find_isa():
    """Return the widest instruction set that the library was built for."""
    describe = llama_cpp.llama_print_system_info
    if IS_FORK:
        describe.restype = ctypes.c_char_p
    text = describe().decode()
    return next((isa for name, isa in ISAS.items() if f"{name} = 1" in text), "plain")


class Model:
    """A loaded GGUF; one context for all measurements."""

    def __init__(self, path, threads, context_len, num_sequences):
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        if IS_FORK:
            params.repack_tensors, params.use_mmap = True, False
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        assert self.model, path
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = context_len * num_sequences
        params.n_batch = context_len * num_sequences
        params.n_ubatch = 512
        params.n_seq_max = num_sequences
        params.n_threads = params.n_threads_batch = threads
        if IS_FORK:
            # What its documents advise for latent attention on a CPU; others do not read it.
            params.mla_attn, params.flash_attn = 3, True
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        assert self.context, "no context"
        self.batch = llama_cpp.llama_batch_init(context_len * num_sequences, 0, 1)
        vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)

    def clear(self):
        if IS_FORK:
            llama_cpp.llama_kv_cache_clear(self.context)
        else:
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)

    def run(self, rows):
        """Decode (token, position, sequence, wants logits) rows in one call."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wants_logits) in enumerate(rows):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = wants_logits
        code = llama_cpp.llama_decode(self.context, batch)
        assert code == 0, code
        # Waits for the result, where it is not there yet.
        self.logits(next(i for i, row in enumerate(rows) if row[3]))

    def logits(self, row):
        pointer = llama_cpp.llama_get_logits_ith(self.context, row)
        return np.ctypeslib.as_array(pointer, (self.vocab_size,))

    def prefill(self, prompts):
        """Return the milliseconds, and the first token of each prompt."""
        self.clear()
        rows = [
            (token, i, sequence, i == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for i, token in enumerate(prompt)
        ]
        begin = time.perf_counter()
        self.run(rows)
        elapsed = time.perf_counter() - begin
        last = [i for i, row in enumerate(rows) if row[3]]
        return elapsed * 1e3, [int(self.logits(i).argmax()) for i in last]

    def decode(self, prompts):
        """Return the milliseconds of a step, the mean of a few."""
        _, tokens = self.prefill(prompts)
        length = len(prompts[0])
        begin = time.perf_counter()
        for step in range(DECODE_STEPS):
            self.run([(t, length + step, sequence, True) for sequence, t in enumerate(tokens)])
            tokens = [int(self.logits(i).argmax()) for i in range(len(tokens))]
        return (time.perf_counter() - begin) / DECODE_STEPS * 1e3

    def score(self, prompt):
        """Return the logits of every token of a prompt."""
        self.clear()
        self.run([(token, i, 0, True) for i, token in enumerate(prompt)])
        return [self.logits(i).tolist() for i in range(len(prompt))]


class Peer:
    """What is asked for over the pipes: a model written, one loaded, its measurements."""

    def __init__(self):
        self.model = None

    def write_gguf(self, folder, path, kind):
        return write_gguf(folder, path, kind)

    def load(self, **arguments):
        """Load a model; return what the library was built for."""
        self.model = Model(**arguments)
        return find_isa()

    def ping(self):
        """Answer once everything is imported."""

    def prefill(self, prompts):
        return self.model.prefill(prompts)[0]

    def decode(self, prompts):
        return self.model.decode(prompts)

    def score(self, prompt):
        return self.model.score(prompt)

    def first_token(self, path, threads, prompt):
        """Load a model and run a prompt; return the seconds, and the logits of its last token."""
        begin = time.perf_counter()
        self.model = Model(path, threads, context_len=128, num_sequences=1)
        self.model.clear()
        last = len(prompt) - 1
        self.model.run([(token, i, 0, i == last) for i, token in enumerate(prompt)])
        return time.perf_counter() - begin, self.model.logits(last).tolist()


if __name__ == "__main__":
    answer_calls(Peer)
