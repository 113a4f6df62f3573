"""Goal: a LongRoPE rotates every position by the factors that the served context decides on.

Method: tiny random models of an original length of 40 tokens, fed whole, in chunks that end before
and after that length, token by token and from a reused prefix. transformers' eager code is the
oracle, forced to one list of factors by giving it as both lists.
"""

import copy
from itertools import pairwise

import gguf
import pytest
import torch
from gguf_writing import write_model
from loading import load_checkpoint
from transformers import AutoModelForCausalLM, PhimoeConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from each import each
from tandem import _native
from tandem.core.clock import MonotonicClock
from tandem.core.errors import ConfigError, UnsupportedError
from tandem.core.wire import AddRequest, SamplingParams
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.planning import plan_engine
from tandem.finetune.training.model import load_frozen
from tandem.models.config import ModelConfig
from tandem.models.families import open_checkpoint
from tandem.models.loading.loader import load_model
from tandem.models.own.plan import plan_own
from tandem.models.own.prove import prove_own
from tandem.models.planning.plan_report import render_plan
from tandem.models.planning.planner import plan_model
from tandem.models.proof.tiny import make_references, make_tiny, save_tiny
from tandem.placement.rules import parse_rules

ORIGINAL, LONGEST = 40, 160
SIZES = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": LONGEST,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_rope(num_pairs, **others):
    return {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0 + 0.05 * i for i in range(num_pairs)],
        "long_factor": [1.25 + 0.75 * i for i in range(num_pairs)],
        **others,
    }


