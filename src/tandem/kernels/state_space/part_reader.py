"""Reading of some rows of the checkpoint's matrices as if they were whole matrices."""

import torch
from torch import Tensor

from tandem.kernels.interfaces import Shard, WeightReader
from tandem.kernels.weights.blocks import CodedMatrix
from tandem.kernels.weights.formats import BLOCK_ROWS, WeightFormat

__all__ = ["PartReader"]


class PartReader:
    """A ``WeightReader`` that returns only rows [begin, end) of every weight.

    Args:
        reader: reads the whole weights.
        begin: first row.
        end: one past the last row.
        size: number of rows of each whole weight.
    """

    def __init__(self, reader: WeightReader, begin: int, end: int, size: int) -> None:
        self._reader = reader
        self._shard = Shard(0, begin, end, size)
        # Rows of quantized codes share scales within a block of rows, so codes can be cut at
        # boundaries of blocks only; otherwise they are decoded first.
        self._is_whole = begin % BLOCK_ROWS == 0 and (end % BLOCK_ROWS == 0 or end == size)
        self.dtype: torch.dtype = reader.dtype
        self.device: torch.device = reader.device
        self.execution = reader.execution

    def has(self, name: str) -> bool:
        """Return True if the checkpoint has the whole weight, of which rows are read."""
        return self._reader.has(name)

    def read_into(self, name: str, out: Tensor, shard: Shard | None = None) -> None:
        """Read rows [begin, end) of a weight, its own part, into ``out``."""
        assert shard is None, "a part of a part"
        self._reader.read_into(name, out, self._shard)

    def find_storage(self, name: str) -> str:
        """Return a description of how the checkpoint codes the whole weight; empty for plain
        values.
        """
        return self._reader.find_storage(name)

    def find_format(self, name: str) -> WeightFormat | None:
        """Return the weight's quantized format; None if the rows would split a block of codes."""
        return self._reader.find_format(name) if self._is_whole else None

    def read_packed(
        self, name: str, expert_id: int | None = None, shard: Shard | None = None
    ) -> CodedMatrix:
        """Return the codes of rows [begin, end) of a weight."""
        assert shard is None, "a part of a part"
        return self._reader.read_packed(name, expert_id, self._shard)

    def skip(self, prefix: str) -> None:
        """Mark the weights whose names start with a prefix as used, though they are not read."""
        self._reader.skip(prefix)
