"""Goal: a model in GGUF is the model it was made of: same configuration, same weights.

Method: a tiny random model of each family, with every switch away from its default where the file
can say so, is saved by transformers and written as GGUF by ``gguf_writing``, whose table of names
is the ``gguf`` package's. Both are loaded here; configurations must agree field by field, logits
bit by bit. (Gemma's norms lose a rounding on the way through ``1 + weight``.)
"""

import copy

import numpy as np
import pytest
import torch
import transformers
from gguf_writing import write_model
from loading import load_checkpoint
from test_gguf_formats import make_codes
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from quick import rest_slow
from tandem.models.families import find_family, open_checkpoint
from tandem.models.identity import list_config_values

COMMON = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 640,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 20_000.0},
}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MIXTRAL = {"num_local_experts": 6, "num_experts_per_tok": 2}
WHOLE = {"head_dim": 16}
"""Heads that share the hidden size evenly, as llama.cpp wants them of these."""
YARN = {
    "rope_type": "yarn",
    "rope_theta": 20_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 160,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
PARTIAL = {"rope_type": "default", "rope_theta": 20_000.0, "partial_rotary_factor": 0.5}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
OLMO3_ROPE = {
    "full_attention": YARN,
    "sliding_attention": {"rope_type": "default", "rope_theta": 20_000.0},
}
LATENTS = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 48, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32, "v_head_dim": 24, "head_dim": 16, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
}  # fmt: skip
STATES = {
    "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "rope_parameters": PARTIAL,
}  # fmt: skip
MINISTRAL = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
CONVOLUTIONS = {
    "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 4, "norm_eps": 1e-5,
    "conv_bias": True, "head_dim": 16,
}  # fmt: skip
KIMI = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32,
    "v_head_dim": 24, "head_dim": 16, "moe_intermediate_size": 32, "num_local_experts": 6,
    "num_experts_per_tok": 2, "linear_num_heads": 4, "linear_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"], "routed_scaling_factor": 1.7,
}  # fmt: skip
GRANITE = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "head_dim": 16,
    "num_local_experts": 6, "num_experts_per_tok": 2, "shared_intermediate_size": 48,
    "mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 24, "mamba_d_head": 32,
    "mamba_expand": 2, "embedding_multiplier": 3.0, "residual_multiplier": 0.4,
    "attention_multiplier": 0.2, "logits_scaling": 2.0,
}  # fmt: skip
MULTIPLIERS = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}  # fmt: skip
NEMOTRON_H = {
    "mamba_num_heads": 4, "n_groups": 2, "ssm_state_size": 24, "mamba_head_dim": 32,
}  # fmt: skip
NEMOTRON_EXPERTS = {
    "intermediate_size": 40, "n_routed_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 40, "moe_shared_expert_intermediate_size": 56,
    "moe_latent_size": 32, "norm_topk_prob": True, "routed_scaling_factor": 1.7,
}  # fmt: skip
GEMMA4 = {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 20, "head_dim": 16, "global_head_dim": 32, "final_logit_softcapping": 4.0,
    "hidden_size_per_layer_input": 0, "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
}  # fmt: skip
GROUPS = {"n_group": 4, "topk_group": 2}
LATENT_YARN = YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}
MODELS = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama 3.1": ("llama", {"rope_parameters": LLAMA3}),
    "llama linear": ("llama", {"rope_parameters": LINEAR}),
    "llama bias": ("llama", {"attention_bias": True}),
    "qwen2": ("qwen2", WHOLE),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3 yarn": ("qwen3", {"rope_parameters": YARN}),
    "gemma2": ("gemma2", {"sliding_window": 20, "query_pre_attn_scalar": 32}),
    "gemma3": (
        "gemma3_text",
        {"sliding_window": 20, "query_pre_attn_scalar": 32, "rope_parameters": GEMMA3_ROPE},
    ),
    "phi3": ("phi3", WHOLE | {"sliding_window": 24}),
    "glm4": ("glm4", {"rope_parameters": PARTIAL}),
    "mixtral": ("mixtral", MIXTRAL),
    "qwen2_moe": ("qwen2_moe", WHOLE | MOE | {"shared_expert_intermediate_size": 48}),
    "qwen3_moe": ("qwen3_moe", MOE | {"norm_topk_prob": True}),
    "olmoe": (
        "olmoe",
        WHOLE | {"num_experts": 6, "num_experts_per_tok": 6, "num_key_value_heads": 4},
    ),
    "glm4_moe": (
        "glm4_moe",
        {
            "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "first_k_dense_replace": 1, "n_shared_experts": 1, "use_qk_norm": True,
            "routed_scaling_factor": 1.5, "norm_topk_prob": True, "rope_parameters": PARTIAL,
        },
    ),
    "minimax_m2": ("minimax_m2", MIXTRAL | {"rotary_dim": 16, "rope_parameters": PARTIAL}),
    "gpt_oss": (
        "gpt_oss",
        MIXTRAL | {"sliding_window": 20, "rope_parameters": YARN | {"truncate": False}},
    ),
    "deepseek_v2": (
        "deepseek_v2",
        LATENTS | GROUPS | {
            "norm_topk_prob": False, "topk_method": "group_limited_greedy",
            "rope_parameters": LATENT_YARN,
        },
    ),
    "deepseek_v2 lite": (
        "deepseek_v2",
        LATENTS | {
            "q_lora_rank": None, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
            "norm_topk_prob": False,
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        LATENTS | GROUPS | {"norm_topk_prob": True, "rope_parameters": LATENT_YARN},
    ),
    "deepseek_v3 old": (
        "deepseek_v3",
        LATENTS | {"n_group": 1, "topk_group": 1, "norm_topk_prob": True},
    ),
    "qwen3_next": (
        "qwen3_next",
        STATES | MOE | {"norm_topk_prob": True, "shared_expert_intermediate_size": 48},
    ),
    "ministral3": ("ministral3", {"rope_parameters": MINISTRAL}),
    "lfm2": ("lfm2", CONVOLUTIONS | {"block_auto_adjust_ff_dim": False}),
    "lfm2_moe": ("lfm2_moe", CONVOLUTIONS | MOE | {"num_dense_layers": 1, "norm_topk_prob": True}),
    "kimi_linear": ("kimi_linear", KIMI),
    "granitemoehybrid": ("granitemoehybrid", GRANITE),
    "granitemoehybrid dense": (
        "granitemoehybrid", GRANITE | {"num_local_experts": 0, "intermediate_size": 48},
    ),
    "gemma": ("gemma", {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"}),
    "smollm3": ("smollm3", WHOLE | {"num_hidden_layers": 4, "use_sliding_window": False}),
    "granite": ("granite", WHOLE | MULTIPLIERS),
    "granitemoe": ("granitemoe", WHOLE | MIXTRAL | MULTIPLIERS),
    "olmo2": ("olmo2", WHOLE),
    "olmo3": (
        "olmo3",
        WHOLE | {"sliding_window": 20, "num_hidden_layers": 4, "rope_parameters": OLMO3_ROPE},
    ),
    "cohere2": (
        "cohere2",
        WHOLE | {
            "num_hidden_layers": 4, "sliding_window": 20, "logit_scale": 0.25,
            "layer_norm_eps": 1e-5,
        },
    ),
    "seed_oss": ("seed_oss", {"attention_bias": True, "attention_out_bias": False}),
    "ernie4_5": ("ernie4_5", WHOLE | {"use_bias": False}),
    "dots1": (
        "dots1",
        {
            "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "n_shared_experts": 1, "first_k_dense_replace": 1, "norm_topk_prob": True,
            "routed_scaling_factor": 1.5, "n_group": 1, "topk_group": 1,
            "num_key_value_heads": 4,
        },
    ),
    "arcee": ("arcee", WHOLE),
    "exaone4": ("exaone4", WHOLE | {"layer_types": ["full_attention"] * 3, "sliding_window": None}),
    "exaone_moe": (
        "exaone_moe",
        MOE | GROUPS | {
            "num_hidden_layers": 4, "num_experts": 8, "sliding_window": 20,
            "mlp_layer_types": ["dense", *["sparse"] * 3], "num_shared_experts": 2,
            "layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention"],
            "norm_topk_prob": True, "routed_scaling_factor": 1.7,
        },
    ),
    "hunyuan dense": ("hunyuan_v1_dense", {}),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        LATENTS | {"norm_topk_prob": True, "n_group": 1, "topk_group": 1},
    ),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        WHOLE | {
            "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 32, "use_bias": False,
            "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": 2,
        },
    ),
    "cohere": ("cohere", WHOLE | {"logit_scale": 0.25, "layer_norm_eps": 1e-5}),
    "olmo": ("olmo", WHOLE | {"clip_qkv": 2.0}),
    "stablelm": (
        "stablelm",
        WHOLE | {
            "rope_parameters": PARTIAL, "layer_norm_eps": 1e-5, "use_qkv_bias": True,
        },
    ),
    "nemotron": (
        "nemotron",
        WHOLE | {"rope_parameters": PARTIAL, "norm_eps": 1e-5, "mlp_bias": False},
    ),
    "qwen3_5": ("qwen3_5_text", STATES | {"tie_word_embeddings": True}),
    "apertus": ("apertus", WHOLE | {"rope_parameters": LLAMA3}),
    "afmoe": (
        "afmoe",
        MOE | {
            "num_hidden_layers": 4, "num_dense_layers": 1, "num_shared_experts": 2,
            "route_scale": 1.7, "mup_enabled": True, "sliding_window": 20,
        },
    ),
    "phimoe": ("phimoe", WHOLE | MIXTRAL | {"lm_head_bias": True, "attention_bias": True}),
    "hunyuan moe": ("hunyuan_v1_moe", {"num_experts": 6, "moe_topk": 2}),
    "mimo_v2_flash": (
        "mimo_v2_flash",
        {
            "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "v_head_dim": 24, "num_key_value_heads": 1, "attention_value_scale": 0.7,
            "sliding_window": 20, "layer_types": ["full_attention", *["sliding_attention"] * 2],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "rope_parameters": {
                "full_attention": PARTIAL, "sliding_attention": PARTIAL | {"rope_theta": 1e3},
            },
        },
    ),
    "mistral4": (
        "mistral4",
        LATENTS | {
            "norm_topk_prob": True, "n_group": 1, "topk_group": 1,
            "rope_parameters": MINISTRAL | {"original_max_position_embeddings": 16},
        },
    ),
    "glm_moe_dsa": (
        "glm_moe_dsa",
        LATENTS | {
            "norm_topk_prob": True, "index_topk": 20, "index_n_heads": 8, "index_head_dim": 64,
            "indexer_types": ["full", "full", "shared"],
        },
    ),
    "llama4": (
        "llama4_text",
        {
            "num_hidden_layers": 4, "num_local_experts": 4, "num_experts_per_tok": 1,
            "intermediate_size": 48, "intermediate_size_mlp": 96, "interleave_moe_layer_step": 2,
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        NEMOTRON_H | {"layers_block_type": ["linear_attention", "full_attention", "mlp"]},
    ),
    "nemotron_h moe": (
        "nemotron_h",
        NEMOTRON_H | NEMOTRON_EXPERTS | {
            "layers_block_type": ["linear_attention", "full_attention", "moe"],
        },
    ),
    "gemma4": ("gemma4_text", GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4 experts": (
        "gemma4_text",
        GEMMA4 | {
            "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "gemma4 edge": (
        "gemma4_text",
        GEMMA4 | {
            "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 131,
            "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
        },
    ),
    "qwen3_5_moe": ("qwen3_5_moe_text", STATES | MOE | {"shared_expert_intermediate_size": 48}),
}  # fmt: skip
CENTRED = (
    "gemma",
    "nemotron",
    "gemma2",
    "gemma3",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "kimi_linear",
)
CENTRED += ("granitemoehybrid", "granitemoehybrid dense", "nemotron_h", "nemotron_h moe")
"""Norms hold 1 + weight, which rounds; and a decay's rate goes through its exponential."""
WHOLE_KV = ("deepseek_v2 lite", "deepseek_v3 old")
"""Written as llama.cpp did before it kept MLA's keys and values in tensors of their own."""


def make_model(config):
    """Return transformers' model; some classes are registered for what their composite does."""
    kind = getattr(transformers, find_family(config.model_type).architecture)
    return kind._from_config(config, dtype=torch.float32).eval()


QUICK = [
    "llama 3.1", "phi3", "glm4", "qwen2_moe", "gpt_oss", "deepseek_v3", "qwen3_next", "lfm2",
    "kimi_linear", "granitemoehybrid", "nemotron_h moe", "gemma4 experts", "llama4",
    "glm_moe_dsa", "stablelm",
]  # fmt: skip
"""Families whose tensors are renamed, split, joined or reordered each in a way of their own."""


@pytest.fixture(scope="module", params=rest_slow(QUICK, MODELS))
def pair(request, tmp_path_factory):
    """A folder as transformers saves it, and a GGUF file of the same model."""
    model_type, changes = MODELS[request.param]
    values = copy.deepcopy(COMMON | changes)  # Some classes write into what they are given.
    if model_type in ("kimi_linear", "nemotron_h"):
        values.pop("rope_parameters")  # They have no positions.
    if model_type in ("cohere", "cohere2", "olmo", "stablelm", "nemotron", "nemotron_h"):
        values.pop("rms_norm_eps")  # Their norms are no RMS norms, or name it otherwise.
    if model_type == "mistral4":
        values.pop("head_dim")  # It is a sum.
    config = CONFIG_MAPPING[model_type](**values)
    generator = torch.Generator().manual_seed(0)
    model = make_model(config)
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point() and "inv_freq" not in dict(model.named_buffers()):
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.data = 1 + 0.1 * noise if tensor.dim() < 2 else noise * tensor.shape[-1] ** -0.5
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data = 0.1 * torch.randn(buffer.shape, generator=generator)
    root = tmp_path_factory.mktemp("gguf")
    model.save_pretrained(root / "folder")
    write_model(model, root / "model.gguf", has_whole_kv=request.param in WHOLE_KV)
    return request.param, root / "folder", root / "model.gguf"


def test_the_configuration_is_that_of_the_folder(pair):
    """Each field that changes values is read from metadata, or follows from the architecture."""
    name, folder, file = pair
    if name == "glm4_moe_lite":
        pytest.skip("llama.cpp calls it deepseek2, and so do we")
    ours, theirs = (list_config_values(open_checkpoint(path).config) for path in (file, folder))
    # Which some classes write where others leave it out.
    whole = '"partial_rotary_factor": 1.0, '
    for values in (ours, theirs):
        values["rope_parameters"] = values.get("rope_parameters", "").replace(whole, "")
    differences = {k: (ours.get(k), v) for k, v in theirs.items() if ours.get(k) != v}
    assert not differences, name


def test_logits_are_those_of_the_folder(pair, open_session):
    """Every weight is where it belongs, rows in transformers' order."""
    name, folder, file = pair
    tokens = torch.randint(0, 131, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    ours, theirs = (
        open_session(load_checkpoint(path, dtype="float32")).run(tokens) for path in (file, folder)
    )
    if name in CENTRED:
        assert torch.allclose(ours, theirs, atol=1e-4)
    else:
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("kind", "is_kept"),
    rest_slow([("Q8_0", True), ("Q6_K", False)], [("Q8_0", True), ("Q4_0", True), ("Q6_K", False)]),
)
def test_codes_of_a_state_are_taken_over(kind, is_kept, tmp_path, open_session):
    """Value heads change places in rows, and in whole blocks of inputs; else values are read."""
    changes = {"linear_value_head_dim": 64, "linear_num_value_heads": 8, "hidden_size": 256}
    config = CONFIG_MAPPING["qwen3_5_text"](**COMMON | STATES | changes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=parameter.shape[-1] ** -0.5)

    write_model(model, tmp_path / "model.gguf", kind, quantize=make_codes)
    packed = load_checkpoint(tmp_path / "model.gguf", dtype="float32")
    reasons = {m.role: m.reason for m in packed.plan.layers[0].matrices}
    assert "as the checkpoint stores it" in reasons["qkv"]
    assert ("as the checkpoint stores it" in reasons["attention_out"]) == is_kept
    plain = load_checkpoint(
        tmp_path / "model.gguf", dtype="float32", linear_format="f32", expert_format="f32"
    )
    tokens = list(range(5, 45))
    got, want = (open_session(model).run(tokens) for model in (packed, plain))
    assert float((got - want).norm() / want.norm()) < 0.05


def test_copies_of_the_compressed_keys_and_values_are_not_needed(tmp_path, open_session):
    """As ik_llama.cpp writes MLA: the whole matrix, and its parts once more in other shapes."""
    config = CONFIG_MAPPING["deepseek_v2"](**COMMON | MODELS["deepseek_v2 lite"][1])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()

    def add_copies(writer):
        for layer in range(config.num_hidden_layers):
            for part in ("k", "v"):
                zeros = np.zeros((32, 128), np.float32)
                writer.add_tensor(f"blk.{layer}.attn_{part}_b.weight", zeros)

    write_model(model, tmp_path / "a.gguf", has_whole_kv=True)
    write_model(model, tmp_path / "b.gguf", has_whole_kv=True, metadata=add_copies)
    plain, copied = (load_checkpoint(tmp_path / f, dtype="float32") for f in ("a.gguf", "b.gguf"))
    assert "blk.1.attn_k_b.weight" in copied.ignored_weights
    tokens = list(range(5, 30))
    assert torch.equal(open_session(plain).run(tokens), open_session(copied).run(tokens))


def test_keys_of_layers_that_share_them_are_not_needed(tmp_path, open_session):
    """As published files of Gemma 4 E2B have them: such layers have keys and values of their own,
    which nothing reads."""
    config = CONFIG_MAPPING["gemma4_text"](**copy.deepcopy(COMMON | MODELS["gemma4 edge"][1]))
    model = make_model(config)

    def add_unused(writer):
        for part, rows in (("k", 64), ("v", 64)):
            writer.add_tensor(f"blk.3.attn_{part}.weight", np.zeros((rows, 64), np.float32))

    write_model(model, tmp_path / "a.gguf")
    write_model(model, tmp_path / "b.gguf", metadata=add_unused)
    plain, whole = (load_checkpoint(tmp_path / f, dtype="float32") for f in ("a.gguf", "b.gguf"))
    assert set(whole.ignored_weights) - set(plain.ignored_weights) == {
        "blk.3.attn_k.weight", "blk.3.attn_v.weight",
    }  # fmt: skip
    tokens = list(range(5, 30))
    assert torch.equal(open_session(plain).run(tokens), open_session(whole).run(tokens))
