"""The latents (compressed KV of a token in a layer) that lie in a file: which rows are cached in
memory, and which are evicted for others.

A row is the latent of one token in one layer. Rows lie in the file by layer, block and place in the
block, so that whatever names blocks (a request's table, the prefix index) names them too. Slots in
memory hold the rows that steps wrote or chose lately, of all layers together. A slot that is wanted
for another row is taken at a random place: layers follow each other in a fixed order, in which the
row that was used longest ago is the next to be used.

A row that cannot be read, or that is not what was written, is never computed with: the step fails,
and ``take_lost_blocks`` names its block. One thread at a time; counters may be read from any.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tandem._native import KvPool
from tandem.core.errors import CorruptionError
from tandem.core.spec import MlaLayout
from tandem.kernels.cpu.device import CPU
from tandem.kernels.latents.file import RowFile
from tandem.kernels.native import TORCH_DTYPES, view_tensor

__all__ = ["LatentCounters", "LatentTier", "count_row_bytes"]

_WORDS = (np.uint32, np.uint8, np.uint16, np.uint8)
"""Widest unsigned integer type into which the bytes of a row divide evenly, by the row's bytes
modulo 4.
"""
SCALE_BYTES = 2
MIN_SEARCHED = 4096
"""Least number of memory slots that are examined to find the ones whose latents are evicted."""


def count_row_bytes(layout: MlaLayout) -> int:
    """Return the bytes of one token's latent in one layer, its scale included."""
    return layout.row_size * layout.item_bytes + (SCALE_BYTES if layout.is_coded else 0)


@dataclass(slots=True)
class LatentCounters:
    """Counts of rows (latents of a token in a layer) that attention read, over all layers and
    steps.
    """

    chosen: int = 0
    """Rows that a layer's tokens attended to, each once a layer and step, but for those that the
    step itself computed.
    """
    hits: int = 0
    """Rows counted in ``chosen`` that were in memory, and not only in the file."""


