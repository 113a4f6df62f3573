"""Goal: a quantized checkpoint computes what its codes stand for, and its plan says how.

Method: tiny models whose weights are coded by ``quantized``. Decoded to float32, logits must be
those of transformers' eager model with the decoded weights, to rounding. With codes taken over as
they are, weights must be the same to the fp16 rounding of scales, and logits within what int8 or
bf16 activations change.
"""

import json
import shutil
from itertools import product

import numpy as np
import pytest
import torch
from loading import load_checkpoint
from quantized import CODERS, is_linear, write_plain, write_quantized
from transformers import AutoModelForCausalLM

from quick import rest_slow
from tandem.core.errors import ShapeError
from tandem.kernels import tolerance
from tandem.kernels.weights.formats import dequantize
from tandem.models.families import open_checkpoint
from tandem.models.planning.planner import describe_model, plan_model
from tandem.models.planning.quantization import read_quantization
from tandem.models.sources.containers import open_source

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "head_dim": 64,
    "num_key_value_heads": 2,
}
MOE = {"moe_intermediate_size": 128, "num_experts": 3, "num_experts_per_tok": 3}
"""All experts chosen, so that no near tie of the router hides an error."""
IDS = list(range(3, 40))

LARGEST_ERROR = 0.04
"""Of logits, relative: what int8 activations in groups of up to 128 change in two layers; measured
0.020 to 0.025. Weights are compared one by one elsewhere."""

HELD = {
    "fp8 blocks": "fp8",
    "fp8 small blocks": None,
    "fp8 tensor": "fp8",
    "ct int4 g32 sym": "int4g32sym",
    "ct int4 g32 asym": "int4g32zp",
    "ct int4 g64 sym": "int4g64sym",
    "ct int4 g64 asym": "int4g64zp",
    "ct int4 g128 sym": "int4g128sym",
    "ct int4 g128 asym": "int4g128zp",
    "ct int8 g32": "int8g32",
    "ct int4 channel": "int4g128sym",
    "ct w8a8": "int8row",
    "ct w8a8 asym": "int8g128min",
    "ct fp8 channel": "fp8row",
    "ct fp8 tensor": "fp8",
    "ct fp8 block": "fp8",
    "ct nvfp4": "nvfp4",
    "ct mxfp4": "mxfp4",
    "modelopt nvfp4": "nvfp4",
    "modelopt fp8": "fp8",
    "gptq 4 g128": "int4g128sym",
    "gptq 4 g32 asym": "int4g32zp",
    "gptq 4 g64 v2": "int4g64sym",
    "gptq 4 rows": "int4g128sym",
    "gptq 4 g32 act-order": None,
    "gptq 8 g128": "int8g128",
    "gptq 8 g32 asym": "int8g32min",
    "gptq 8 rows": "int8row",
    "awq g128": "int4g128zp",
    "awq g32": "int4g32zp",
}
"""The format that takes the codes as they are."""


@pytest.fixture
def coded(checkpoint, tmp_path):
    """Return ``make(family, kind)``: a coded folder, and one with the values that it stands for."""

    def make(family, kind, is_coded=is_linear, **changes):
        sizes = SIZES | (MOE if family == "qwen3_moe" else {}) | changes
        folder = checkpoint(family, **sizes)
        plain = tmp_path / f"{folder.name}-plain"
        shutil.copytree(folder, plain)
        write_plain(plain, write_quantized(folder, kind, is_coded))
        return folder, plain

    return make


