"""Goal: adapters' products at fixed addresses are those of each row's own factors.

Method: random factors of unlike ranks, of a matrix in two ranges of outputs and of heads, against
the same sums in float64; then more adapters and larger ranks, for which the memory moves.
"""

import pytest
import torch
from torch import nn

from tandem.kernels.interfaces import LoraPart
from tandem.kernels.operators.lora import AdaptedMatrix, StepAdapters
from tandem.kernels.torch.factors import NO_PLACE, FixedFactors
from tandem.kernels.weights.matrix import TensorMatrix

K, N, SCALE = 24, 20, 0.7


def make_parts(heads, rank, seed):
    """Factors of every head but the last; of a single head, for two ranges of its outputs."""
    random = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=random)

    if heads == 1:
        return [
            LoraPart(draw(rank, K), draw(7, rank), SCALE),
            LoraPart(draw(rank + 1, K), draw(5, rank + 1), 2 * SCALE, first_output=11),
        ]
    return [LoraPart(draw(rank, K), draw(N, rank), SCALE, head=h) for h in range(heads - 1)]


def compute(x_THK, places, parts_by_place, shape):
    out = torch.zeros(shape, dtype=torch.float64)
    for row, place in enumerate(places):
        for part in parts_by_place.get(place, ()):
            low = part.a_RK.double() @ x_THK[row, part.head].double() * part.scale
            end = part.first_output + len(part.b_NR)
            out[row, part.head, part.first_output : end] += part.b_NR.double() @ low
    return out


@pytest.mark.parametrize("heads", [1, 3])
def test_each_row_gets_its_own_product(heads):
    factors, held = FixedFactors(heads, N), {}
    x_THK = torch.randn(6, heads, K, generator=torch.Generator().manual_seed(9))

    def check(places):
        sums = torch.ones(6, heads, N)
        factors.add_(sums, x_THK, torch.tensor(places))
        want = 1 + compute(x_THK, places, held, sums.shape)
        torch.testing.assert_close(sums.double(), want, rtol=1e-5, atol=1e-4)
        assert not bool((want == 1).all())
        return sums

    def put(place, rank):
        held[place] = make_parts(heads, rank, seed=place + rank)
        return factors.put(place, held[place])

    assert put(1, 3)
    before = check([1, NO_PLACE, 1, 1, NO_PLACE, 1])
    assert torch.equal(before[1], torch.ones(heads, N)), "a row without an adapter changed"
    # More places, then another adapter in the same memory, then a rank that it has no room for.
    assert put(2, 2)
    check([2, NO_PLACE, 1, 2, 1, 2])
    assert not put(2, 1)
    check([2, NO_PLACE, 1, 2, 1, 2])
    assert put(1, 9)
    check([2, NO_PLACE, 1, 2, 1, 2])
    # An adapter that leaves this matrix alone, in a place with memory and in one without.
    held[2] = ()
    assert not factors.put(2, ())
    assert not factors.put(40, ())
    assert torch.equal(check([2, NO_PLACE, 1, 40, 1, 2])[3], torch.ones(heads, N))


def test_steps_of_one_layout_use_one_memory_whatever_their_adapters():
    """Slots are emptied and given to others; a layout that a larger rank replaces never returns."""
    step = StepAdapters(3, is_native=False)
    weight = nn.Parameter(torch.randn(N, K, generator=torch.Generator().manual_seed(1)))
    matrix = AdaptedMatrix(TensorMatrix(weight), step)
    x_TK = torch.randn(3, K, generator=torch.Generator().manual_seed(2))
    layouts, seen = [], []

    def run(rows_by_slot):
        step.begin(3, rows_by_slot)
        with torch.inference_mode():
            want = matrix.forward(x_TK, dtype=torch.float32)
            layouts.append(step.fix(4))
            assert step.places is not None
            # The padding row repeats the first one.
            got = matrix.forward(torch.cat((x_TK, x_TK[:1])), dtype=torch.float32)
            seen.append(step.places.data_ptr())
            step.end()
            # A step that is not captured has the same bits once the factors have moved.
            step.begin(3, rows_by_slot)
            assert torch.equal(matrix.forward(x_TK, dtype=torch.float32), want)
        step.end()
        torch.testing.assert_close(got[:3], want, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(got[3], got[0])
        return want

    for slot in (0, 1):
        matrix.add_parts(slot, make_parts(1, 2, seed=slot))
    first = run({0: [0], 1: [2]})
    run({0: [1, 2]})
    assert not torch.equal(run({1: [0], 0: [2]}), first)
    step.empty(0)
    matrix.add_parts(0, make_parts(1, 1, seed=7))
    assert not torch.equal(run({0: [0], 1: [2]}), first)
    assert len(set(layouts)) == len(set(seen)) == 1
    step.empty(1)
    matrix.add_parts(1, make_parts(1, 20, seed=8))
    run({0: [0], 1: [2]})
    # A slot that was emptied for good, and an adapter that leaves the matrix alone.
    step.empty(0)
    run({1: [1]})
    run({0: [0], 1: [2]})
    assert layouts[-1] == layouts[-2] == layouts[-3] > layouts[0]


def test_a_layout_changes_though_a_later_matrix_finds_no_memory(monkeypatch):
    """Otherwise a graph would read what the first matrix had before; the factors are not lost."""
    step = StepAdapters(2, is_native=False)
    weight = nn.Parameter(torch.randn(N, K, generator=torch.Generator().manual_seed(1)))
    matrices = [AdaptedMatrix(TensorMatrix(weight), step) for _ in range(2)]
    x_TK = torch.randn(1, K, generator=torch.Generator().manual_seed(2))

    def run(slot):
        step.begin(1, {slot: [0]})
        layout = step.fix(1)
        found = [matrix.forward(x_TK, dtype=torch.float32) for matrix in matrices]
        step.end()
        return layout, found

    for slot, rank in ((0, 2), (1, 9)):
        for matrix in matrices:
            matrix.add_parts(slot, make_parts(1, rank, seed=slot))
    with torch.inference_mode():
        before, _ = run(0)
        with monkeypatch.context() as patch:
            patch.setattr(matrices[1], "place", lambda *_: (_ for _ in ()).throw(MemoryError))
            with pytest.raises(MemoryError):
                run(1)
        step.end()
        after, (first, second) = run(1)
    assert after > before + 1, "the first matrix has moved, and then the second"
    assert torch.equal(first, second)
