"""Goal: `tandem convert --to q4_k_m` makes a GGUF file that is the model, as llama.cpp makes it.

Method: blocks that llama.cpp's own quantizer made must be ours, byte by byte; which tensor gets
which type is compared with what llama.cpp printed for published files. Tiny models are written,
read back by the ``gguf`` package, run here from the folder and from the file alone, and compared
with the model that they were made of.
"""

import base64
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from loading import load_checkpoint
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer

from tandem.core.errors import ConfigError, UnsupportedError
from tandem.models.codecs.gguf_quantizers import QUANTIZED_TYPES, quantize_rows
from tandem.models.export import export_checkpoint
from tandem.models.gguf.mixtures import MIXTURES, ModelSizes, choose_types
from tandem.models.gguf.tokenizer import load_gguf_tokenizer
from tandem.models.gguf_export import export_gguf
from tandem.models.planning.planner import plan_model
from tandem.models.tokenizing.splittings import QWEN2

FIXTURES = json.loads((Path(__file__).parents[1] / "fixtures" / "gguf_blocks.json").read_text())
"""Made by llama.cpp; see the script beside them."""
IDS = list(range(3, 30))


def decode(kind: str, rows: np.ndarray) -> np.ndarray:
    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])


@pytest.mark.parametrize("kind", sorted(FIXTURES.keys() & set(QUANTIZED_TYPES)))
def test_blocks_are_those_of_llama_cpp(kind):
    weights = np.random.default_rng(0).normal(size=FIXTURES["shape"]).astype(np.float32)
    wanted = np.frombuffer(base64.b64decode(FIXTURES[kind]["blocks"]), np.uint8)
    assert np.array_equal(quantize_rows(kind, weights).ravel(), wanted)


LARGEST_ERROR = {"Q2_K": 0.31, "Q3_K": 0.16, "IQ4_XS": 0.08}
"""Of Gaussian weights, as a norm relative to theirs, of types that the fixtures have not."""


@pytest.mark.parametrize("kind", LARGEST_ERROR)
def test_types_without_fixtures_have_their_error(kind):
    weights = np.random.default_rng(1).normal(size=(4, 512)).astype(np.float32)
    error = np.linalg.norm(decode(kind, quantize_rows(kind, weights)) - weights)
    bound = LARGEST_ERROR[kind] * np.linalg.norm(weights)
    assert bound / 1.3 < error < bound


@pytest.mark.parametrize("kind", QUANTIZED_TYPES)
def test_extreme_values_are_coded_or_refused(kind):
    """Zeros, values below fp16, one weight among zeros, constants; then what nothing holds."""
    rows = np.zeros((5, 256), np.float32)
    rows[1] = 1e-38
    rows[2, 100] = -3.0
    rows[3] = 0.75
    rows[4] = np.linspace(-60000, 60000, 256)
    decoded = decode(kind, quantize_rows(kind, rows))
    assert np.isfinite(decoded).all()
    assert (np.abs(decoded[0]) == 0).all()
    assert decoded[2, 100] == pytest.approx(-3.0, rel=0.05)
    assert (np.abs(decoded[3] - 0.75) < 0.1).all()
    for value in (np.nan, np.inf, 3e38):
        rows[0, 7] = value
        with pytest.raises(UnsupportedError, match="not finite, or beyond fp16"):
            quantize_rows(kind, rows)


def test_rows_that_are_no_blocks_and_unknown_types_are_refused():
    with pytest.raises(UnsupportedError, match="no blocks of 256"):
        quantize_rows("Q4_K", np.zeros((2, 128), np.float32))
    with pytest.raises(UnsupportedError, match=r"IQ2_S.*Q4_K"):
        quantize_rows("IQ2_S", np.zeros((2, 256), np.float32))