class LatentTier:
    """Latents of a pool's blocks in a file, some of them in memory.

    Args:
        layout: of the blocks.
        num_blocks: blocks of the pool.
        folder: folder of the file.
        memory_bytes: memory for rows; at least ``count_row_bytes``.

    Raises: as ``RowFile``.
    """

    def __init__(
        self, layout: MlaLayout, num_blocks: int, *, folder: Path, memory_bytes: int
    ) -> None:
        self.row_bytes = count_row_bytes(layout)
        self.num_slots = memory_bytes // self.row_bytes
        assert self.num_slots > 0, memory_bytes
        self.rows_per_layer = num_blocks * layout.block_size
        """Number of latent rows of a layer, one for each token place of the pool; row r of layer l
        has the number ``l * rows_per_layer + r``.
        """
        self._block_size = layout.block_size
        self._num_layers = layout.num_layers
        num_rows = layout.num_layers * self.rows_per_layer
        self.file = RowFile(folder, num_rows, self.row_bytes)
        tensor = CPU.allocate(self.num_slots * self.row_bytes)
        self.memory = tensor.numpy().reshape(self.num_slots, self.row_bytes)
        """Memory for the cached latents, one slot (row of bytes) for each; uint8 [num_slots,
        row_bytes].
        """
        format_name = layout.dtype if layout.is_coded else ""
        if not layout.is_coded:
            tensor = tensor.view(TORCH_DTYPES[layout.dtype])
        slots = view_tensor(tensor.view(self.num_slots, -1))
        self.pool = KvPool.placed(slots, format_name, 1, layout.row_size, layout.kv_lora_rank, [0])
        """The same memory as attention reads it: a pool of blocks of one token and one layer."""
        # 0 means that a row is not in memory, so slots count from 1 here: the system gives zeroed
        # pages only as they are touched, whereas filling the array with -1 would take all its
        # memory.
        self._slots = np.zeros(num_rows, np.int32)
        """Memory slot of each latent row, plus 1; 0 if the row is only in the file."""
        self._sums = np.zeros(num_rows, np.uint32)
        """Checksum of each latent row as written to the file."""
        words = np.dtype(_WORDS[self.row_bytes % 4])
        self._random = np.random.default_rng(0)
        shape = self.row_bytes // words.itemsize
        self._word_type = words
        self._factors = self._random.integers(0, 1 << 64, shape, np.uint64) | np.uint64(1)
        """Odd random factors, one for each word of a row, by which the words are multiplied in the
        row's checksum.
        """
        self._rows = np.full(self.num_slots, -1, np.int64)
        """Number of the latent row that each memory slot holds; -1 if it holds none."""
        self._uses = np.zeros(self.num_slots, np.int64)
        """For each memory slot: the number of the last call of ``place`` that used its row."""
        self._is_wanted = np.zeros(self.num_slots, np.bool_)
        """For each memory slot: True if its row was used again since the search for slots to evict
        last passed over it (clock eviction).
        """
        self._num_uses = 0
        self._lost: set[int] = set()
        self.counters = LatentCounters()

    def take_lost_blocks(self) -> frozenset[int]:
        """Return the KV blocks of which some latents could not be read since the last call; each is
        told once.
        """
        lost, self._lost = frozenset(self._lost), set()
        return lost

    def place(self, rows: NDArray[np.int64], is_new: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Bring rows (latents of a token in a layer) to memory; return their slots there, which
        stay until the next call.

        Args:
            rows: numbers of rows, each once, at most ``num_slots``.
            is_new: True for rows that the caller writes: they are not read.

        Raises: the first error of the reads; InternalError (the disk fails).
        """
        self._num_uses += 1
        slots = self._slots[rows].astype(np.int64) - 1
        missing = np.flatnonzero(slots < 0)
        known = slots[slots >= 0]
        self._uses[known] = self._num_uses
        self._is_wanted[known] = True
        num_new = int(np.count_nonzero(is_new))
        self.counters.chosen += len(rows) - num_new
        self.counters.hits += len(rows) - num_new
        if not len(missing):
            return slots
        self.counters.hits -= int(np.count_nonzero(~is_new[missing]))
        missing = missing[np.argsort(rows[missing])]
        slots[missing] = taken = self._take_slots(len(missing))
        self._read(rows[missing], taken, is_new[missing])
        self._slots[rows[missing]] = taken + 1
        self._rows[taken] = rows[missing]
        return slots

    def write(self, rows: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """Write rows (latents of a token in a layer) from their places in memory to the file.
        Raises: InternalError (the disk fails).
        """
        order = np.argsort(rows)
        rows, data = rows[order], self.memory[slots[order]]
        self._sums[rows] = self._sum_rows(data)
        self.file.write(rows, data)

    def copy_block(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the latents of a block's first tokens to another block, in all layers.

        Raises: as ``place``.
        """
        size, steps = self._block_size, max(1, self.num_slots // 2)
        for layer in range(self._num_layers):
            base = layer * self.rows_per_layer
            for first in range(0, num_tokens, steps):
                offsets = np.arange(first, min(first + steps, num_tokens)) + base
                rows = np.concatenate((offsets + source * size, offsets + target * size))
                is_new = np.arange(len(rows)) >= len(offsets)
                sources, targets = np.split(self.place(rows, is_new), 2)
                self.memory[targets] = self.memory[sources]
                self.write(rows[is_new], targets)

    def _read(
        self, rows: NDArray[np.int64], slots: NDArray[np.int64], is_new: NDArray[np.bool_]
    ) -> None:
        reading = np.flatnonzero(~is_new)
        if not len(reading):
            return
        data = np.empty((len(reading), self.row_bytes), np.uint8)
        failed = self.file.read(rows[reading], data)
        failure = self.file.failure
        if failure is None:
            failed = np.flatnonzero(self._sum_rows(data) != self._sums[rows[reading]])
            what = f"{len(failed)} latents are not what was written: replace the disk"
            failure = CorruptionError("kernels.read_latents", what)
        if len(failed):
            lost = rows[reading][failed] % self.rows_per_layer // self._block_size
            self._lost.update(lost.tolist())
            raise failure
        self.memory[slots[reading]] = data

    def _sum_rows(self, data: NDArray[np.uint8]) -> NDArray[np.uint32]:
        """Return a checksum of each row (a latent): the upper half of a sum of products, modulo
        2^64.
        """
        sums = data.view(self._word_type).astype(np.uint64) @ self._factors
        return (sums >> np.uint64(32)).astype(np.uint32)

    def _take_slots(self, count: int) -> NDArray[np.int64]:
        """Return places in memory that the current call does not use; the rows (latents) that they
        hold leave memory.
        """
        total = self.num_slots
        begin = int(self._random.integers(total))
        near = (begin + np.arange(min(total, max(4 * count, MIN_SEARCHED)))) % total
        is_free = (self._uses[near] < self._num_uses) & ~self._is_wanted[near]
        taken = near[is_free][:count]
        if len(taken) < count:
            self._is_wanted[near] = False
            self._uses[taken] = self._num_uses
            others = np.flatnonzero(self._uses < self._num_uses)
            others = np.roll(others, -int(np.searchsorted(others, begin)))
            taken = np.concatenate((taken, others[: count - len(taken)]))
        assert len(taken) == count, f"{count} rows for {total} slots"
        old = self._rows[taken]
        self._slots[old[old >= 0]] = 0
        self._rows[taken] = -1
        self._uses[taken] = self._num_uses
        return taken