def eager(folder):
    """Logits and last hidden states of transformers' model."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).double()
    with torch.no_grad():
        hidden = model.model(torch.tensor([IDS])).last_hidden_state[0]
        logits = model.lm_head(hidden)
    weight = model.lm_head.weight.detach().numpy()
    return logits, tolerance.logits(hidden.numpy(), weight, 2, torch.float32)


def relative(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


def test_every_kind_has_its_format_here():
    assert HELD.keys() == CODERS.keys()


STATES = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 128,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "num_experts": 3,
    "num_experts_per_tok": 3,
}
"""Heads are whole blocks, as published ones are, though rows of heads change places."""


KIMI_STATES = {
    "num_key_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "mlp_layer_types": ["sparse", "sparse"],
    "linear_num_heads": 2,
    "linear_head_dim": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "moe_intermediate_size": 128,
    "num_local_experts": 3,
    "num_experts_per_tok": 3,
}
CODED_PARTS = {
    "qwen3_next": (STATES, ("in_proj_qkvz.weight",)),
    "kimi_linear": (KIMI_STATES, (".w1.weight", ".w2.weight", ".w3.weight")),
}
"""Sizes, and the names of coded weights beside the usual ones."""


@pytest.mark.parametrize(
    ("kind", "family"),
    rest_slow(
        [("fp8 blocks", "qwen3_next")],
        product(["fp8 blocks", "ct int4 g32 sym"], CODED_PARTS),
    ),
)
def test_projections_of_a_state_keep_their_codes(kind, family, coded, open_session):
    """Rows of codes are put in the order of the rule, with their scales."""
    sizes, names = CODED_PARTS[family]
    folder, plain = coded(family, kind, lambda n: is_linear(n) or n.endswith(names), **sizes)
    exact, _ = eager(plain)
    packed = load_checkpoint(folder, dtype="float32")
    first, second = ({m.role: m.weight_format for m in x.matrices} for x in packed.plan.layers)
    for role in ("qkv", "attention_out", "experts"):
        assert first[role] == HELD[kind]
        # Latent attention takes its matrices apart, and so has values.
        assert second[role] == HELD[kind] or (family == "kimi_linear" and role != "experts")
    assert first["gates"] == "f32"
    logits = open_session(packed).run(IDS)
    assert relative(logits, exact) < LARGEST_ERROR
    values = load_checkpoint(folder, dtype="float32", linear_format="f32", expert_format="f32")
    assert relative(open_session(values).run(IDS), exact) < 1e-4


QUICK = ["fp8 blocks", "ct int4 g32 asym", "ct w8a8", "ct nvfp4", "gptq 4 g32 act-order"]
QUICK += ["awq g32"]
"""Each layout of codes, of scales and of zero points; all kinds are decoded below."""


@pytest.mark.parametrize("kind", rest_slow(QUICK, CODERS))
def test_logits_are_those_of_the_decoded_weights(kind, coded, open_session):
    is_moe = any(word in kind for word in ("g32", "fp8", "fp4", "rows"))
    family = "qwen3_moe" if is_moe else "llama"
    folder, plain = coded(family, kind)
    exact, bound = eager(plain)
    decoded = load_checkpoint(folder, dtype="float32", expert_format="none", linear_format="none")
    logits = open_session(decoded).run(IDS)
    assert np.max(np.abs(logits.double().numpy() - exact.numpy()) / bound) <= 1
    packed = load_checkpoint(folder, dtype="float32")
    held = HELD[kind]
    formats = {m.weight_format for m in packed.plan.matrices if m.role in ("qkv", "gate_up")}
    assert formats <= {held or "f32"}
    assert relative(open_session(packed).run(IDS), exact) < LARGEST_ERROR


@pytest.mark.parametrize("kind", [kind for kind in CODERS if HELD[kind]])
def test_packed_codes_are_the_values(kind, coded):
    """To the fp16 rounding of scales and minima, whose terms are up to twice the weights' range."""
    folder, _ = coded("llama", kind, num_hidden_layers=1)
    quantization = open_checkpoint(folder).quantization
    names = [f"model.layers.0.{n}_proj.weight" for n in ("self_attn.k", "mlp.down", "mlp.gate")]
    with open_source(folder, quantization=quantization) as source:
        for name in names:
            packed = source.read_packed(name)
            assert packed.weight_format == source.find_format(name)
            assert packed.weight_format.name == HELD[kind]
            values = torch.empty(packed.codes.shape)
            source.read_into(name, values)
            off = np.abs(dequantize(packed) - values.double().numpy()).max()
            is_exact = HELD[kind] in ("nvfp4", "mxfp4")
            rounding = 2.0**-23 if HELD[kind] in ("fp8", "fp8row") else 2.0**-10
            rounding = 0.0 if is_exact else rounding
            assert off <= rounding * values.abs().max().item()