LLAMA_8B = ModelSizes("llama", 32, 32, 8)
PUBLISHED = {
    "q4_k_m": {"F32": 65, "Q4_K": 193, "Q6_K": 33},
    "q5_k_m": {"F32": 65, "Q5_K": 193, "Q6_K": 33},
    "q4_k_s": {"F32": 65, "Q4_K": 217, "Q5_K": 8, "Q6_K": 1},
    "q3_k_m": {"F32": 65, "Q3_K": 129, "Q4_K": 92, "Q5_K": 4, "Q6_K": 1},
    "q2_k": {"F32": 65, "Q2_K": 129, "Q3_K": 64, "Q4_K": 32, "Q6_K": 1},
    "q6_k": {"F32": 65, "Q6_K": 226},
    "q8_0": {"F32": 65, "Q8_0": 226},
    "q4_0": {"F32": 65, "Q4_0": 225, "Q6_K": 1},
}
"""How many tensors of each type llama.cpp counts in published files of Llama 3 8B."""


def list_llama(layers: int) -> dict[str, tuple[int, ...]]:
    shapes = {
        "token_embd.weight": (512, 256),
        "output.weight": (512, 256),
        "output_norm.weight": (256,),
    }
    for i in range(layers):
        for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
            shapes[f"blk.{i}.{part}.weight"] = (512, 256)
        for part in ("attn_norm", "ffn_norm"):
            shapes[f"blk.{i}.{part}.weight"] = (256,)
    return shapes


@pytest.mark.parametrize("name", PUBLISHED)
def test_types_are_those_of_published_files(name):
    kinds = list(choose_types(MIXTURES[name], LLAMA_8B, list_llama(32)).values())
    assert {kind: kinds.count(kind) for kind in set(kinds)} == PUBLISHED[name]


def test_layers_with_more_bits_are_the_first_the_last_and_every_third():
    kinds = choose_types(MIXTURES["q4_k_m"], LLAMA_8B, list_llama(32))
    wide = [i for i in range(32) if kinds[f"blk.{i}.attn_v.weight"] == "Q6_K"]
    assert wide == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    assert wide == [i for i in range(32) if kinds[f"blk.{i}.ffn_down.weight"] == "Q6_K"]


def test_rows_that_are_no_superblocks_get_the_next_type():
    shapes = {
        "blk.0.ffn_up.weight": (64, 96),
        "blk.0.attn_q.weight": (64, 40),
        "output.weight": (9, 96),
    }
    kinds = choose_types(MIXTURES["q4_k_m"], LLAMA_8B, shapes)
    assert list(kinds.values()) == ["Q5_0", "F16", "Q8_0"]


SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}
EXPERTS = {
    "moe_intermediate_size": 256,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
FAMILIES = {
    "llama": {},
    "qwen3_moe": EXPERTS,
    "qwen3": {"tie_word_embeddings": True},
    "phi3": {
        "original_max_position_embeddings": 512,
        "max_position_embeddings": 2048,
        "pad_token_id": None,
        "head_dim": 64,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0 + 0.01 * i for i in range(32)],
            "long_factor": [1.25 + 0.5 * i for i in range(32)],
        },
    },
    "glm4_moe": {
        "moe_intermediate_size": 256,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 32},
}


FAST = ("llama", "qwen3_moe")


