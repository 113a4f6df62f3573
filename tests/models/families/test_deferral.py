"""Goal: deferred experts are the recurrence of ``kernels/routing.py``, bitwise, for answers alone.

Method: a plain loop over the layers, in which each token's choices are sorted by hand, gives the
hidden states that the model's step must give to the last bit. The same tokens run in other batches
and chunks, as they do when a preempted answer is computed again.
"""

import pytest
import torch
from loading import load_checkpoint

from quick import rest_slow
from tandem import _native
from tandem.core.errors import ConfigError, UnsupportedError
from tandem.core.spec import NO_OUTPUT
from tandem.kernels import paged
from tandem.kernels.cpu.experts import NativeExperts
from tandem.kernels.fake.device import FakeDevice
from tandem.kernels.native import Buffer
from tandem.kernels.operators.mlp import Mlp
from tandem.kernels.paged import PagedBatch, SequenceChunk

IDS = [(7 * i) % 120 + 3 for i in range(40)]
PROMPT_LEN = 33
MOE = {"hidden_size": 64, "num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 4}
CASES = {
    "qwen3_moe-f32": ("qwen3_moe", {**MOE, "moe_intermediate_size": 64}, "float32", "auto"),
    "qwen3_moe-bf16": ("qwen3_moe", {**MOE, "moe_intermediate_size": 64}, "bfloat16", "int8g32"),
    "torch": ("qwen3_moe", {**MOE, "moe_intermediate_size": 64}, "float32", "none"),
    # Dense layers between those with experts, and the last one dense.
    "every second layer": (
        "qwen3_moe",
        {**MOE, "moe_intermediate_size": 64, "mlp_only_layers": [1, 3]},
        "float32",
        "auto",
    ),
    # Shared experts, a first dense layer, groups and a bias that only the choice sees.
    "deepseek_v3": ("deepseek_v3", {"hidden_size": 64, "num_hidden_layers": 4}, "float32", "auto"),
}


QUICK = [name for name in CASES if name != "qwen3_moe-f32"]


@pytest.fixture(params=rest_slow(QUICK, CASES), ids=lambda name: name.replace(" ", "-"))
def load(request, checkpoint, monkeypatch):
    family, sizes, dtype, expert_format = CASES[request.param]
    if request.param == "torch":
        monkeypatch.setattr(paged, "is_native", lambda tensor: False)
    folder = checkpoint(family, **sizes)

    def load_one(num_deferred):
        return load_checkpoint(
            folder, dtype=dtype, expert_format=expert_format, deferred_experts=num_deferred
        )

    return load_one


def run(model, pieces, prompt_len=PROMPT_LEN):
    """Return the logits of ``IDS``, computed in these pieces, all rows."""
    cache = model.allocate_kv(3, block_size=16)
    start, rows = 0, []
    for size in pieces:
        chunk = SequenceChunk(
            IDS[start : start + size], start, [2, 0, 1], "all", prompt_len=prompt_len
        )
        rows.append(model.forward(PagedBatch.build([chunk], 16), cache))
        start += size
    return torch.cat(rows)


def run_plainly(model, num_deferred):
    """Return the same logits by the recurrence, written out."""
    cache = model.allocate_kv(3, block_size=16)
    batch = PagedBatch.build([SequenceChunk(IDS, 0, [2, 0, 1], "all")], 16)
    layers = list(model.skeleton.model.layers)
    with torch.inference_mode():
        execution = model.context.choose_execution(model.dtype)
        step = execution.begin_step(batch, cache, model.ropes, model.dtype)
        x = model.skeleton.model.embed_tokens(batch.token_ids)
        late = None
        for layer_idx, layer in enumerate(layers):
            norm, attention, _, mlp_norm, mlp, _ = layer.parts
            attention.output_matrix.add_into_(x, step.mix(attention, norm(x)).clone())
            h = mlp_norm(x)
            if isinstance(mlp, Mlp):
                x = x if late is None else add(x, late)
                late = None
                add_dense(mlp, execution, x, h)
                continue
            weights, ids = choose(mlp.operators[0], execution, h)
            is_last = layer_idx == len(layers) - 1
            now, then = split_plainly(ids, weights, 0 if is_last else num_deferred)
            if mlp.shared is not None:
                add_dense(mlp.shared, execution, x, h)
            y = sum_experts(mlp.operators[1], h, now, weights)
            x = add(x, y if late is None else y + late)
            late = None if is_last else sum_experts(mlp.operators[1], h, then, weights)
        return model.skeleton.lm_head(model.skeleton.model.norm(x)).float()


def add_dense(mlp, execution, x, h):
    if not execution.is_native:
        mlp.add_into_(x, h)
        return
    gate_up_matrix, down_matrix = mlp.matrices
    size = mlp.spec.intermediate_size
    gate_up = Buffer.allocate(len(h), 2 * size, dtype=h.dtype)
    hidden = Buffer.allocate(len(h), size, dtype=h.dtype)
    gate_up_matrix.run(Buffer(h), gate_up)
    _native.gate(gate_up.view, hidden.view, mlp.activation.name, None, None)
    down_matrix.run(hidden, Buffer(x), is_added=True)


def choose(router, execution, h):
    if not execution.is_native:
        return router.route(h)[1:]
    # Rounded scores would choose other experts.
    logits = router.matrix.forward(h, dtype=router.matrix.out_dtype)
    return execution.route(logits, router.top_k, router.rule, router.choice_bias)


def split_plainly(ids, weights, num_deferred):
    now, then = ids.clone(), torch.full_like(ids, -1)
    for position in range(PROMPT_LEN, len(ids)):
        slots = list(range(ids.shape[1]))
        slots.sort(key=lambda slot: -float(weights[position, slot]))
        for slot in slots[len(slots) - num_deferred :] if num_deferred else []:
            then[position, slot] = ids[position, slot]
            now[position, slot] = -1
    return now, then


def sum_experts(experts, h, ids, weights):
    if not isinstance(experts, NativeExperts):
        return experts(h, ids, weights)
    out = torch.empty(h.shape, dtype=torch.float32)
    experts.run(Buffer(h), Buffer(ids), Buffer(weights.float()), Buffer(out))
    return out


def add(x, addend):
    return (x.float() + addend.float()).to(x.dtype)


def test_a_step_is_the_recurrence(load):
    seen = []
    for num_deferred in (0, 1, 3):
        model = load(num_deferred)
        assert model.is_fused
        want = run_plainly(model, num_deferred)
        got = run(model, [len(IDS)])
        assert torch.equal(got, want), num_deferred
        seen.append(got)
        # An answer that is computed once more, in other pieces, is what its decodes were.
        if model.plan.is_native:
            assert torch.equal(run(model, [PROMPT_LEN] + [1] * (len(IDS) - PROMPT_LEN)), want)
            assert torch.equal(run(model, [20, 17, 3]), want)
    prompt, answer = slice(0, PROMPT_LEN), slice(PROMPT_LEN, None)
    for other in seen[1:]:
        # Torch's products of an expert round by how many rows they have, on some machines.
        near = 0.0 if model.plan.is_native else 1e-5
        torch.testing.assert_close(seen[0][prompt], other[prompt], rtol=near, atol=near)
        assert not torch.equal(seen[0][answer], other[answer]), "deferral changes answers"
    assert not torch.equal(seen[1][answer], seen[2][answer])


def test_all_of_a_token_may_be_deferred_and_no_more(checkpoint):
    folder = checkpoint("qwen3_moe")
    model = load_checkpoint(folder, dtype="float32", deferred_experts=2)
    assert torch.equal(run(model, [len(IDS)]), run_plainly(model, 2))
    with pytest.raises(ConfigError, match="a token has 2"):
        load_checkpoint(folder, deferred_experts=3)
    with pytest.raises(ConfigError, match="no routed experts"):
        load_checkpoint(checkpoint("llama"), deferred_experts=1)


def test_layers_that_are_not_fused_refuse(checkpoint, tmp_path):
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        "- {match: {name: '^model.layers.1$'}, replace: {class: default}, recursive: false}"
    )
    with pytest.raises(UnsupportedError, match="one operator"):
        load_checkpoint(checkpoint("qwen3_moe"), rules=rules, deferred_experts=1)