def test_plan_says_what_is_kept_what_is_decoded_and_what_is_ignored(coded):
    folder, _ = coded("llama", "fp8 tensor")
    plan = plan_model(folder, dtype="bfloat16")
    matrices = {m.module.partition("layers.0.")[2] or m.module: m for m in plan.matrices}
    assert matrices["self_attn"].weight_format == "fp8"
    assert (
        matrices["self_attn"].reason == "as the checkpoint stores it: fp8 with one scale a tensor"
    )
    assert matrices["lm_head"].weight_format == "bf16"
    assert matrices["mlp"].stored_bytes == 128 * 256 + 8
    assert any("activations in fp8 (static): ignored" in note for note in plan.notes)
    other = plan_model(folder, dtype="bfloat16", linear_format="int8")
    reasons = {m.reason for m in other.matrices if m.role == "qkv"}
    assert reasons == {"as asked for; decoded from fp8 with one scale a tensor"}
    folder, _ = coded("llama", "ct fp8 channel")
    plan = plan_model(folder, dtype="bfloat16")
    (reason,) = {m.reason for m in plan.matrices if m.role == "qkv"}
    assert reason == "as the checkpoint stores it: fp8 with a scale for each output"
    assert {m.weight_format for m in plan.matrices if m.role == "qkv"} == {"fp8row"}


def test_unused_scales_are_listed_with_the_reason(coded, edit_weights):
    folder, _ = coded("llama", "fp8 tensor")
    scale = "model.layers.0.self_attn.k_proj.k_scale"
    edit_weights(folder, lambda tensors: tensors.update({scale: torch.ones(1)}))
    ignored = load_checkpoint(folder).ignored_weights
    assert "KV cache" in ignored[scale]
    assert "activations" in ignored["model.layers.1.mlp.up_proj.input_scale"]


LATENT = {
    "kv_lora_rank": 128,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "num_key_value_heads": 4,
    "n_routed_experts": 3,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 128,
    "head_dim": 32,
}


@pytest.mark.parametrize(
    "kind", rest_slow(["awq g32"], ["fp8 blocks", "gptq 4 g32 asym", "awq g32"])
)
def test_latent_attention_reads_values_and_experts_codes(kind, coded, open_session):
    """DeepSeek's own layout: experts, shared ones and dense layers take the codes as they are."""
    folder, plain = coded("deepseek_v3", kind, **LATENT)
    exact, bound = eager(plain)
    decoded = load_checkpoint(folder, dtype="float32", expert_format="none", linear_format="none")
    logits = open_session(decoded).run(IDS)
    assert np.max(np.abs(logits.double().numpy() - exact.numpy()) / bound) <= 1
    packed = load_checkpoint(folder, dtype="float32")
    formats = {m.role: m.weight_format for m in packed.plan.matrices}
    assert {formats["experts"], formats["gate_up"]} == {HELD[kind]}
    (reason,) = {m.reason for m in packed.plan.matrices if m.role == "q_up"}
    assert "as latent attention orders rows" in reason
    assert relative(open_session(packed).run(IDS), exact) < LARGEST_ERROR


def test_blocks_that_do_not_stack_are_decoded(coded, open_session):
    """Keys of 64 outputs end within a block of 128: the product that stacks them has no codes."""
    changes = {"head_dim": 32, "num_key_value_heads": 2}
    folder, plain = coded("llama", "fp8 blocks", **changes)
    plan = plan_model(folder, dtype="float32")
    formats = {m.role: m.weight_format for m in plan.matrices}
    assert (formats["qkv"], formats["gate_up"]) == ("f32", "fp8")
    (reason,) = {m.reason for m in plan.matrices if m.role == "qkv"}
    assert "do not end where the stacked parts do" in reason
    exact, _ = eager(plain)
    assert (
        relative(open_session(load_checkpoint(folder, dtype="float32")).run(IDS), exact)
        < LARGEST_ERROR
    )


def test_modules_that_are_not_coded_keep_their_values(coded, edit_config, open_session):
    """One plain projection leaves its operator without codes, so that nothing is coded anew."""
    config = CODERS["ct int4 g32 sym"][1]
    skipped = "model.layers.1.mlp.down_proj"
    folder, plain = coded(
        "llama", "ct int4 g32 sym", lambda name: is_linear(name) and skipped not in name
    )
    edit_config(folder, quantization_config=config | {"ignore": ["lm_head", f"re:.*{skipped}$"]})
    plan = plan_model(folder, dtype="float32")
    formats = {m.module: m.weight_format for m in plan.matrices if m.role == "down"}
    assert formats == {"model.layers.0.mlp": "int4g32sym", "model.layers.1.mlp": "f32"}
    exact, _ = eager(plain)
    assert (
        relative(open_session(load_checkpoint(folder, dtype="float32")).run(IDS), exact)
        < LARGEST_ERROR
    )


