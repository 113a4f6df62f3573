"""Goal: a step with LoRA adapters computes what PEFT computes, bitwise free of its company.

Method: random tiny checkpoints and adapters, both written by their own libraries. PEFT's unmerged
model in float32 is the oracle; in bfloat16, where every product is rounded, rows of several
adapters and of the model alone run by themselves, in company, in chunks and one by one.
"""

import pytest
import torch
from loading import load_checkpoint
from lora import count_bytes, list_targets, make_adapter, record_views

from quick import rest_slow
from tandem._native import ThreadPool
from tandem.kernels.paged import PagedBatch
from tandem.models.adapter_files import read_adapter_ranks
from tandem.models.adapter_plan import count_adapter_bytes

PROMPT = [(7 * i) % 120 + 3 for i in range(45)]
FAMILIES = {
    "llama": {},
    "llama-biases": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {},
    "qwen3_moe": {},
    "gpt_oss": {},
    "deepseek_v2": {},
    "deepseek_v3": {"n_shared_experts": 2},
    "qwen3_next": {},
    "kimi_linear": {},
    "lfm2": {},
    "granitemoehybrid": {},
}


@pytest.fixture
def load(make_config, save_model, tmp_path):
    """Return (our model with adapters enabled, transformers' own)."""

    def load_one(family, *, threads=2, **options):
        changes = FAMILIES.get(family, {})
        config = make_config(family.split("-")[0], **changes)
        folder = tmp_path / family
        theirs = save_model(config, folder)
        pool = ThreadPool(threads)
        ours = load_checkpoint(folder, pool=pool, **options)
        ours.enable_adapters(8)
        return ours, theirs

    return load_one


def install(model, folder):
    return model.adapters.install(model.adapters.read(folder)).digest


def run(model, open_session, prompt, adapter="", sizes=None):
    session = open_session(model, adapter=adapter)
    pieces = torch.tensor(prompt).split(sizes or len(prompt))
    return torch.cat([session.run(piece.tolist()) for piece in pieces])


QUICK = ["gpt_oss", "deepseek_v3", "qwen3_next", "lfm2", "granitemoehybrid"]


@pytest.mark.parametrize("family", rest_slow(QUICK, FAMILIES))
def test_float32_is_pefts_model(family, load, open_session, tmp_path, monkeypatch):
    """Every module that may be adapted is, in fused layers and in the skeleton's forward; and what
    they hold is what a plan counts before anything is loaded.
    """
    ours, theirs = load(family, dtype="float32")
    tuned = make_adapter(theirs, tmp_path / "adapter", monkeypatch)
    held = record_views(monkeypatch)
    digest = install(ours, tmp_path / "adapter")
    ranks = read_adapter_ranks(tmp_path / "adapter")
    assert count_adapter_bytes(ours.plan, [ranks], is_captured=False) == count_bytes(held)
    with torch.no_grad():
        ids = torch.tensor([PROMPT])
        want = tuned(ids).logits[0]
        base = theirs(ids).logits[0]
    assert float((want - base).norm() / base.norm()) > 0.1, "the adapter changes nothing"
    got = run(ours, open_session, PROMPT, digest)
    assert float((got - want).norm() / want.norm()) < 1e-5
    assert float((run(ours, open_session, PROMPT) - base).norm() / base.norm()) < 1e-5
    ours._fused = None
    unfused = run(ours, open_session, PROMPT, digest)
    assert float((unfused - want).norm() / want.norm()) < 1e-5


SERVED = [(family, "bfloat16") for family in ("llama", "qwen3_moe", "deepseek_v3", "gpt_oss")]
SERVED += [("llama", "float32"), ("deepseek_v3", "float32")]


QUICK_SERVED = ["gpt_oss-bfloat16", "deepseek_v3-float32"]


@pytest.fixture(params=rest_slow(QUICK_SERVED, map("-".join, SERVED)))
def served(request, load, monkeypatch, tmp_path):
    """A model and, with one for the model itself, digests of unlike adapters."""
    family, dtype = request.param.split("-")
    ours, theirs = load(family, dtype=dtype)
    some = list_targets(theirs)[::3]
    kinds = ({"rank": 4}, {"rank": 1, "targets": some}, {"rank": 37, "use_rslora": True})
    digests = [""]
    for i, kind in enumerate(kinds):
        make_adapter(theirs, tmp_path / f"a{i}", monkeypatch, seed=i, **kind)
        digests.append(install(ours, tmp_path / f"a{i}"))
    return ours, digests


def test_bitwise_alone_and_in_company(served, open_session):
    """16 requests of the model and three adapters: each has the bits that it has alone."""
    ours, digests = served
    prompts = [PROMPT[i : i + 1 + 5 * (i % 4)] for i in range(16)]
    adapters = [digests[i % 4] for i in range(16)]
    alone = [run(ours, open_session, p, a) for p, a in zip(prompts, adapters, strict=True)]
    cache = ours.allocate_kv(64, block_size=16)
    sessions = [
        open_session(ours, cache=cache, table=list(range(4 * i, 4 * i + 4)), adapter=a)
        for i, a in enumerate(adapters)
    ]
    chunks = [s.chunk(prompt) for s, prompt in zip(sessions, prompts, strict=True)]
    together = ours.forward(PagedBatch.build(chunks, 16), cache).split([len(p) for p in prompts])
    for want, got in zip(alone, together, strict=True):
        assert torch.equal(want, got)


def test_bitwise_in_chunks(served, open_session):
    """However a prompt is cut: a request after preemption or with a cached prefix is the same."""
    ours, digests = served
    for digest in digests:
        whole = run(ours, open_session, PROMPT, digest)
        for sizes in ([1] * 45, [17, 1, 27]):
            assert torch.equal(whole, run(ours, open_session, PROMPT, digest, sizes)), sizes


def test_the_model_alone_is_untouched(load, open_session, monkeypatch, tmp_path):
    """Enabled adapters, loaded and unloaded, change no bit of the model's own answers."""
    ours, theirs = load("qwen3_moe", dtype="bfloat16", linear_format="bf16")
    plain = load_checkpoint(tmp_path / "qwen3_moe", dtype="bfloat16", linear_format="bf16")
    want = run(plain, open_session, PROMPT)
    make_adapter(theirs, tmp_path / "adapter", monkeypatch)
    digest = install(ours, tmp_path / "adapter")
    assert torch.equal(run(ours, open_session, PROMPT), want)
    assert not torch.equal(run(ours, open_session, PROMPT, digest), want)
    ours.adapters.uninstall(digest)
    assert torch.equal(run(ours, open_session, PROMPT), want)
    with pytest.raises(KeyError):
        run(ours, open_session, PROMPT, digest)
