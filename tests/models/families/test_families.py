"""Goal: a configuration is described exactly, or refused by name with the reason and the field."""

import json
import re
import tracemalloc
from pathlib import Path

import pytest
import torch
from loading import load_checkpoint
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma4Config, Gemma4ForConditionalGeneration

from tandem.core.errors import ConfigError, CorruptionError, NotFoundError, UnsupportedError
from tandem.core.spec import GqaLayout
from tandem.models.families import FAMILIES
from tandem.models.planning.planner import describe_model


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("qwen3", {"attention_bias": True}),
        ("qwen3_moe", {"mlp_only_layers": [1]}),
        ("qwen3_moe", {"decoder_sparse_step": 2, "num_hidden_layers": 5}),
        ("gpt_oss", {}),
        ("gpt_oss", {"attention_bias": False}),
    ],
)
def test_spec_of_a_checkpoint(model_type, changes, make_config, tmp_path):
    config = make_config(model_type, **changes)
    config.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(tmp_path)
    spec = describe_model(tmp_path)
    assert spec.num_parameters == sum(p.numel() for p in model.parameters())
    idle = 0
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            experts = sum(p.numel() for p in layer.mlp.experts.parameters())
            idle += experts * (config.num_experts - config.num_experts_per_tok)
    if spec.is_moe:
        idle //= config.num_experts
    assert spec.num_active_parameters == spec.num_parameters - idle
    assert spec.num_moe_layers == sum(hasattr(x.mlp, "experts") for x in model.model.layers)
    assert spec.architecture == type(model).__name__
    assert (spec.num_layers, spec.num_kv_heads, spec.head_dim) == (
        config.num_hidden_layers,
        config.num_key_value_heads,
        config.head_dim,
    )
    assert spec.eos_token_ids == (2,)


def test_generation_config_and_tokenizer_add_end_ids(checkpoint):
    folder = checkpoint("llama")
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert describe_model(folder).eos_token_ids == (2, 7)
    listed = {"9": {"content": "<|end|>"}}
    settings = {"eos_token": {"content": "<|end|>"}, "added_tokens_decoder": listed}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert describe_model(folder).eos_token_ids == (2, 7, 9)


def test_dtype_is_chosen_by_size_and_says_why(checkpoint, edit_config):
    folder = checkpoint("llama")
    edit_config(folder, dtype="bfloat16")
    small = describe_model(folder)
    assert (small.dtype, small.checkpoint_dtype) == ("float32", "bfloat16")
    assert "at most 256" in small.dtype_reason
    edit_config(folder, vocab_size=2_000_000)
    large = describe_model(folder)
    assert large.dtype == "bfloat16"
    assert "stored in bfloat16" in large.dtype_reason
    assert large.weight_bytes == large.num_parameters * 2
    edit_config(folder, dtype="float16")
    half = describe_model(folder)
    assert half.dtype == "float32"
    assert "holds each float16" in half.dtype_reason
    edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32})
    (folder / "model.safetensors").unlink()  # Which has values, whatever the configuration says.
    assert describe_model(folder).dtype == "bfloat16"


def test_kv_layout_follows_the_model(checkpoint):
    model = load_checkpoint(checkpoint("llama"), dtype="bfloat16")
    layout = model.kv_layout(16)
    assert layout == GqaLayout(
        num_layers=3, num_kv_heads=2, head_dim=16, block_size=16, dtype="bfloat16"
    )
    assert model.kv_layout(16, "float32").bytes_per_token == 2 * layout.bytes_per_token
    assert model.allocate_kv(4, block_size=16).tensor.shape == (4, 3, 2, 2, 16, 16)
    with pytest.raises(ConfigError, match="int3"):
        model.kv_layout(16, "int3")


