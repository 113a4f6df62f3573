"""Goal: experts that come to a device are the same weights, in every format, and sum to the same.

Method: numbers of unpacked experts beside the float64 oracle of the format; sums of packed ones
bitwise those of experts in place, from places in any order; outputs that come apart summed beside
the native sum.
"""

import numpy as np
import pytest
import torch

from each import each
from tandem._native import ThreadPool
from tandem.core.model.layers import SILU, ExpertsSpec
from tandem.kernels.cpu.device import CPU
from tandem.kernels.cpu.experts import NativeExperts, PackedExperts
from tandem.kernels.lanes import loads as loads_module
from tandem.kernels.lanes.loads import PackedLoads, UnpackedLoads
from tandem.kernels.lanes.pairs import sum_pairs
from tandem.kernels.native import Buffer
from tandem.kernels.oracles.packed import decode
from tandem.kernels.weights.formats import WEIGHT_FORMATS

EXPERTS, HIDDEN, INNER, TOP_K, TOKENS = 6, 256, 128, 3, 5
FORMATS = [name for name, held in WEIGHT_FORMATS.items() if not held.is_stored_only]
POOL = ThreadPool(1)


def make(name, inner=INNER):
    chance = torch.Generator().manual_seed(5)
    gate_up = torch.randn(EXPERTS, 2 * inner, HIDDEN, generator=chance) * 0.1
    down = torch.randn(EXPERTS, HIDDEN, inner, generator=chance) * 0.1
    weight_format = WEIGHT_FORMATS[name]
    spec = ExpertsSpec(
        num_experts=EXPERTS, hidden_size=HIDDEN, intermediate_size=inner, activation=SILU
    )
    native = NativeExperts(spec, weight_format=weight_format, pool=POOL)
    native.take(PackedExperts.pack(weight_format, gate_up, down, pool=POOL))
    return native, gate_up, down


def choose(seed=7):
    chance = torch.Generator().manual_seed(seed)
    x = torch.randn(TOKENS, HIDDEN, generator=chance)
    ids = torch.stack([torch.randperm(EXPERTS, generator=chance)[:TOP_K] for _ in range(TOKENS)])
    return x, ids, torch.rand(TOKENS, TOP_K, generator=chance)


@each("inner", [INNER, 96])
@each("name", FORMATS)
def test_unpacked_experts_are_the_numbers_of_the_format(name, inner):
    size = WEIGHT_FORMATS[name].group_size
    if inner % max(size, 1) and WEIGHT_FORMATS[name].is_integer:
        pytest.skip("no whole groups")
    native, gate_up, down = make(name, inner)
    loads = UnpackedLoads(native, POOL, CPU)
    place = torch.zeros(loads.expert_bytes, dtype=torch.uint8)
    weight_format = WEIGHT_FORMATS[name]
    for expert_id in (0, EXPERTS - 1):
        loads.stage(expert_id, place)
        found_gate_up, found_down = loads._view(place, 0)
        halves = (gate_up[expert_id, :inner], gate_up[expert_id, inner:])
        wanted = np.concatenate([decode(half.numpy(), weight_format) for half in halves])
        tolerance = 0.0 if loads.dtype == torch.float32 else 2**-8
        np.testing.assert_allclose(found_gate_up.double().numpy(), wanted, rtol=tolerance)
        wanted = decode(down[expert_id].numpy(), weight_format)
        np.testing.assert_allclose(found_down.double().numpy(), wanted, rtol=tolerance)


@each("name", ["bf16", "int4g32", "mxfp4", "int8row"])
def test_packed_experts_sum_bitwise_range_by_range(name):
    native, *_ = make(name)
    loads, (x, ids, weights) = PackedLoads(native, POOL), choose()
    wanted = native._experts.forward(x, ids, weights)
    for step in (1, 4, EXPERTS):
        total = loads.begin_sum(x, ids, weights)
        for first in range(0, EXPERTS, step):
            end = min(first + step, EXPERTS)
            memory = torch.zeros(step * loads.expert_bytes, dtype=torch.uint8)
            for place, expert_id in enumerate(range(first, end)):
                at = place * loads.expert_bytes
                loads.stage(expert_id, memory[at : at + loads.expert_bytes])
            total.add(memory, first, end)
        assert torch.equal(total.take(), wanted)


