"""Goal: on native kernels a token's logits are bitwise those it has alone, whole, on one thread.

Method: random models in float32, where the last bit of any other order of sums shows, and in
bfloat16. The same tokens run alone and among others, whole, in chunks and one by one, with one
thread and with two, and in blocks of another size and order.
"""

from itertools import product

import pytest
import torch
from loading import load_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from quick import rest_slow
from tandem._native import ThreadPool
from tandem.kernels.paged import PagedBatch

FAMILIES = ["llama", "qwen3", "qwen3_moe", "gpt_oss", "deepseek_v3"]
PROMPTS = [[(7 * i + 11 * j) % 120 + 3 for j in range(n)] for i, n in enumerate((75, 1, 33, 40))]
FORMATS = [
    ("float32", "auto", "auto"),
    ("float32", "int4g32", "int8g16"),
    ("bfloat16", "auto", "auto"),
    ("bfloat16", "int8g32", "int8g16"),
    ("bfloat16", "int4g32", "bf16"),
]
"""Dtype, and formats of experts and of other matrices."""
CODED_KV = ["int8", "fp8"]


def list_cases():
    """Return (family, formats): each kind of attention and of experts in one pair of formats,
    another in each of the others.
    """
    for family in FAMILIES:
        for formats in FORMATS:
            is_coded = formats == FORMATS[3]
            is_quick = family in (("gpt_oss", "deepseek_v3") if is_coded else ("qwen3_moe",))
            name = "-".join((family, *formats))
            yield pytest.param(
                (family, formats), id=name, marks=[] if is_quick else pytest.mark.slow
            )


@pytest.fixture(scope="module")
def models():
    """Models by their case and number of threads: loaded once, changed by none of these tests."""
    return {}


@pytest.fixture(params=list_cases())
def load(request, saved, models):
    family, (dtype, expert_format, linear_format) = request.param
    moe = {"moe_intermediate_size": 64} if family == "qwen3_moe" else {}
    folder = saved(family, "1GB", {"hidden_size": 64, "intermediate_size": 64, **moe})

    def load_one(num_threads=2):
        key = request.param, num_threads
        if key not in models:
            models[key] = load_checkpoint(
                folder,
                dtype=dtype,
                expert_format=expert_format,
                linear_format=linear_format,
                pool=ThreadPool(num_threads),
            )
        return models[key]

    return load_one


def run_together(model, open_session, prompts, cache=None):
    cache = cache or model.allocate_kv(64, block_size=16)
    sessions = [
        open_session(model, cache=cache, table=list(range(8 * i, 8 * i + 8)))
        for i in range(len(prompts))
    ]
    chunks = [session.chunk(prompt) for session, prompt in zip(sessions, prompts, strict=True)]
    logits = model.forward(PagedBatch.build(chunks, 16), cache)
    return logits.split([len(prompt) for prompt in prompts])


def test_alone_as_among_others(load, open_session):
    model = load()
    alone = [open_session(model).run(prompt) for prompt in PROMPTS]
    together = run_together(model, open_session, PROMPTS)
    for want, got in zip(alone, together, strict=True):
        assert torch.equal(want, got)


def test_chunked_as_whole(load, open_session):
    model = load()
    whole = open_session(model).run(PROMPTS[0])
    for sizes in ([30, 1, 44], [1] * 75, [64, 11]):
        session = open_session(model, block_size=32)
        pieces = [session.run(list(piece)) for piece in torch.tensor(PROMPTS[0]).split(sizes)]
        assert torch.equal(whole, torch.cat(pieces)), sizes


def test_layers_in_a_row_as_one_by_one(load, open_session, monkeypatch):
    """What a layer leaves to the next one's norm is rounded as if it had added it itself."""
    model = load()
    assert model.is_fused
    session = open_session(model)
    fused = torch.cat([session.run(PROMPTS[0]), session.run([5])])
    monkeypatch.setattr(model, "_fused", None)
    session = open_session(model)
    assert torch.equal(torch.cat([session.run(PROMPTS[0]), session.run([5])]), fused)


def test_one_thread_as_two(load, open_session):
    one, two = load(1), load(2)
    wants, gots = (run_together(model, open_session, PROMPTS) for model in (one, two))
    assert all(torch.equal(want, got) for want, got in zip(wants, gots, strict=True))


@pytest.mark.parametrize("kv_dtype", CODED_KV)
def test_coded_kv_alone_chunked_and_in_company(kv_dtype, load, open_session):
    """What a token sees is what a later step reads back: its own codes, too."""
    model = load()

    def open_coded():
        return open_session(model, cache=model.allocate_kv(64, block_size=16, kv_dtype=kv_dtype))

    whole = open_coded().run(PROMPTS[0])
    session = open_coded()
    pieces = [session.run(list(piece)) for piece in torch.tensor(PROMPTS[0]).split([30, 1, 44])]
    assert torch.equal(whole, torch.cat(pieces))
    cache = model.allocate_kv(64, block_size=16, kv_dtype=kv_dtype)
    together = run_together(model, open_session, PROMPTS, cache)
    assert torch.equal(together[0], whole)
    # As the prefix cache does: whole blocks shared, and the last one's first tokens copied.
    cache.copy_block(3, 40, 7)
    cache.tensor[41:45] = 255
    resumed = open_session(model, cache=cache, table=[0, 1, 2, 40, 41])
    resumed.length = 3 * 16 + 7
    assert torch.equal(resumed.run(PROMPTS[0][resumed.length :]), whole[3 * 16 + 7 :])
    plain = open_session(model).run(PROMPTS[0])
    assert not torch.equal(whole, plain)
    error = (whole - plain).norm(dim=-1) / plain.norm(dim=-1)
    assert error.median() < 0.1


def test_the_comparison_can_fail(load, open_session):
    logits = open_session(load()).run(PROMPTS[0])
    other = open_session(load()).run([PROMPTS[0][0] + 1, *PROMPTS[0][1:]])
    assert not torch.equal(logits[-1], other[-1])


class CountCalls(TorchDispatchMode):
    """Counts what torch is asked to compute."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        del types
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


ASKED = ["qwen3", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3"]


@pytest.mark.parametrize(
    ("model_type", "dtype"),
    rest_slow(
        [("qwen3_moe", "float32"), ("gpt_oss", "bfloat16"), ("deepseek_v3", "bfloat16")],
        product(ASKED, ["float32", "bfloat16"]),
    ),
)
def test_a_layer_of_a_decode_step_asks_torch_for_nothing(
    model_type, dtype, checkpoint, open_session
):
    counts = []
    for num_layers in (2, 5):
        sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": num_layers}
        moe = {"moe_intermediate_size": 64} if model_type == "qwen3_moe" else {}
        model = load_checkpoint(checkpoint(model_type, **sizes, **moe), dtype=dtype)
        session = open_session(model)
        session.run(PROMPTS[0])
        session.run([5])  # Makes the buffers of a step of one token.
        with CountCalls() as calls:
            session.run([6])
        assert calls.names  # The embedding's, at least.
        counts.append(calls.names)
    assert counts[0] == counts[1]
