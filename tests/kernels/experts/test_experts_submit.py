"""Goal: experts that are submitted and waited for give the bits of ``forward``, in the background.

Method: results compared bitwise for both kinds of experts; a stand-in for the native bank that a
test holds up shows that the caller goes on meanwhile.
"""

import os
import threading

import pytest
import torch

from each import each
from tandem._native import ThreadPool
from tandem.core.errors import ConflictError, DeadlineError, ShapeError
from tandem.core.model.layers import ExpertsSpec
from tandem.kernels.cpu.experts import NativeExperts
from tandem.kernels.torch.experts import Experts
from tandem.kernels.weights.formats import WEIGHT_FORMATS

NUM_EXPERTS, HIDDEN, INNER, TOP_K = 6, 128, 64, 3
TIMEOUT_S = 60


@pytest.fixture(scope="module")
def pool():
    return ThreadPool(2, oversubscribe=True)


@pytest.fixture(params=["tensors", "bf16", "int8g32", "mxfp4"])
def kind(request):
    return request.param


@pytest.fixture
def load(pool, make_reader, draw):
    def load_kind(kind, dtype):
        tensors = {
            "x.gate_up_proj": draw(NUM_EXPERTS, 2 * INNER, HIDDEN, dtype=dtype),
            "x.down_proj": draw(NUM_EXPERTS, HIDDEN, INNER, dtype=dtype),
        }
        spec = ExpertsSpec(num_experts=NUM_EXPERTS, hidden_size=HIDDEN, intermediate_size=INNER)
        if kind == "tensors":
            experts = Experts(spec)
        else:
            weight_format = WEIGHT_FORMATS[kind]
            experts = NativeExperts(spec, weight_format=weight_format, pool=pool)
        experts.load(make_reader(tensors, dtype), "x")
        return experts

    return load_kind


def draw_batch(tokens, dtype, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
    ids = torch.rand(tokens, NUM_EXPERTS, generator=generator).topk(TOP_K).indices
    ids[::3, 1] = -1
    return x, ids, torch.rand(tokens, TOP_K, generator=generator)


@each("dtype", [torch.float32, torch.bfloat16])
def test_bits_are_those_of_forward(kind, dtype, load):
    experts = load(kind, dtype)
    for tokens in (0, 1, 5, 70):
        batch = draw_batch(tokens, dtype)
        got = experts.submit(*batch).wait(TIMEOUT_S)
        assert got.dtype == dtype
        assert torch.equal(got, experts(*batch))


def test_bits_are_those_of_forward_in_inference_mode(load):
    experts = load("int8g32", torch.bfloat16)
    batch = draw_batch(9, torch.bfloat16)
    expected = experts(*batch)
    with torch.inference_mode():
        batch = draw_batch(9, torch.bfloat16)
        assert torch.equal(experts.submit(*batch).wait(TIMEOUT_S), expected)


def test_many_at_once_waited_for_in_any_order(kind, load):
    experts = [load(kind, torch.float32) for _ in range(3)]
    batches = [draw_batch(tokens, torch.float32, tokens) for tokens in (1, 40, 3, 17)]
    pairs = [(e, batch) for e in experts for batch in batches]
    pending = [e.submit(*batch) for e, batch in pairs]
    own = [e(*batch) for e, batch in pairs]  # The pool serves its caller meanwhile.
    for handle, want in reversed(list(zip(pending, own, strict=True))):
        assert torch.equal(handle.wait(TIMEOUT_S), want)


class HeldUp:
    """A bank whose ``forward`` begins when it is let."""

    def __init__(self, bank):
        self.bank = bank
        self.started, self.may_go = threading.Event(), threading.Event()

    def forward(self, *args):
        self.started.set()
        assert self.may_go.wait(TIMEOUT_S)
        self.bank.forward(*args)

    def __getattr__(self, name):
        return getattr(self.bank, name)


@pytest.fixture
def held_up(load, monkeypatch):
    """Native experts whose bank waits for the test; let go at the end whatever happens."""
    experts = load("int8g32", torch.float32)
    bank = HeldUp(experts._experts._bank)
    monkeypatch.setattr(experts._experts, "_bank", bank)
    yield experts, bank
    bank.may_go.set()


def test_the_caller_goes_on_meanwhile(held_up):
    experts, bank = held_up
    batch = draw_batch(5, torch.float32)
    pending = experts.submit(*batch)
    assert bank.started.wait(TIMEOUT_S)
    bank.may_go.set()
    assert torch.equal(pending.wait(TIMEOUT_S), experts(*batch))


def test_a_wait_ends_at_its_deadline_and_may_be_repeated(held_up):
    experts, bank = held_up
    batch = draw_batch(5, torch.float32)
    pending = experts.submit(*batch)
    with pytest.raises(DeadlineError, match="not computed within 0"):
        pending.wait(0)
    bank.may_go.set()
    assert torch.equal(pending.wait(TIMEOUT_S), experts(*batch))


def test_wrong_input_is_told_by_the_wait(load):
    experts = load("int8g32", torch.float32)
    x, ids, weights = draw_batch(5, torch.float32)
    pending = experts.submit(x, ids + NUM_EXPERTS, weights)
    with pytest.raises(ShapeError, match="expert"):
        pending.wait(TIMEOUT_S)
    assert torch.equal(experts.submit(x, ids, weights).wait(TIMEOUT_S), experts(x, ids, weights))


def test_a_forked_child_is_refused_and_does_not_hang(load):
    """The child has neither the pool's threads nor the one that submits."""
    experts = load("int8g32", torch.float32)
    batch = draw_batch(5, torch.float32)
    experts.submit(*batch).wait(TIMEOUT_S)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            experts.submit(*batch).wait(TIMEOUT_S)
        except ConflictError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
