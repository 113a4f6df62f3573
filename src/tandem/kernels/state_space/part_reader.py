"""Reading some rows of a matrix of the checkpoint as if they were all of it."""

import torch
from torch import Tensor

from tandem.kernels.interfaces import Shard, WeightReader
from tandem.kernels.weights.blocks import CodedMatrix
from tandem.kernels.weights.formats import BLOCK_ROWS, WeightFormat

__all__ = ["PartReader"]


class PartReader:
    """A ``WeightReader`` that gives rows [begin, end) of every weight.

    Args:
        reader: has the weights.
        begin: first row.
        end: one past the last.
        size: rows that a weight has.
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
        """See ``WeightReader``."""
        return self._reader.has(name)

    def read_into(self, name: str, out: Tensor, shard: Shard | None = None) -> None:
        """See ``WeightReader``."""
        assert shard is None, "a part of a part"
        self._reader.read_into(name, out, self._shard)

    def find_storage(self, name: str) -> str:
        """See ``WeightReader``."""
        return self._reader.find_storage(name)

    def find_format(self, name: str) -> WeightFormat | None:
        """See ``WeightReader``."""
        return self._reader.find_format(name) if self._is_whole else None

    def read_packed(
        self, name: str, expert_id: int | None = None, shard: Shard | None = None
    ) -> CodedMatrix:
        """See ``WeightReader``."""
        assert shard is None, "a part of a part"
        return self._reader.read_packed(name, expert_id, self._shard)

    def skip(self, prefix: str) -> None:
        """See ``WeightReader``."""
        self._reader.skip(prefix)
