"""Checkpoints whose tensors have other names than the modules of transformers.

Mixtral's hub checkpoints, and those of families that follow it, call a MoE block
``block_sparse_moe`` and an expert's matrices ``w1``, ``w3`` and ``w2``.
"""

import re
from collections.abc import Iterable

import torch
from torch import Tensor

from tandem.kernels.interfaces import Shard, WeightReader
from tandem.kernels.weights.blocks import CodedMatrix
from tandem.kernels.weights.formats import WeightFormat

__all__ = ["RenamedReader", "rename_reader"]

BLOCK = ".block_sparse_moe."
_EXPERT = re.compile(r"(\.experts\.\d+\.)(gate|up|down)_proj\.")
_MATRICES = {"gate": "w1", "up": "w3", "down": "w2"}


class RenamedReader:
    """A ``WeightReader`` that is asked for modules of transformers and gives Mixtral's tensors."""

    def __init__(self, reader: WeightReader) -> None:
        self._reader = reader
        self.dtype: torch.dtype = reader.dtype
        self.device: torch.device = reader.device
        self.execution = reader.execution

    def has(self, name: str) -> bool:
        """See ``WeightReader``."""
        return self._reader.has(_rename(name))

    def read_into(self, name: str, out: Tensor, shard: Shard | None = None) -> None:
        """See ``WeightReader``."""
        self._reader.read_into(_rename(name), out, shard)

    def find_storage(self, name: str) -> str:
        """See ``WeightReader``."""
        return self._reader.find_storage(_rename(name))

    def find_format(self, name: str) -> WeightFormat | None:
        """See ``WeightReader``."""
        return self._reader.find_format(_rename(name))

    def read_packed(
        self, name: str, expert_id: int | None = None, shard: Shard | None = None
    ) -> CodedMatrix:
        """See ``WeightReader``."""
        return self._reader.read_packed(_rename(name), expert_id, shard)

    def skip(self, prefix: str) -> None:
        """See ``WeightReader``."""
        self._reader.skip(_rename(prefix))


def _rename(name: str) -> str:
    name = name.replace(".mlp.", BLOCK)
    return _EXPERT.sub(lambda found: f"{found[1]}{_MATRICES[found[2]]}.", name)


def rename_reader(reader: WeightReader, names: Iterable[str]) -> WeightReader:
    """Return a reader that takes the modules' names, whatever the checkpoint's ``names`` are."""
    return RenamedReader(reader) if any(BLOCK in name for name in names) else reader