MODELS = {
    # As Phi-4-mini: three quarters of a head are rotated, the length is outside of the RoPE.
    "phi3": {
        "original_max_position_embeddings": ORIGINAL,
        "rope_parameters": make_rope(6, partial_rotary_factor=0.75),
    },
    # As MiniCPM and Llama with factors of their own, and a factor on cos and sin that is stated.
    "llama": {
        "rope_parameters": make_rope(
            8, original_max_position_embeddings=ORIGINAL, factor=4.0, attention_factor=1.3
        )
    },
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return, by name, (folder, eager models by the factors that they always take)."""
    made = {}
    for name, changes in MODELS.items():
        values = copy.deepcopy(SIZES | changes)
        if name == "phi3":
            values.pop("head_dim")
        model = make_tiny(CONFIG_MAPPING[name](**values), 0)
        folder = tmp_path_factory.mktemp("longrope") / name
        save_tiny(model, folder)
        eager = {}
        for kept in ("short_factor", "long_factor"):
            config = copy.deepcopy(model.config)
            rope = config.rope_parameters
            rope["short_factor"] = rope["long_factor"] = rope[kept]
            eager[kept] = AutoModelForCausalLM.from_config(
                config, attn_implementation="eager", dtype=torch.float32
            ).eval()
            eager[kept].load_state_dict(model.state_dict())
        made[name] = (folder, eager)
    return made


@pytest.fixture(scope="module")
def pool():
    return _native.ThreadPool(1)


TOKENS = torch.randint(3, 131, (70,), generator=torch.Generator().manual_seed(5))
BOUNDS = {"long_factor": LONGEST, "short_factor": ORIGINAL}


def run_pieces(session, ids, cuts):
    return torch.cat([session.run(ids[a:b]) for a, b in pairwise([0, *cuts, len(ids)])])


def run_reused(open_session, model, ids, size):
    """Run a sequence that takes over blocks of another one that went on otherwise."""
    cache = model.allocate_kv(24, block_size=16)
    first = open_session(model, cache=cache, table=list(range(8)))
    rows = first.run(ids[:size])
    first.run(ids[::-1][:9])
    second = open_session(model, cache=cache, table=[*range(size // 16), *range(8, 15)])
    second.length = size
    return torch.cat([rows, second.run(ids[size:])])


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_factors_of_the_context(name, models, pool, open_session):
    """Also of prompts within the original length, where longer ones may come, as keys are kept."""
    folder, eager = models[name]
    plan = plan_model(folder, dtype="float32")
    for factors, context in BOUNDS.items():
        model = load_model(plan.serve(context), pool)
        assert model.plan.rope_factors == {"0": factors}
        lengths = [30, len(TOKENS)] if factors == "long_factor" else [ORIGINAL]
        prompts = [TOKENS[:length] for length in lengths]
        for reference in make_references(eager[factors].float(), prompts, is_stepwise=False):
            ids = reference.tokens.tolist()
            ways = {
                "whole": run_pieces(open_session(model), ids, []),
                "chunked": run_pieces(open_session(model), ids, range(13, len(ids), 13)),
                "decoding": run_pieces(open_session(model), ids, range(20, len(ids))),
                "reused": run_reused(open_session, model, ids, 16),
            }
            for way, logits in ways.items():
                assert reference.find_excess(logits) <= 1, (factors, len(ids), way)
                assert torch.equal(logits, ways["whole"]), (factors, len(ids), way)


def test_what_is_served_is_what_transformers_gives_a_prompt_as_long(models, pool, open_session):
    """The unforced model: all positions by the long factors beyond the length, else the short."""
    folder, _ = models["phi3"]
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()
    for context, length in ((LONGEST, 70), (LONGEST, 41), (ORIGINAL, 40), (ORIGINAL, 7)):
        model = load_model(plan_model(folder, dtype="float32").serve(context), pool)
        (reference,) = make_references(theirs.float(), [TOKENS[:length]], is_stepwise=False)
        logits = run_pieces(open_session(model), TOKENS[:length].tolist(), range(5, length, 5))
        assert reference.find_excess(logits) <= 1, (context, length)


@pytest.mark.parametrize("name", MODELS)
def test_a_served_prompt_has_transformers_log_probabilities(name, pool, tmp_path, open_session):
    """390 tokens in the pieces of an engine, the first of which ends within the original length."""
    values = copy.deepcopy(SIZES | MODELS[name]) | {"max_position_embeddings": 2048}
    values.pop("head_dim")
    place = values if "original_max_position_embeddings" in values else values["rope_parameters"]
    place["original_max_position_embeddings"] = 300
    model = make_tiny(CONFIG_MAPPING[name](**values), 1)
    save_tiny(model, tmp_path)
    ids = torch.randint(3, 131, (390,), generator=torch.Generator().manual_seed(6))
    with torch.inference_mode():
        theirs = model(ids[None]).logits[0].log_softmax(-1)
    planned = plan_engine(ModelConfig(path=str(tmp_path), dtype="float32"), EngineConfig())
    served = load_model(planned.model, pool)
    for cuts in ([256], [], [299, 301]):
        ours = run_pieces(open_session(served, block_size=32), ids.tolist(), cuts).log_softmax(-1)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)


def test_the_plan_and_the_identity_tell_the_factors(models, pool):
    """KV of one list of factors must not be taken for KV of the other."""
    folder, _ = models["llama"]
    plan = plan_model(folder, dtype="float32")
    assert "longrope 10000, long factors" in render_plan(plan)
    assert "longrope 10000, short factors" in render_plan(plan.serve(ORIGINAL))
    identities = []
    for context in (LONGEST, ORIGINAL + 1, ORIGINAL):
        model = load_model(plan.serve(context), pool)
        identities.append(model.kv_identity(model.kv_layout(16)))
    long, same, short = identities
    assert long.digest == same.digest
    assert [d.field for d in long.compare(short) if d.forbids] == ["rope_factors.0"]
    assert long.digest != short.digest


@pytest.mark.parametrize("name", MODELS)
def test_a_gguf_file_has_both_lists(name, models, pool, tmp_path, open_session):
    """Tensors of the factors, a key of the factor on cos and sin, as llama.cpp reads them."""
    folder, _ = models[name]
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    file, ids = tmp_path / "model.gguf", TOKENS.tolist()[:ORIGINAL]
    write_model(theirs, file)
    names = {tensor.name for tensor in gguf.GGUFReader(file).tensors}
    assert {"rope_factors_long.weight", "rope_factors_short.weight"} <= names
    rows = []
    for context in BOUNDS.values():
        for place in (folder, file):
            model = load_model(plan_model(place, dtype="float32").serve(context), pool)
            rows.append(open_session(model).run(ids))
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[2], rows[3])
    assert not torch.equal(rows[0], rows[2])


@pytest.mark.parametrize(("factors", "context"), BOUNDS.items())
def test_training_takes_one_list_for_batches_of_any_length(factors, context, models, pool):
    """That of the longest sequence which the recipe allows, whatever the batch has."""
    folder, eager = models["phi3"]
    model = load_frozen(str(folder), pool=pool, context=context).model
    for length in (20, 40) if factors == "short_factor" else (20, 70):
        ids = TOKENS[:length][None].expand(2, -1)
        theirs = eager[factors].float()
        torch.testing.assert_close(model(ids).logits, theirs(ids).logits, rtol=1e-3, atol=1e-4)


@each(
    ("changes", "field"),
    [
        ({"short_factor": [1.0] * 5}, "rope_parameters.short_factor"),
        ({"long_factor": [1.0] * 7 + [0.0]}, "rope_parameters.long_factor"),
        ({"long_factor": [1.0] * 7 + ["2"]}, "rope_parameters.long_factor"),
        (
            {"original_max_position_embeddings": 1},
            "rope_parameters.original_max_position_embeddings",
        ),
        (
            {"original_max_position_embeddings": 1000},
            "rope_parameters.original_max_position_embeddings",
        ),
    ],
)
def test_wrong_factors_are_named(changes, field, models, tmp_path, edit_config):
    """An error of Python, or a plausible answer of other angles, would be worse."""
    folder, _ = models["llama"]
    place = tmp_path / str(len(list(tmp_path.iterdir())))
    place.mkdir()
    (place / "config.json").write_bytes((folder / "config.json").read_bytes())
    edit_config(place, rope_parameters=MODELS["llama"]["rope_parameters"] | changes)
    with pytest.raises(ConfigError) as caught:
        plan_model(place)
    assert caught.value.field == field
    assert field in str(caught.value)


def test_the_first_name_of_a_longrope_is_known(models, tmp_path, edit_config):
    """Phi-3's first files call it "su", with the scaling apart from the base."""
    folder, _ = models["phi3"]
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    rope = MODELS["phi3"]["rope_parameters"]
    scaling = {"type": "su", **{k: rope[k] for k in ("short_factor", "long_factor")}}
    edit_config(
        tmp_path,
        rope_parameters=None,
        rope_theta=1e4,
        partial_rotary_factor=0.75,
        rope_scaling=scaling,
    )
    (mine, theirs) = (plan_model(path, dtype="float32") for path in (tmp_path, folder))
    assert [layer.rope for layer in mine.layers] == [layer.rope for layer in theirs.layers]


def test_a_rule_cannot_keep_angles_that_change_with_the_length(models):
    """transformers' module would rotate each chunk of a prompt by its own length."""
    folder, _ = models["llama"]
    rules = parse_rules("- match: {name: rotary_emb}\n  replace: {class: default}\n", "rules")
    with pytest.raises(UnsupportedError, match="longrope angles change"):
        load_checkpoint(folder, rules=rules)


def test_own_modules_end_where_the_factors_change(tmp_path):
    """Phi-3.5-MoE's class has another factor on cos and sin beyond the length, for all positions,
    so its cached keys are right within it only; and transformers takes the short divisors there.
    """
    values = {k: v for k, v in SIZES.items() if k != "head_dim"}
    rope = make_rope(8, original_max_position_embeddings=ORIGINAL, factor=4.0)
    rope |= {"short_mscale": 1.1, "long_mscale": 1.4}
    config = PhimoeConfig(**values, num_local_experts=4, rope_parameters=rope)
    save_tiny(make_tiny(config, 0), tmp_path)
    refusal = UnsupportedError("test", "as in a test")
    plan = plan_own(tmp_path, refusal, proof="off")
    assert plan.spec.max_position_embeddings == ORIGINAL
    assert f"cut from {LONGEST}: beyond {ORIGINAL} its longrope" in plan.context_reason
    with pytest.raises(UnsupportedError):
        load_checkpoint(tmp_path)
    proof = prove_own(open_checkpoint(tmp_path).config)
    assert proof.problem == ""
    assert proof.piece == 0
    write_model(AutoModelForCausalLM.from_config(config), tmp_path / "model.gguf")
    with pytest.raises(UnsupportedError, match="has one factor on cos and sin"):
        plan_model(tmp_path / "model.gguf")


def test_minicpm_is_right_up_to_the_length_where_its_context_is_cut(tmp_path):
    """Its latent attention runs on transformers' own modules, whose eager code sees whole texts:
    prompts and answers that end at the last position, in steps of seven tokens and of one.
    """
    values = {k: v for k, v in SIZES.items() if k != "head_dim"} | {"num_key_value_heads": 4}
    values |= {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16}
    values |= {"qk_rope_head_dim": 16, "v_head_dim": 16}
    rope = make_rope(8, original_max_position_embeddings=ORIGINAL, factor=4.0)
    model = make_tiny(CONFIG_MAPPING["minicpm3"](**values, rope_parameters=rope), 2)
    save_tiny(model, tmp_path)
    refusal = UnsupportedError("test", "as in a test")
    plan = plan_own(tmp_path, refusal, dtype="float32", proof="off")
    assert plan.spec.max_position_embeddings == ORIGINAL
    engine = build_engine(
        ModelConfig(path=str(tmp_path), dtype="float32"),
        EngineConfig(max_batch_tokens=7, max_running=2, num_kv_blocks=8, block_size=16),
        MonotonicClock(),
    ).engine
    for length in (ORIGINAL - 1, 12):
        prompt = TOKENS[:length].tolist()
        sampling = SamplingParams(
            temperature=0.0, max_tokens=ORIGINAL, ignore_eos=True, prompt_logprobs=0, logprobs=0
        )
        engine.add(AddRequest(request_id=str(length), prompt_ids=prompt, sampling=sampling))
        outputs = []
        while engine.has_requests:
            assert engine.wait_for_work(60)
            outputs += engine.step()
        answer = [token for output in outputs for token in output.token_ids]
        assert len(prompt) + len(answer) == ORIGINAL
        with torch.inference_mode():
            rows = model.float()(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
        (told,) = [each.prompt_logprobs for each in outputs if each.prompt_logprobs is not None]
        entries = [*told.unpack()[1:], *(e for o in outputs for e in o.logprobs or ())]
        wanted = rows[torch.arange(ORIGINAL - 1), torch.tensor(prompt + answer)[1:]]
        ours = torch.tensor([entry.logprob for entry in entries])
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-4)
        assert answer == rows[length - 1 : -1].argmax(-1).tolist()
