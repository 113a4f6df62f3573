"""Layers with a state in a GGUF file: their sizes, and what llama.cpp's converter rearranged.

``qwen3next`` has the rows of Qwen3-Next's joined projection by kind instead of by key head.
``qwen35`` and ``qwen35moe`` have value heads in turn, the first of each key head, then the second
of each, where transformers has those of a key head together: in rows, and in the inputs of the
output projection. A decay's rate is stored as minus its value, not as a logarithm.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["STATE_ARCHITECTURES", "StateSizes", "find_sizes", "read_state_sizes"]

STATE_ARCHITECTURES = ("qwen3next", "qwen35", "qwen35moe")
TILED = ("qwen35", "qwen35moe")
"""Architectures whose value heads come in turn."""

Order = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StateSizes:
    """Heads of the layers with a state of a model."""

    num_k_heads: int
    num_v_heads: int
    key_dim: int
    value_dim: int
    is_tiled: bool

    @property
    def group(self) -> int:
        """Value heads of a key head."""
        return self.num_v_heads // self.num_k_heads

    @property
    def has_order(self) -> bool:
        """True if value heads lie in another order than transformers has them."""
        return self.is_tiled and self.group > 1

    def order_heads(self, size: int) -> Order:
        """Return which row of the file each of the value heads' rows is; a head has ``size``."""
        rows = np.arange(self.num_v_heads * size).reshape(self.group, self.num_k_heads, size)
        return rows.swapaxes(0, 1).ravel() if self.is_tiled else rows.ravel()

    def order_channels(self) -> Order:
        """Return the same of the rows of all queries, all keys and all values."""
        first = 2 * self.num_k_heads * self.key_dim
        return np.concatenate((np.arange(first), first + self.order_heads(self.value_dim)))

    def join_by_head(self) -> Order:
        """Return which row of queries, keys, values and z each row is that is by key head."""
        parts: list[Order] = []
        begin = 0
        for size in (self.key_dim, self.key_dim, *(self.group * self.value_dim,) * 2):
            rows = begin + np.arange(self.num_k_heads * size)
            parts.append(rows.reshape(self.num_k_heads, size))
            begin += len(rows)
        return np.concatenate(parts, axis=1).ravel()


def read_state_sizes(architecture: str, count: Callable[[str], int]) -> StateSizes:
    """Return the sizes of a model's layers with a state.

    Args:
        architecture: of ``STATE_ARCHITECTURES``.
        count: gives a number of the metadata, by its key below the architecture's.

    Raises: what ``count`` raises; ValueError (sizes that do not fit).
    """
    keys, values = count("ssm.group_count"), count("ssm.time_step_rank")
    inner = count("ssm.inner_size")
    if not keys or not values or values % keys or inner % values:
        raise ValueError(f"{values} value heads of {inner} items in all over {keys} key heads")
    tiled = architecture in TILED
    return StateSizes(keys, values, count("ssm.state_size"), inner // values, tiled)


def find_sizes(architecture: str, metadata: Mapping[str, object]) -> StateSizes | None:
    """Return the sizes that metadata state; None of an architecture without states.

    Raises: ValueError (they are missing or do not fit).
    """
    if architecture not in STATE_ARCHITECTURES:
        return None

    def count(key: str) -> int:
        value = metadata.get(f"{architecture}.{key}")
        if type(value) is not int or not 0 <= value < 1 << 24:
            raise ValueError(f"{architecture}.{key} is {value!r}")
        return value

    return read_state_sizes(architecture, count)