@pytest.mark.parametrize(
    ("kind", "is_tied"), [("ct int4 g32 sym", True), ("ct fp8 channel", False)], ids=str
)
def test_an_embedding_in_codes_is_read_row_by_row(kind, is_tied, coded, open_session):
    """Bitwise its decoded rows; a head that shares it has no matrix of its own."""

    def is_coded(name):
        return is_linear(name) or "embed_tokens" in name

    folder, plain = coded("llama", kind, is_coded, tie_word_embeddings=is_tied)
    exact, _ = eager(plain)
    model = load_checkpoint(folder, dtype="float32")
    found = {m.role: m for m in model.plan.matrices}
    assert found["embedding"].weight_format == HELD[kind]
    assert found["head"].weight_format == (HELD[kind] if is_tied else "f32")
    assert (found["embedding"].size_bytes == 0) == is_tied
    assert model.weight_bytes == model.plan.weight_bytes
    decoded = load_checkpoint(folder, dtype="float32", linear_format="none")
    ids = torch.tensor(IDS)
    rows = [m.skeleton.model.embed_tokens(ids) for m in (model, decoded)]
    # Scales of integers are rounded to fp16.
    assert torch.allclose(rows[0], rows[1], rtol=2.0**-10 if is_tied else 0, atol=0)
    assert relative(open_session(model).run(IDS), exact) < LARGEST_ERROR