@each("name", ["bf16", "int4g32"])
@each("uploaded", [[], [4], [5, 0], [0, 1, 2, 3, 4, 5]])
def test_outputs_that_come_apart_sum_to_the_same_bits(name, uploaded):
    native, *_ = make(name)
    loads, (x, ids, weights) = PackedLoads(native, POOL), choose()
    wanted = native._experts.forward(x, ids, weights)
    owners = torch.full((8,), -1, dtype=torch.int64)
    memory = torch.zeros(8 * loads.expert_bytes, dtype=torch.uint8)
    for place, expert_id in enumerate(uploaded, 1):
        owners[place] = expert_id
        at = place * loads.expert_bytes
        loads.stage(expert_id, memory[at : at + loads.expert_bytes])
    is_uploaded = torch.isin(ids, torch.tensor(uploaded, dtype=torch.int64))
    there = torch.empty(TOKENS, TOP_K, HIDDEN)
    loads.run_pairs(x, ids.masked_fill(~is_uploaded, -1), owners, memory, there)
    here = torch.empty(TOKENS * TOP_K, HIDDEN)
    host_ids = ids.masked_fill(is_uploaded, -1).view(-1, 1)
    ones = torch.ones(TOKENS * TOP_K, 1)
    native.run(*map(Buffer, (x.repeat_interleave(TOP_K, 0), host_ids, ones, here)))
    assert torch.equal(sum_pairs(ids, weights, there + here.view_as(there)), wanted)


def test_unpacked_experts_compute_what_packed_ones_do_to_bf16():
    native, *_ = make("int8g32")
    loads, (x, ids, weights) = UnpackedLoads(native, POOL, CPU), choose()
    wanted = native._experts.forward(x, ids, weights)
    size = loads.expert_bytes
    memory = torch.zeros(EXPERTS * size, dtype=torch.uint8)
    for expert_id in range(EXPERTS):
        loads.stage(expert_id, memory[expert_id * size :][:size])
    total = loads.begin_sum(x, ids, weights)
    total.add(memory, 0, EXPERTS)
    outputs = torch.empty(TOKENS, TOP_K, HIDDEN)
    loads.run_pairs(x, ids, torch.arange(EXPERTS), memory, outputs)
    for found in (total.take(), sum_pairs(ids, weights, outputs)):
        error = (found - wanted).norm() / wanted.norm()
        assert error < 0.02, error


@pytest.mark.parametrize("name", ["f32", "int8g32"])
def test_experts_that_are_gathered_give_what_they_give_in_place(name, monkeypatch):
    native, *_ = make(name)
    loads, (x, ids, _) = UnpackedLoads(native, POOL, CPU), choose()
    if name == "f32":  # As of experts with biases.
        loads._biases = (torch.randn(EXPERTS, 2 * INNER), torch.randn(EXPERTS, HIDDEN))
    size, places = loads.expert_bytes, 3 * EXPERTS
    memory = torch.zeros(places * size, dtype=torch.uint8)
    owners = torch.full((places,), -1)
    for expert_id in range(1, EXPERTS):  # One of them is nowhere.
        place = 17 - 2 * expert_id
        owners[place] = expert_id
        loads.stage(expert_id, memory[place * size :][:size])
    ids = ids.masked_fill(ids == 0, -1)
    found = [torch.empty(TOKENS, TOP_K, HIDDEN) for _ in range(2)]
    for cost, out in zip((places, 0), found, strict=True):
        monkeypatch.setattr(loads_module, "GATHERED_COST", cost)
        loads.run_pairs(x, ids, owners, memory, out)
    assert (found[0][ids < 0] == 0).all()
    assert (found[1][ids < 0] == 0).all()
    error = (found[0] - found[1]).norm() / found[0].norm()
    assert error < (1e-6 if name == "f32" else 4e-3), error


def test_a_product_and_a_sum_are_rounded_once():
    """Beside exact rational arithmetic; a sum that rounds twice fails for some of these."""
    from fractions import Fraction

    chance = torch.Generator().manual_seed(1)
    count = 20_000
    w, y = torch.rand(count, generator=chance), torch.randn(count, generator=chance)
    known = torch.randn(count, generator=chance) * 2.0 ** torch.randint(
        -30, 3, (count,), generator=chance
    )
    ids = torch.zeros(count, 1, dtype=torch.int64)
    outputs = torch.stack([known, y], 1)[..., None]
    pair_ids = torch.cat([ids, ids + 1], 1)
    weights = torch.stack([torch.ones(count), w], 1)
    found = sum_pairs(pair_ids, weights, outputs)[:, 0]
    for i in range(0, count, 10):
        exact = Fraction(known[i].item()) + Fraction(w[i].item()) * Fraction(y[i].item())
        low = np.float32(float(exact))
        near = min(
            (low, np.nextafter(low, np.float32(-9)), np.nextafter(low, np.float32(9))),
            key=lambda v: abs(Fraction(float(v)) - exact),
        )
        assert abs(Fraction(found[i].item()) - exact) == abs(Fraction(float(near)) - exact)
