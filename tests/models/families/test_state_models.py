"""Goal: a model whose layers keep a state gives each token the same bits however it is fed.

Method: tiny random models, in float32, where the last bit of any other order of sums shows, and in
bfloat16. A checkpoint of a model that also takes images is that of its decoder.
"""

import json
from itertools import product

import pytest
import torch
from loading import load_checkpoint
from transformers import (
    GraniteMoeHybridConfig,
    KimiLinearConfig,
    Lfm2Config,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3NextConfig,
)

from quick import rest_slow
from tandem._native import ThreadPool
from tandem.core.errors import ShapeError, UnsupportedError
from tandem.kernels.paged import PagedBatch, SequenceChunk
from tandem.models.export import export_checkpoint
from tandem.models.families import open_checkpoint
from tandem.models.planning.planner import plan_model
from tandem.models.proof.tiny import make_tiny, save_tiny

SIZES = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 40,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
FORMATS = [("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "int8g32")]
PROMPTS = [[(7 * i + 11 * j) % 120 + 3 for j in range(n)] for i, n in enumerate((75, 1, 33))]
WIDTH = 8
"""Blocks of a sequence."""


class Feeder:
    """A model with the memory of three sequences."""

    def __init__(self, folder, dtype, linear_format, num_threads=2):
        pool = ThreadPool(num_threads)
        self.model = load_checkpoint(folder, dtype=dtype, linear_format=linear_format, pool=pool)
        self.cache = self.model.allocate_kv(3 * WIDTH, block_size=16)
        self.states = self.model.allocate_states(4)

    def run(self, *parts):
        """Run (sequence, first position, tokens) in one step; return the logits of each."""
        chunks = [
            SequenceChunk(
                tokens, start, list(range(WIDTH * i, WIDTH * i + WIDTH)), "all", state_slot=i
            )
            for i, start, tokens in parts
        ]
        batch = PagedBatch.build(chunks, 16)
        logits = self.model.forward(batch, self.cache, states=self.states)
        return logits.split([len(tokens) for *_, tokens in parts])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("hybrid")
    save_tiny(make_tiny(Qwen3NextConfig(**SIZES, **EXPERTS), 0), place)
    return place


COMMON = {"vocab_size": 131, "num_hidden_layers": 3, "max_position_embeddings": 512}
OTHERS = {
    "kimi delta": KimiLinearConfig(
        **COMMON,
        hidden_size=64,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=32,
        qk_rope_head_dim=32,
        qk_nope_head_dim=32,
        v_head_dim=32,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_heads=2,
        linear_head_dim=32,
        num_local_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "short convolutions": Lfm2Config(
        **COMMON,
        hidden_size=96,
        intermediate_size=96,
        block_multiple_of=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        full_attn_idxs=[1],
        conv_bias=True,
    ),
    "state spaces": GraniteMoeHybridConfig(
        **COMMON,
        hidden_size=64,
        shared_intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_local_experts=0,
        mamba_n_heads=2,
        mamba_d_state=16,
        residual_multiplier=0.4,
    ),
}


QUICK = [("kimi delta", FORMATS[2]), ("short convolutions", FORMATS[0])]
QUICK += [("state spaces", FORMATS[2])]


@pytest.mark.parametrize(
    ("kind", "formats"),
    rest_slow(QUICK, product(OTHERS, FORMATS[::2])),
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_states_of_other_kinds(kind, formats, tmp_path):
    """As gated delta rules, with all their matrices coded."""
    save_tiny(make_tiny(OTHERS[kind], 0), tmp_path)
    check_feeds(tmp_path, formats, is_fused=kind != "state spaces")


@pytest.mark.parametrize(
    "formats",
    [pytest.param(f, marks=[pytest.mark.slow] * (f == FORMATS[1])) for f in FORMATS],
    ids="-".join,
)
def test_a_token_has_the_same_bits_however_it_is_fed(folder, formats):
    check_feeds(folder, formats)


def check_feeds(folder, formats, *, is_fused=True):
    """Alone, in company, in chunks, one by one, on one thread, and after a copy of the state."""
    feeder = Feeder(folder, *formats)
    assert feeder.model.is_fused is is_fused
    [whole] = feeder.run((0, 0, PROMPTS[0]))
    together = feeder.run(*((i, 0, prompt) for i, prompt in enumerate(PROMPTS)))
    assert torch.equal(together[0], whole)
    for i in (1, 2):
        assert torch.equal(feeder.run((i, 0, PROMPTS[i]))[0], together[i])
    for cuts in ([30, 31, 40], list(range(1, 75))):
        ends = [*cuts, 75]
        pieces = [
            feeder.run((0, start, PROMPTS[0][start:end]))[0]
            for start, end in zip([0, *cuts], ends, strict=True)
        ]
        assert torch.equal(torch.cat(pieces), whole), cuts
    feeder.run((0, 0, PROMPTS[0][:41]))
    feeder.states.copy(0, 3)
    feeder.run((0, 41, PROMPTS[1]))
    feeder.states.copy(3, 0)
    assert torch.equal(feeder.run((0, 41, PROMPTS[0][41:]))[0], whole[41:])
    single = Feeder(folder, *formats, num_threads=1)
    assert torch.equal(single.run((0, 0, PROMPTS[0]))[0], whole)
    other = feeder.run((0, 0, [PROMPTS[0][0] + 1, *PROMPTS[0][1:]]))[0]
    assert not torch.equal(other[-1], whole[-1])


def test_layers_that_are_not_fused_are_the_same(folder, monkeypatch):
    """The skeleton's own forward calls the mixers one by one."""
    feeder = Feeder(folder, "float32", "auto")
    [fused] = feeder.run((0, 0, PROMPTS[0]))
    monkeypatch.setattr(feeder.model, "_fused", None)
    assert torch.equal(feeder.run((0, 0, PROMPTS[0]))[0], fused)


def test_a_step_without_slots_is_refused(folder):
    """Each sequence needs a slot of its own of this model's states."""
    feeder = Feeder(folder, "float32", "auto")
    batch = PagedBatch.build([SequenceChunk([5], 0, [0], state_slot=0)], 16)
    with pytest.raises(ShapeError, match="a slot of its own"):
        feeder.model.forward(batch, feeder.cache)
    without = PagedBatch.build([SequenceChunk([5], 0, [0])], 16)
    with pytest.raises(ShapeError, match="a slot of its own"):
        feeder.model.forward(without, feeder.cache, states=feeder.states)


def test_a_plan_counts_layers_with_kv_and_those_with_a_state(folder):
    """KV of the full layers alone; the state by its formula."""
    plan = plan_model(folder, dtype="bfloat16")
    assert (plan.spec.num_kv_layers, plan.spec.num_state_layers) == (1, 3)
    layout = plan.spec.state_layout
    assert layout is not None
    channels = 2 * 2 * 16 + 4 * 40
    assert layout.bytes_per_state == 3 * (4 * 2 * 16 * 32 * 4 + 3 * channels * 2)
    roles = {matrix.role for matrix in plan.layers[0].matrices}
    assert {"qkv", "gates", "attention_out", "experts"} <= roles
    places = {place.module.rpartition(".")[2] for place in plan.layers[0].adapters}
    assert {"in_proj_qkvz", "in_proj_ba", "out_proj"} <= places


def test_a_model_that_sees_images_runs_as_its_decoder(tmp_path):
    """The class of text comes from the configuration's part; towers and drafts are left unread."""
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    config = Qwen3_5Config(
        text_config={**SIZES, "layer_types": ["linear_attention", "full_attention"] * 2},
        vision_config={**vision, "out_hidden_size": 64, "num_position_embeddings": 16},
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    theirs = Qwen3_5ForConditionalGeneration(config).eval()
    theirs.save_pretrained(tmp_path)
    feeder = Feeder(tmp_path, "float32", "auto")
    assert feeder.model.spec.model_type == "qwen3_5_text"
    assert any(name.startswith("model.visual.") for name in feeder.model.ignored_weights)
    with torch.inference_mode():
        want = theirs(torch.tensor([PROMPTS[0]]), use_cache=False).logits[0]
    torch.testing.assert_close(feeder.run((0, 0, PROMPTS[0]))[0], want, rtol=1e-4, atol=1e-5)


TEXT = Qwen3_5Config(text_config={**SIZES, "layer_types": ["linear_attention"] * 4})
NAMED = {
    "class of text": {"architectures": ["Qwen3_5ForCausalLM"]},
    "class with images, without towers": {"architectures": ["Qwen3_5ForConditionalGeneration"]},
    "type of the whole": {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForCausalLM"]},
    "own type": {"model_type": "my_hybrid", "architectures": ["Qwen3_5ForCausalLM"]},
    "auto map": {
        "model_type": "my_hybrid",
        "architectures": ["MyHybrid"],
        "auto_map": {"AutoModelForCausalLM": "modeling_mine.Qwen3_5ForCausalLM"},
    },
    "own type with images": {
        "model_type": "my_hybrid",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": TEXT.text_config.to_dict(),
        "vision_config": {"depth": 1},
    },
}


@pytest.mark.parametrize("name", [*NAMED, "nothing known"])
def test_a_class_names_the_family(name, tmp_path):
    """Where the type of a configuration does not."""
    unknown = {"model_type": "my_hybrid", "architectures": ["MyHybrid"]}
    raw = TEXT.text_config.to_dict() | NAMED.get(name, unknown)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    if name in NAMED:
        assert open_checkpoint(tmp_path).spec.architecture == "Qwen3_5ForCausalLM"
    else:
        with pytest.raises(UnsupportedError, match="my_hybrid"):
            open_checkpoint(tmp_path)


def test_a_number_that_json_has_not_is_read(tmp_path):
    """transformers writes infinity as an object; limits of time steps are such."""
    save_tiny(make_tiny(OTHERS["state spaces"], 0), tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text()
    assert open_checkpoint(tmp_path).config.time_step_limit == (0.0, float("inf"))


def test_a_checkpoint_in_codes_leaves_gates_and_convolutions_as_they_are(tmp_path):
    """What decides how a state decays stays in values; the rest is coded."""
    # All experts are chosen, as of two that score alike another could be.
    config = Qwen3NextConfig(**SIZES, **EXPERTS | {"num_experts_per_tok": 6})
    save_tiny(make_tiny(config, 0), tmp_path / "plain")
    report = export_checkpoint(tmp_path / "plain", "int8g32", tmp_path / "coded")
    assert report.num_coded > 0
    coded = Feeder(tmp_path / "coded", "float32", "auto")
    held = {m.role: m.weight_format for m in coded.model.plan.layers[0].matrices}
    assert (held["qkv"], held["gates"]) == ("int8g32", "f32")
    [want] = Feeder(tmp_path / "plain", "float32", "auto").run((0, 0, PROMPTS[0]))
    own = load_checkpoint(
        tmp_path / "plain", dtype="float32", linear_format="int8g32", expert_format="int8g32"
    )
    assert own.plan.linear.weight_format == "int8g32"
    [got] = coded.run((0, 0, PROMPTS[0]))
    coded.model = own
    [packed] = coded.run((0, 0, PROMPTS[0]))
    # So steep a model is as far off with codes that are made as it loads.
    assert float((got - want).norm()) < 1.3 * float((packed - want).norm())
