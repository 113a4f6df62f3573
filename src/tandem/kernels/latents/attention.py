"""Attention of a step whose latents lie in a file: the chosen rows are brought to memory by layer.

A step's tokens are computed in ranges, in order. The rows that a range's tokens chose are brought
to memory, its own rows are stored and written to the file, and its tokens attend. A range has as
many tokens as there is memory for their rows; results do not depend on that, as attention of a
token is bitwise the same in any company.

Shapes: T tokens, H heads, R rank of the latent, K items of a row, n chosen tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tandem import _native
from tandem.kernels.latents.tier import LatentTier
from tandem.kernels.native import view_tensor

__all__ = ["LatentStep"]


class LatentStep:
    """Attention of a step's sequences over latents that lie in a file."""

    def __init__(
        self,
        tier: LatentTier,
        block_table: NDArray[np.int64],
        query_start: Sequence[int],
        context_lens: Sequence[int],
        *,
        block_size: int,
        pool: _native.ThreadPool | None,
    ) -> None:
        self._tier = tier
        self._pool = pool
        self._query_start = tuple(query_start)
        self._context_lens = tuple(context_lens)
        offsets = np.arange(block_size)
        self._rows = [
            (blocks[: -(-length // block_size), None] * block_size + offsets).ravel()[:length]
            for blocks, length in zip(block_table, context_lens, strict=True)
        ]
        """For each sequence: the row number, within a layer, of the latent at each position."""
        # The table gives the slot of each position. Positions that no token of a range attends to
        # are never read, so any slot, such as 0, may stand there.
        self._table = np.zeros((len(context_lens), max(context_lens)), np.int64)

    def run(
        self,
        layer_idx: int,
        rows: Tensor,
        out: Tensor,
        chosen: Tensor,
        scale: float,
    ) -> None:
        """Store the step's latents and attend to the chosen ones.

        Args:
            layer_idx: index of the layer among those with latents.
            rows: queries, followed by the latent of each token, [T, H + 1, K].
            out: results [T, H, R], written.
            chosen: positions that each token attends to, ascending, int32 [T, n]; not read for
                tokens before position n, which attend to all.
            scale: on the products.

        Raises: as ``LatentTier.place`` and ``write``.
        """
        self._run(_Call(layer_idx, rows, out, chosen, scale), 0, len(rows))

    def _run(self, call: "_Call", first: int, end: int) -> None:
        parts = self._list_parts(first, end)
        positions = [self._list_positions(part, call.chosen) for part in parts]
        is_alone = end - first == 1
        if not is_alone and sum(map(len, positions)) > self._tier.num_slots:
            middle = (first + end) // 2
            self._run(call, first, middle)
            self._run(call, middle, end)
            return
        tier, base = self._tier, call.layer_idx * self._tier.rows_per_layer
        pairs = list(zip(parts, positions, strict=True))
        wanted = np.concatenate([base + self._rows[part.sequence][at] for part, at in pairs])
        is_new = np.concatenate([at >= part.start for part, at in pairs])
        slots = self._place(wanted, is_new, is_unique=len(pairs) == 1)
        begin = 0
        for (sequence, *_), at in pairs:
            self._table[sequence, at] = slots[begin : begin + len(at)]
            begin += len(at)
        sequences = [part.sequence for part in parts]
        plan = _native.PlannedAttention(
            tier.pool,
            self._table[sequences[0] : sequences[-1] + 1],
            [part.first - first for part in parts] + [end - first],
            [part.stop for part in parts],
            self._pool,
        )
        own, num_heads = view_tensor(call.rows[first:end]), call.out.shape[1]
        plan.store(0, own, num_heads)
        tier.write(wanted[is_new], slots[is_new])
        plan.attend(
            0,
            own,
            view_tensor(call.out[first:end]),
            call.scale,
            chosen=view_tensor(call.chosen[first:end]),
        )

    def _place(
        self, rows: NDArray[np.int64], is_new: NDArray[np.bool_], *, is_unique: bool
    ) -> NDArray[np.int64]:
        """Bring rows (latents) to memory; return their slots. Rows may repeat, as sequences may
        share blocks.
        """
        if is_unique:
            return self._tier.place(rows, is_new)
        unique, firsts, inverse = np.unique(rows, return_index=True, return_inverse=True)
        return self._tier.place(unique, is_new[firsts])[inverse]

    def _list_parts(self, first: int, end: int) -> list["_Part"]:
        """Return the sequences that have tokens in the step's range [first, end), each with those
        tokens.
        """
        parts: list[_Part] = []
        for sequence, length in enumerate(self._context_lens):
            begin, stop = self._query_start[sequence : sequence + 2]
            if begin < end and first < stop:
                position = length - stop
                own, last = max(first, begin), min(end, stop)
                parts.append(_Part(sequence, own, own + position, last + position))
        return parts

    def _list_positions(self, part: "_Part", chosen: Tensor) -> NDArray[np.int64]:
        """Return the positions of a sequence whose latents must be in memory: those that the part's
        tokens attend to, and their own, ascending.
        """
        first_chosen = chosen.shape[1]
        is_wanted = np.zeros(part.stop, np.bool_)
        is_wanted[part.start :] = True
        is_wanted[: min(part.stop, first_chosen)] |= part.start < first_chosen
        if part.stop > first_chosen:
            lists = chosen[part.first + max(0, first_chosen - part.start) :][
                : part.stop - max(part.start, first_chosen)
            ]
            is_wanted[lists.numpy().ravel()] = True
        return np.flatnonzero(is_wanted)


class _Call(NamedTuple):
    """The arguments of ``LatentStep.run``."""

    layer_idx: int
    rows: Tensor
    out: Tensor
    chosen: Tensor
    scale: float


class _Part(NamedTuple):
    """The tokens of one sequence that lie in a range of the step, which is attended at once."""

    sequence: int
    first: int
    """Index, among all tokens of the step, of the first token of the part."""
    start: int
    """Position of that first token in its sequence."""
    stop: int
    """Position after the last token of the part."""
