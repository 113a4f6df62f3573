"""Products of LoRA adapters in torch at fixed memory addresses, for captured decode steps.

A graph must not depend on which adapters a batch has. So a matrix keeps the factors of all adapters
in one tensor, in places of equal rank, and each row gathers the factors of its own place; place 0
holds zeros, for rows without an adapter. Ranks are padded with zeros to a power of two.

Shapes: T rows, H heads (1 if a matrix has none), K inputs, N outputs, R padded rank, P places.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.kernels.interfaces import LoraPart

__all__ = ["NO_PLACE", "FixedFactors", "count_fixed_bytes"]

NO_PLACE = 0
"""Place 0 of the factors, used by rows without an adapter; its factors are zeros, so their product
adds nothing.
"""


class _Held(NamedTuple):
    """Position of the factors of a ``LoraPart`` in a place."""

    head: int
    ranks: slice
    outputs: slice
    scale: float


class FixedFactors:
    """LoRA factors of a matrix's adapters by place (an adapter's index here), at addresses that
    only ``put`` moves, as captured graphs need.

    Args:
        num_heads: H.
        out_features: N.
    """

    def __init__(self, num_heads: int, out_features: int) -> None:
        self._num_heads, self._out_features = num_heads, out_features
        self._a_PHRK = self._b_PHRN = self._scale_PHR = torch.empty(0)
        self._held: dict[int, list[_Held]] = {}
        """Parts of the adapter in each place, in the order in which they were put there."""

    def put(self, place: int, parts: Sequence[LoraPart]) -> bool:
        """Copy an adapter's factors to a place; return True if the memory moved to make room.

        Parts of one head lie one after the other along the rank, each with zeros for the outputs of
        the others. No part: zeros, as if rows had no adapter.
        """
        ranks = [0] * self._num_heads
        for part in parts:
            ranks[part.head] += len(part.a_RK)
        is_moved = bool(parts) and self._reserve(place + 1, max(ranks), parts[0].a_RK)
        self._held[place] = held = []
        if place >= len(self._a_PHRK):
            return is_moved
        for memory in (self._a_PHRK, self._b_PHRN, self._scale_PHR):
            memory[place] = 0
        firsts = [0] * self._num_heads
        for part in parts:
            rank, first = len(part.a_RK), firsts[part.head]
            rows = slice(first, first + rank)
            outputs = slice(part.first_output, part.first_output + len(part.b_NR))
            self._a_PHRK[place, part.head, rows] = part.a_RK
            self._b_PHRN[place, part.head, rows, outputs] = part.b_NR.t()
            self._scale_PHR[place, part.head, rows] = part.scale
            held.append(_Held(part.head, rows, outputs, part.scale))
            firsts[part.head] += rank
        return is_moved

    def list_parts(self, place: int) -> list[LoraPart]:
        """Return the factors that were put in a place, as views of this memory; B is not
        contiguous. They are valid until the next ``put``.
        """
        return [
            LoraPart(
                self._a_PHRK[place, held.head, held.ranks],
                self._b_PHRN[place, held.head, held.ranks, held.outputs].t(),
                held.scale,
                held.outputs.start,
                held.head,
            )
            for held in self._held.get(place, ())
        ]

    def add_(self, sums_THN: Tensor, x_THK: Tensor, places_T: Tensor) -> None:
        """Add each row's product with the factors of its place to float32 sums, in place.

        No value is read and no shape depends on one, so the call can be captured.
        """
        # An adapter's place beyond this matrix's memory means that the adapter does not change this
        # matrix; its rows take place 0, whose factors are zeros.
        places_T = places_T * (places_T < len(self._a_PHRK))
        a_THRK, b_THRN, scale_THR = (
            memory.index_select(0, places_T).float()
            for memory in (self._a_PHRK, self._b_PHRN, self._scale_PHR)
        )
        low_THR = torch.matmul(a_THRK, x_THK.float()[..., None])[..., 0] * scale_THR
        sums_THN += torch.matmul(low_THR[:, :, None], b_THRN)[:, :, 0]

    def _reserve(self, num_places: int, rank: int, like: Tensor) -> bool:
        """Make room for places of adapters and a rank, in powers of two; return True if the memory
        moved, which captured graphs do not survive.
        """
        held_places = len(self._a_PHRK)
        held_rank = self._a_PHRK.shape[2] if held_places else 0
        if num_places <= held_places and rank <= held_rank:
            return False
        places = max(held_places, _round_up(num_places))
        ranks = max(held_rank, _round_up(rank))
        shape = (places, self._num_heads, ranks)
        made = (
            like.new_zeros(*shape, like.shape[1]),
            like.new_zeros(*shape, self._out_features),
            like.new_zeros(*shape, dtype=torch.float32),
        )
        if held_places:
            for new, old in zip(made, (self._a_PHRK, self._b_PHRN, self._scale_PHR), strict=True):
                new[:held_places, :, :held_rank] = old
        self._a_PHRK, self._b_PHRN, self._scale_PHR = made
        return True


def count_fixed_bytes(
    num_places: int, rank: int, *, num_heads: int, in_features: int, out_features: int, item: int
) -> int:
    """Return the bytes that a ``FixedFactors`` allocates.

    Args:
        num_places: places in use, place 0 included.
        rank: largest sum of the ranks of an adapter's parts for one head.
        num_heads: H.
        in_features: K.
        out_features: N.
        item: bytes of an item of the factors.
    """
    padded = _round_up(num_places) * num_heads * _round_up(rank)
    return padded * ((in_features + out_features) * item + torch.float32.itemsize)


def _round_up(number: int) -> int:
    """Return the next power of two, the size to which memory grows, so that it moves rarely."""
    return 1 << (number - 1).bit_length()