REFUSED = {
    "another family": (
        {"model_type": "gpt2", "architectures": None},
        "gpt2",
        "model_type",
    ),
    "a newer family": ({"model_type": "qwen9"}, "qwen9", "model_type"),
    "a classifier": (
        {"architectures": ["LlamaForTokenClassification"]},
        "LlamaForTokenClassification",
        "architectures",
    ),
    "encoder-decoder": ({"is_encoder_decoder": True}, "encoder-decoder", "is_encoder_decoder"),
    "quantized": (
        {"quantization_config": {"quant_method": "spqr"}},
        "spqr",
        "quantization_config.quant_method",
    ),
    "a RoPE of two axes": (
        {"rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0}},
        "axial",
        "rope_parameters.rope_type",
    ),
    "float8 weights": ({"dtype": "float8_e4m3fn"}, "float8", "dtype"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_nothing_here_runs_is_refused(name, checkpoint, edit_config):
    changes, text, field = REFUSED[name]
    folder = checkpoint("llama")
    edit_config(folder, **changes)
    for act in (describe_model, load_checkpoint):
        with pytest.raises(UnsupportedError, match=text) as caught:
            act(folder)
        assert caught.value.field == field


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe"])
def test_sliding_windows_are_described(model_type, checkpoint, edit_config):
    folder = checkpoint(model_type)
    assert describe_model(folder).sliding_window == 0
    windows = {"use_sliding_window": True, "max_window_layers": 1, "layer_types": None}
    edit_config(folder, sliding_window=32, **windows)
    assert describe_model(folder).sliding_window == 32
    for wrong in (0, -3, 1 << 40):
        edit_config(folder, sliding_window=wrong, **windows)
        with pytest.raises(ConfigError, match="sliding_window"):
            describe_model(folder)


def test_layer_types_are_checked(checkpoint, edit_config):
    folder = checkpoint("gpt_oss")
    spec = describe_model(folder)
    assert (spec.sliding_window, spec.has_sinks, spec.num_moe_layers) == (20, True, 3)
    edit_config(folder, layer_types=["full_attention"] * 3)
    assert describe_model(folder).sliding_window == 0
    edit_config(folder, layer_types=["full_attention", "sliding_attention", "chunked_attention"])
    with pytest.raises(ConfigError, match="attention_chunk_size is None: need a number"):
        describe_model(folder)


WRONG = {
    "no model_type": {"model_type": None},
    "no layers": {"num_hidden_layers": 0},
    "absurd layers": {"num_hidden_layers": 10**9},
    "text for a number": {"hidden_size": "large"},
    "heads": {"num_key_value_heads": 3},
    "odd head": {"head_dim": 15},
    "rope without factor": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}},
    "theta that is null": {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
    "types that are no list": {"layer_types": 1},
    "dtype that is no number": {"dtype": float("nan")},
    "code that is a flag": {"auto_map": True},
    "padding beyond the vocabulary": {"pad_token_id": 2**31},
    "text that is a list": {"text_config": []},
    "negative theta": {"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}},
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values_are_config_errors(name, checkpoint, edit_config):
    folder = checkpoint("llama")
    edit_config(folder, **WRONG[name])
    with pytest.raises(ConfigError):
        load_checkpoint(folder)


def test_what_only_the_modules_notice_is_a_config_error(checkpoint, edit_config):
    folder = checkpoint("qwen3_moe")
    edit_config(folder, decoder_sparse_step=0)
    with pytest.raises(ConfigError, match=r"config\.json"):
        describe_model(folder)


@pytest.mark.parametrize("model_type", ["qwen3", "gpt_oss"])
def test_absurd_layers_are_refused_before_anything_lists_them(model_type, checkpoint, edit_config):
    """transformers' configuration has a list of the types of all layers."""
    folder = checkpoint(model_type)
    describe_model(folder)
    edit_config(folder, num_hidden_layers=10**6, layer_types=None)
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match="num_hidden_layers") as caught:
            describe_model(folder)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
    assert caught.value.field == "num_hidden_layers"


def test_more_experts_per_token_than_there_are(checkpoint, edit_config):
    folder = checkpoint("qwen3_moe")
    edit_config(folder, num_experts_per_tok=7)
    with pytest.raises(ConfigError, match="7 of 6"):
        describe_model(folder)


def test_files_that_are_not_there_or_not_json(tmp_path):
    with pytest.raises(NotFoundError, match=r"config\.json"):
        describe_model(tmp_path)
    with pytest.raises(NotFoundError, match="no folder"):
        describe_model(tmp_path / "nothing")
    for text in ("{", "[]", "[" * 100_000, "\xff"):
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
        with pytest.raises(CorruptionError, match=r"config\.json"):
            describe_model(tmp_path)


def test_unknown_dtype_setting(checkpoint):
    with pytest.raises(ConfigError, match="int4"):
        load_checkpoint(checkpoint("llama"), dtype="int4")


@pytest.mark.parametrize(
    ("raw", "nearest"),
    [
        ({"model_type": "qwen31"}, "qwen3 (Qwen3ForCausalLM)"),
        ({"model_type": "qwen31_moe", "num_experts": 60}, "qwen3_moe (Qwen3MoeForCausalLM)"),
        ({"model_type": "mistral9"}, "mistral (MistralForCausalLM)"),
        ({"model_type": "gpt_neox"}, "llama (LlamaForCausalLM)"),
        ({"model_type": "jetmoe", "num_local_experts": 8}, "qwen3_moe (Qwen3MoeForCausalLM)"),
        ({"model_type": "kimi", "text_config": {"n_routed_experts": 384}}, "kimi_k2"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "llama"),
        ({"model_type": ""}, "llama"),
    ],
)
def test_a_refusal_names_the_nearest_family_and_the_page_of_all(raw, nearest, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UnsupportedError) as caught:
        describe_model(tmp_path)
    text = str(caught.value)
    assert f"nearest supported family is {nearest}" in text
    page = re.search(r"docs/reference/\S+\.md", text).group()
    content = (Path(__file__).parents[3] / page).read_text(encoding="utf-8")
    assert all(
        f"| `{name}` | `{family.architecture}` |" in content for name, family in FAMILIES.items()
    )


def test_a_gemma_4_that_sees_images_runs_as_its_decoder(tmp_path, open_session):
    """Towers are left unread, and so are keys and values of layers that share others'."""
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
    text = {
        "vocab_size": 131,
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 24,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 131,
        "sliding_window": 9,
        "model_type": "gemma4_text",
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    config = Gemma4Config(
        text_config=text,
        vision_config={**vision, "num_attention_heads": 2, "num_key_value_heads": 2},
        audio_config=None,
    )
    torch.manual_seed(0)
    theirs = Gemma4ForConditionalGeneration(config).eval()
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    unused = "model.language_model.layers.3.self_attn.k_proj.weight"
    save_file({**load_file(file), unused: torch.ones(48, 48)}, file, {"format": "pt"})
    model = load_checkpoint(tmp_path, dtype="float32")
    assert (model.spec.model_type, model.spec.num_kv_layers) == ("gemma4_text", 2)
    assert "shares the keys and values" in model.ignored_weights[unused]
    assert any(name.startswith("model.vision_tower.") for name in model.ignored_weights)
    tokens = list(range(20, 60))
    with torch.inference_mode():
        want = theirs(torch.tensor([tokens]), use_cache=False).logits[0]
    session = open_session(model)
    got = torch.cat([session.run(tokens[:30]), session.run(tokens[30:])])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
