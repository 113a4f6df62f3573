"""Goal: the gradients of the gated delta rule are right, so that LoRA may train around it.

Method: the native recurrence, both ways, against torch's own graph over the formula in float64, by
the length of each gradient; mutants of the gradients are further off. Threads and repetition change
no bit. Through the layer: the gradients of its rows against torch's formula.
"""

import pytest
import torch

from each import each
from tandem import _native
from tandem.kernels.cpu.delta_scan import NativeScan
from tandem.kernels.cpu.execution import CpuExecution
from tandem.kernels.gated_delta import GatedDeltaRows, GatedDeltaRule, StateSlots
from tandem.kernels.tolerance import ACCUMULATE_EPS
from tandem.kernels.torch.execution import TorchExecution
from tandem.kernels.torch.gated_delta import scan_tokens

SHAPES = {"odd": (1, 3, 5, 7), "narrow": (2, 4, 16, 40), "family": (1, 2, 128, 128)}
SHAPES |= {"odd items": (1, 3, 5, 7), "narrow items": (2, 4, 16, 40), "kimi": (2, 2, 128, 128)}
"""Key heads, value heads, sizes of their heads."""
BY_ITEM = ("odd items", "narrow items", "kimi")
"""Shapes whose items of a key decay apart."""
NAMES = ("queries", "keys", "values", "decays", "betas")