def test_modelopts_own_file_says_how_weights_are_coded(coded, edit_config, open_session):
    """Where ``config.json`` does not, as modelopt's older versions leave it."""
    folder, plain = coded("llama", "modelopt nvfp4")
    edit_config(folder, quantization_config=None)
    said = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    producer = {"name": "modelopt", "version": "0.23.0"}
    content = {"producer": producer, "quantization": said | {"kv_cache_quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(content))
    model = load_checkpoint(folder, dtype="float32")
    assert {m.weight_format for m in model.plan.matrices if m.role == "qkv"} == {"nvfp4"}
    assert any("KV cache" in note for note in model.plan.notes)
    assert relative(open_session(model).run(IDS), eager(plain)[0]) < LARGEST_ERROR


def test_plans_without_weights_follow_the_configuration(coded):
    folder, _ = coded("qwen3_moe", "gptq 4 g128")
    with_weights = plan_model(folder)
    (folder / "model.safetensors").unlink()
    without = plan_model(folder)
    assert [m.weight_format for m in without.matrices] == [
        m.weight_format for m in with_weights.matrices
    ]
    assert describe_model(folder).expert_format == "int4g128sym"


PUBLISHED = {
    "DeepSeek-V3": (
        {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
        {"mlp.experts.3.up_proj": "fp8"},
    ),
    "Qwen3-FP8": (
        {
            "activation_scheme": "dynamic",
            "quant_method": "fp8",
            "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"],
            "weight_block_size": [128, 128],
        },
        {"mlp.gate": None, "mlp.gate_proj": "fp8"},
    ),
    "Kimi-K2-Thinking": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {
                "group_0": {
                    "input_activations": None,
                    "output_activations": None,
                    "targets": ["Linear"],
                    "weights": {
                        "actorder": None,
                        "block_structure": None,
                        "dynamic": False,
                        "group_size": 32,
                        "num_bits": 4,
                        "observer": "minmax",
                        "observer_kwargs": {},
                        "strategy": "group",
                        "symmetric": True,
                        "type": "int",
                    },
                }
            },
            "ignore": [
                "lm_head",
                "re:.*self_attn.*",
                "re:.*shared_experts.*",
                r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
            ],
            "kv_cache_scheme": None,
            "quantization_status": "compressed",
        },
        {
            "mlp.experts.3.up_proj": "int4g32sym",
            "self_attn.o_proj": None,
            "mlp.shared_experts.up_proj": None,
            "mlp.up_proj": None,
        },
    ),
    "NVFP4 of llm-compressor": (
        {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "config_groups": {
                "group_0": {
                    "format": "nvfp4-pack-quantized",
                    "input_activations": {"dynamic": "local", "group_size": 16, "num_bits": 4},
                    "targets": ["Linear"],
                    "weights": {
                        "actorder": None,
                        "dynamic": False,
                        "group_size": 16,
                        "num_bits": 4,
                        "observer": "static_minmax",
                        "scale_dtype": "torch.float8_e4m3fn",
                        "strategy": "tensor_group",
                        "symmetric": True,
                        "type": "float",
                    },
                }
            },
            "ignore": ["lm_head", "re:.*mlp.gate$"],
            "quantization_status": "compressed",
        },
        {"mlp.experts.3.up_proj": "nvfp4", "mlp.gate": None},
    ),
    "NVFP4 of modelopt": (
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "config_groups": {
                "group_0": {
                    "input_activations": {"dynamic": False, "num_bits": 4, "group_size": 16},
                    "weights": {"dynamic": False, "num_bits": 4, "group_size": 16},
                    "targets": ["Linear"],
                }
            },
            "ignore": ["lm_head", "model.layers.0.self_attn*", "*.mlp.gate"],
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
            "producer": {"name": "modelopt", "version": "0.33.0"},
        },
        {"mlp.experts.3.up_proj": "nvfp4", "self_attn.o_proj": None, "mlp.gate": None},
    ),
    "GPTQModel": (
        {
            "bits": 4,
            "checkpoint_format": "gptq",
            "damp_percent": 0.01,
            "desc_act": False,
            "group_size": 128,
            "lm_head": False,
            "meta": {"quantizer": ["gptqmodel:1.1.0"]},
            "model_file_base_name": None,
            "quant_method": "gptq",
            "sym": True,
            "true_sequential": True,
        },
        {"mlp.up_proj": "int4g128sym", "lm_head": None},
    ),
    "AutoAWQ": (
        {
            "bits": 4,
            "group_size": 128,
            "modules_to_not_convert": None,
            "quant_method": "awq",
            "version": "gemm",
            "zero_point": True,
        },
        {"mlp.up_proj": "int4g128zp"},
    ),
}
"""A ``quantization_config`` as it is published, and what it says of some modules of a layer."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_read(name):
    config, wanted = PUBLISHED[name]
    quantization = read_quantization({"quantization_config": config})
    assert quantization is not None
    for module, format_name in wanted.items():
        scheme = quantization.find_scheme(f"model.layers.0.{module}")
        found = None if scheme is None else scheme.find_format(2048)
        assert (None if found is None else found.name) == format_name, module
    assert read_quantization({"compression_config": config}) == quantization
    assert read_quantization({}) is None


def test_the_cache_changes_nothing(coded, open_session, tmp_path):
    """A second start maps what the first one laid out."""
    folder, _ = coded("qwen3_moe", "ct int4 g32 asym")
    expected = open_session(load_checkpoint(folder, dtype="float32")).run(IDS)
    cache = str(tmp_path / "cache")
    for _ in range(2):
        model = load_checkpoint(folder, dtype="float32", packed_cache=cache)
        assert torch.equal(open_session(model).run(IDS), expected)


def stack_experts(tensors):
    """Store the e4m3 experts of each layer as transformers' own fp8 modules keep them."""
    layers = sorted({n.split(".experts.")[0] for n in tensors if ".experts.0." in n})
    for layer in layers:
        for part in ("weight", "weight_scale_inv"):
            suffix = part.removeprefix("weight")
            parts = {
                key: [tensors.pop(f"{layer}.experts.{i}.{key}_proj.{part}") for i in range(3)]
                for key in ("gate", "up", "down")
            }
            both = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
            tensors[f"{layer}.experts.gate_up_proj{suffix}"] = torch.stack(both)
            tensors[f"{layer}.experts.down_proj{suffix}"] = torch.stack(parts["down"])


@pytest.mark.parametrize("expert_format", ["auto", "none", "fp8"])
def test_stacked_experts_in_fp8_are_refused_by_name(expert_format, coded, edit_weights):
    """One tensor for all experts has values only, or mxfp4; its e4m3 is never read as values."""
    folder, _ = coded("qwen3_moe", "fp8 blocks")
    edit_weights(folder, stack_experts)
    with pytest.raises(ShapeError, match=r"experts\.gate_up_proj.*F8_E4M3"):
        load_checkpoint(folder, dtype="float32", expert_format=expert_format)