def write_tokenizer(folder: Path, *, pattern: str = QWEN2[0]) -> None:
    """A byte-level vocabulary of the model's size, and a template."""
    backend = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, last])
    backend.normalizer = tokenizers.normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=270, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(["hello world, hello there", "the thing and the other"], trainer)
    backend.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    backend.save(str(folder / "tokenizer.json"))
    templates = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools }}"}
    named = [{"name": name, "template": source} for name, source in templates.items()]
    settings = {"eos_token": "<|im_end|>", "chat_template": named}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize(
    "family",
    [
        *("llama", "qwen3_moe"),
        *(pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES if n not in FAST),
    ],
)
def test_a_model_is_itself_as_gguf(family, checkpoint, tmp_path, open_session):
    """From the folder and from the file alone; Q8_0 is near enough to tell models apart."""
    vocabulary = {"vocab_size": 320, "num_key_value_heads": 2, "num_attention_heads": 4}
    folder = checkpoint(family, **(SIZES | vocabulary | FAMILIES[family]))
    write_tokenizer(folder)
    report = export_gguf(folder, "q8_0", tmp_path / "out")
    assert report.note == ""
    (file,) = (tmp_path / "out").glob("*.gguf")
    assert report.size_bytes <= file.stat().st_size < report.size_bytes + (1 << 16)
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(file).tensors}
    assert kinds["blk.1.attn_output.weight"] == "Q8_0"
    assert kinds["blk.1.attn_norm.weight"] == "F32"
    plan = plan_model(file, dtype="bfloat16")
    assert {m.weight_format for m in plan.matrices if m.role in ("qkv", "experts", "down")} <= {
        "int8g32"
    }
    wanted = open_session(load_checkpoint(folder, dtype="float32")).run(IDS)
    alone, whole = (
        open_session(load_checkpoint(path, dtype="float32")).run(IDS)
        for path in (file, tmp_path / "out")
    )
    assert torch.equal(alone, whole)
    assert float((alone - wanted).norm() / wanted.norm()) < 0.05
    found = load_gguf_tokenizer(file)
    original = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "hello THERE's 1234 things\n\n  and the rest<|im_end|>"
    assert found.backend.encode(text).ids == original.encode(text).ids
    assert found.special_tokens == {"eos_token": "<|im_end|>"}
    assert (found.chat_template, found.tool_template) == (
        "{{ messages[0].content }}",
        "{{ tools }}",
    )


def test_a_tokenizer_that_llama_cpp_does_not_know_is_left_out(checkpoint, tmp_path):
    """A file with another would give other tokens; the folder has the model's own."""
    folder = checkpoint("llama", **SIZES, vocab_size=320)
    write_tokenizer(folder, pattern=r"\p{L}|\p{N}+|[^\p{L}\p{N}]")
    report = export_gguf(folder, "q4_k_m", tmp_path / "out")
    assert "the GGUF file has none" in report.note
    (file,) = (tmp_path / "out").glob("*.gguf")
    with pytest.raises(ConfigError, match="no tokenizer"):
        load_gguf_tokenizer(file)
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_labels_of_a_configuration_say_nothing(checkpoint, tmp_path):
    """Names and versions that other programs leave in config.json."""
    folder = checkpoint("llama", **SIZES, vocab_size=320, num_key_value_heads=2)
    write_tokenizer(folder)
    path = folder / "config.json"
    labels = {"_name_or_path": "a/b", "_model_name_or_path": "a/b", "_commit_hash": "12ab"}
    labels |= {"unsloth_version": "2026.1", "auto_map": {"AutoConfig": "a--b.C"}}
    labels |= {"unk_token_id": 3, "sep_token_id": 2}
    path.write_text(json.dumps(json.loads(path.read_text()) | labels))
    assert export_gguf(folder, "q8_0", tmp_path / "out").num_coded
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mystery_scale": 2.0}))
    with pytest.raises(UnsupportedError, match="mystery_scale"):
        export_gguf(folder, "q8_0", tmp_path / "second")


def test_what_a_file_cannot_say_is_refused(checkpoint, tmp_path):
    """Models without a place in GGUF, RoPE that metadata lacks, dense layers among experts."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    for family, changes, words in (
        ("llama", {"rope_parameters": rope}, "rope_parameters"),
        ("qwen3_moe", EXPERTS | {"mlp_only_layers": [1]}, "mlp_only_layers"),
        ("gpt_oss", {}, "not written as GGUF"),
    ):
        folder = checkpoint(family, **SIZES, vocab_size=320, **changes)
        write_tokenizer(folder)
        with pytest.raises(UnsupportedError, match=words):
            export_gguf(folder, "q4_k_m", tmp_path / "out")
        assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="q4_k_x"):
        export_checkpoint(folder, "q4_k_x", tmp_path / "out")