def draw_inputs(draw, shape, tokens):
    k_heads, v_heads, key, value = SHAPES[shape]
    f32 = {"dtype": torch.float32}
    q, k = (torch.nn.functional.normalize(draw(tokens, k_heads, key, **f32), dim=-1) for _ in "qk")
    state = draw(v_heads, -(-value // 32), key, 32, **f32)
    whole = state.transpose(1, 2).flatten(2)
    whole[..., value:] = 0
    state = whole.unflatten(-1, (-1, 32)).transpose(1, 2).contiguous()
    sizes = (v_heads, key) if shape in BY_ITEM else (v_heads,)
    decay = torch.sigmoid(draw(tokens, *sizes, **f32) + 2)
    beta = torch.sigmoid(draw(tokens, v_heads, **f32))
    return [q, k, draw(tokens, v_heads, value, **f32), decay, beta], state


def find_gradients(scan, inputs, state, d_out):
    leaves = [part.clone().requires_grad_() for part in inputs]
    out, last = scan(*leaves, state)
    return out.detach(), last.detach(), torch.autograd.grad((out * d_out).sum(), leaves)


def bound_length(tokens, key_dim):
    """Roundings relative to the whole: each token's sums, and those of all that it hands on."""
    return 8 * (tokens + key_dim) * ACCUMULATE_EPS


def find_far(got, want, bound):
    """Return the names of the parts that are further off than the bound."""
    return [
        name
        for name, one, other in zip(NAMES, got, want, strict=True)
        if not float((one.double() - other).norm()) <= bound * float(other.norm())
    ]


@each("shape", SHAPES)
@each("tokens", [1, 32, 75])
def test_native_scan(shape, tokens, draw):
    inputs, state = draw_inputs(draw, shape, tokens)
    d_out = draw(*inputs[2].shape, dtype=torch.float32)
    wide = [part.double() for part in inputs]
    out, last, want = find_gradients(scan_tokens, wide, state.double(), d_out.double())
    got_out, got_last, got = find_gradients(NativeScan(None), inputs, state, d_out)
    bound = bound_length(tokens, inputs[0].shape[-1])
    assert (got_out - out).norm() <= bound * out.norm()
    assert (got_last - last).norm() <= bound * last.norm()
    assert find_far(got, want, bound) == []


@each("shape", ["narrow", "narrow items"])
@each("isa", _native.kernel_isas())
def test_every_isa(isa, shape, draw):
    inputs, state = draw_inputs(draw, shape, 40)
    d_out = draw(*inputs[2].shape, dtype=torch.float32)
    wide = [part.double() for part in inputs]
    _, _, want = find_gradients(scan_tokens, wide, state.double(), d_out.double())
    _, k, v, decay, beta = inputs
    heads = (v.shape[0], v.shape[1], k.shape[2])
    grads = [torch.full(heads, torch.nan) for _ in range(2)]
    grads += [torch.full_like(part, torch.nan) for part in (v, decay, beta)]
    views = [_native.TensorView(part) for part in (*inputs, state, d_out, *grads)]
    _native.scan_delta_backward(*views, isa=isa)
    got = [grad.unflatten(1, (k.shape[1], -1)).sum(2) for grad in grads[:2]] + grads[2:]
    assert find_far(got, want, bound_length(40, k.shape[2])) == []


def test_mutants_are_far(draw):
    """Gradients of neighbouring inputs, which a wrong kernel might return, are beyond the bound."""
    inputs, state = draw_inputs(draw, "narrow", 40)
    d_out = draw(*inputs[2].shape, dtype=torch.float32)
    bound = bound_length(40, inputs[0].shape[-1])
    _, _, want = find_gradients(NativeScan(None), inputs, state, d_out)
    for name, changed in {
        "a state of zeros": (inputs, torch.zeros_like(state)),
        "the last token without decay": ([*inputs[:3], set_last(inputs[3], 1), inputs[4]], state),
        "the last token without update": ([*inputs[:4], set_last(inputs[4], 0)], state),
    }.items():
        _, _, got = find_gradients(NativeScan(None), *changed, d_out)
        assert find_far(got, [part.double() for part in want], bound), name


def set_last(x, value):
    x = x.clone()
    x[-1] = value
    return x


@pytest.mark.parametrize("shape", ["narrow", "narrow items"])
def test_threads_change_no_bit(shape, draw):
    inputs, state = draw_inputs(draw, shape, 75)
    d_out = draw(*inputs[2].shape, dtype=torch.float32)
    alone = find_gradients(NativeScan(None), inputs, state, d_out)
    pool = _native.ThreadPool(3, oversubscribe=True)
    together = find_gradients(NativeScan(pool), inputs, state, d_out)
    for one, other in zip((*alone[:2], *alone[2]), (*together[:2], *together[2]), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_a_layers_rows(dtype, draw):
    """Two sequences, trained at once: their gradients, outputs and slots are torch's."""
    f32 = {"dtype": torch.float32}
    rule = GatedDeltaRule(
        draw(4, 2 * 2 * 16 + 4 * 40, scale=0.5, **f32),
        draw(4, **f32).exp(),
        draw(4, **f32) - 2,
        draw(40, **f32),
        num_k_heads=2,
        key_dim=16,
        norm_eps=1e-6,
    )
    sizes = (rule.num_channels, 160, 4, 4)
    leaves = [draw(50, size, dtype=dtype).requires_grad_() for size in sizes]
    d_out = draw(50, 160, dtype=dtype)
    found = []
    for execution in (CpuExecution(), TorchExecution()):
        slots = StateSlots.allocate(rule, 2, dtype)
        rows = GatedDeltaRows(*leaves, [0, 37, 50], [1, 0])
        out = execution.gated_delta(rule, rows, slots)
        grads = torch.autograd.grad((out * d_out).sum(), leaves)
        found.append([out.detach(), slots.states.tensor, *grads])
    for got, want in zip(*found, strict=True):
        # In bfloat16 both round the same few times, from sums in other orders.
        share = 2**-7 if got.dtype == torch.bfloat16 else bound_length(50, 16)
        assert (got.double() - want.double()).norm() <= share * want.double().norm()
    with torch.no_grad():
        served = CpuExecution().gated_delta(
            rule, GatedDeltaRows(*leaves, [0, 37, 50], [1, 0]), StateSlots.allocate(rule, 2, dtype)
        )
    assert (served.double() - found[0][0].double()).norm() <= 2**-7 * served.double().norm()
