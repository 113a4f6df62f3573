"""Goal: every family runs right in bfloat16, and bitwise the same however its tokens are fed.

Method: the tiny models of the proofs, at the switches of published models. Parity: against eager in
float64 of the same rounded weights, within the bound; routers turn near ties, on either side, so
tokens where eager's own bfloat16 leaves the bound are out. Feeding: whole, in chunks, one by one,
after a reused prefix and in company, on one thread and on two.
"""

import json

import numpy as np
import pytest
import torch
from loading import load_checkpoint
from published import PUBLISHED, make_published
from safetensors.torch import load_file

from quick import rest_slow
from tandem._native import ThreadPool
from tandem.kernels import tolerance
from tandem.kernels.paged import PagedBatch
from tandem.models.proof.shrink import shrink_config
from tandem.models.proof.tiny import make_tiny, make_tokens, save_tiny

NAMES = [name for name, (model_type, _) in PUBLISHED.items() if name == model_type]
NORMS = ("norm", "embedding_norm", "final_layernorm", "norm_f")
"""The names of the norm before the head."""
UNFUSED = ("granitemoehybrid", "nemotron_h")
"""Families whose layers are modules of transformers around our operators."""
SEEDS = {"mimo_v2_flash": 1}
"""Seeds of weights and tokens, where 0 gives a near tie in a token that all others see."""
FEEDS = ([1, 11, 30], list(range(20, 52)))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Return ``tiny(name)``: (eager's model, its tokens, the checkpoint's folder)."""
    made = {}

    def get(name):
        if name not in made:
            config, seed = shrink_config(make_published(name)), SEEDS.get(name, 0)
            folder = tmp_path_factory.mktemp(name)
            model = make_tiny(config, seed)
            save_tiny(model, folder)
            made[name] = (model, make_tokens(config, seed), folder)
        return made[name]

    return get


@torch.inference_mode()
def run_rounded(model, tokens):
    """Return (bf16 logits, exact logits of the same weights, the bound of bf16)."""
    rounded = model.to(torch.bfloat16)
    theirs = rounded(tokens[None], use_cache=False).logits[0].double().numpy()
    seen = []
    exact_model = rounded.double()
    [norm] = [m for m in (getattr(exact_model.model, n, None) for n in NORMS) if m is not None]
    hook = norm.register_forward_hook(lambda *a: seen.append(a[2][0]))
    exact = exact_model(tokens[None], use_cache=False).logits[0].numpy()
    hook.remove()
    weight = exact_model.get_output_embeddings().weight.numpy()
    layers = model.config.num_hidden_layers
    bound = tolerance.logits(seen[0].numpy(), weight, layers, torch.bfloat16)
    return theirs, exact, bound


@pytest.mark.parametrize("name", rest_slow(["gpt_oss", "deepseek_v3", "qwen3_next"], NAMES))
def test_parity_in_bfloat16(name, tiny, open_session):
    """Rounding the same weights as eager does, ours is as near to the exact result as eager is."""
    model, tokens, folder = tiny(name)
    theirs, exact, bound = run_rounded(model, tokens)
    ours = load_checkpoint(folder, dtype="bfloat16")
    assert ours.is_fused == (name not in UNFUSED)
    logits = open_session(ours).run(tokens.tolist()).double().numpy()
    off, their_off = np.abs(logits - exact) / bound, np.abs(theirs - exact) / bound
    assert np.median(off) <= 1.5 * np.median(their_off) + 0.02
    if ours.spec.top_k >= ours.spec.num_experts:
        assert off.max() <= max(1.0, 2 * their_off.max())


# Plain attention, experts and latents are fed in every way in test_batch_invariance.py.
@pytest.mark.parametrize(
    "name", rest_slow(["gemma2", "qwen3_next", "lfm2", "granitemoehybrid"], NAMES)
)
def test_feeding_changes_no_bit(name, tiny, open_session):
    """One token's logits do not depend on chunks, company, reuse of a prefix or threads."""
    _, tokens, folder = tiny(name)
    ids = tokens.tolist()
    model = load_checkpoint(folder, dtype="bfloat16", pool=ThreadPool(2))
    first = open_session(model, table=[3, 8, 2, 4, 6])
    whole = first.run(ids)
    for cuts in FEEDS:
        session = open_session(model, block_size=32)
        pieces = [session.run(ids[a:b]) for a, b in zip([0, *cuts], [*cuts, 52], strict=True)]
        assert torch.equal(whole, torch.cat(pieces)), cuts
    # The first block shared, five tokens of the next one copied.
    first.cache.copy_block(8, 11, 5)
    second = open_session(model, cache=first.cache, table=[3, 11, 12, 13, 14])
    second.length = 21
    if second.states is not None:
        # A state is that after exactly these tokens.
        before = open_session(model)
        before.run(ids[:21])
        second.states = before.states
    assert torch.equal(whole[21:], second.run(ids[21:]))
    cache = model.allocate_kv(24, block_size=16)
    beside = [open_session(model, cache=cache, table=list(range(a, a + 5))) for a in (0, 5, 10)]
    chunks = [
        s.chunk(ids[:n], state_slot=slot)
        for slot, (s, n) in enumerate(zip(beside, (7, 52, 1), strict=True))
    ]
    states = model.allocate_states(len(chunks))
    together = model.forward(PagedBatch.build(chunks, 16), cache, states=states)
    assert torch.equal(whole, together[7:59])
    one = load_checkpoint(folder, dtype="bfloat16", pool=ThreadPool(1))
    assert torch.equal(whole, open_session(one).run(ids))


@pytest.mark.parametrize("name", ["mixtral", "minimax_m2"])
def test_checkpoints_with_the_hubs_names_load(name, tiny):
    """The tiny checkpoints have the names that the hub's have, not those of the modules."""
    folder = tiny(name)[2]
    names = load_file(folder / "model.safetensors").keys()
    assert any(".block_sparse_moe.experts.0.w1.weight" in n for n in names)
    assert json.loads((folder / "config.json").read_text())["model_type"] == name
    assert load_checkpoint(folder, expert_format="bf16").ignored_weights == {}