def test_experts_whose_inputs_are_scaled_refuse(checkpoint):
    """A sum of a later layer knows no input that a weight has multiplied."""
    folder = checkpoint(
        "llama4_text", num_local_experts=4, intermediate_size_mlp=72, intermediate_size=40
    )
    with pytest.raises(UnsupportedError, match="inputs the router scales"):
        load_checkpoint(folder, deferred_experts=1)
    model = load_checkpoint(folder, dtype="float32", expert_format="f32")
    assert model.is_fused
    with pytest.raises(UnsupportedError, match="inputs the router scales"):
        model.enable_hybrid(FakeDevice(), split=object())


def test_deferral_is_part_of_the_identity(checkpoint):
    folder = checkpoint("qwen3_moe")
    models = [load_checkpoint(folder, dtype="float32", deferred_experts=d) for d in (0, 1)]
    ours, theirs = (model.kv_identity(model.kv_layout(16)) for model in models)
    assert [d.field for d in ours.compare(theirs) if d.forbids] == ["num_deferred_experts"]
    assert ours.digest != theirs.digest


@pytest.mark.parametrize(
    ("start", "size", "prompt_len", "want"),
    [
        (0, 4, NO_OUTPUT, "0000"),
        (0, 4, 3, "0001"),
        (5, 3, 2, "111"),
        (6, 1, 6, "1"),
        (6, 1, 7, "0"),
    ],
)
def test_output_rows(start, size, prompt_len, want):
    chunk = SequenceChunk(list(range(size)), start, [0], prompt_len=prompt_len)
    batch = PagedBatch.build([SequenceChunk([1, 2], 0, [1]), chunk], 16)
    assert "".join(str(int(row)) for row in batch.find_output_rows()) == "00" + want
