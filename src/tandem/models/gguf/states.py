"""Layers with a state in a GGUF file: their sizes, and the order of rows in the file.

``qwen3next`` stores the rows of Qwen3-Next's joint projection by kind instead of by key head.
``qwen35`` and ``qwen35moe`` store the first value head of every key head, then the second of each,
while transformers keeps those of a key head together: in rows, and in the inputs of the output
projection. A decay's rate is stored as its negative, not as its logarithm.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["STATE_ARCHITECTURES", "StateSizes", "find_sizes", "read_state_sizes"]

STATE_ARCHITECTURES = ("qwen3next", "qwen35", "qwen35moe")
TILED = ("qwen35", "qwen35moe")
"""Architectures whose files order value heads so that neighbours belong to different key heads."""

Order = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StateSizes:
    """Numbers and sizes of the heads in layers with a recurrent state (a gated delta rule)."""

    num_k_heads: int
    num_v_heads: int
    key_dim: int
    value_dim: int
    is_tiled: bool

    @property
    def group(self) -> int:
        """Value heads per key head of a gated delta rule."""
        return self.num_v_heads // self.num_k_heads

    @property
    def has_order(self) -> bool:
        """True if the file's order of value heads differs from transformers'."""
        return self.is_tiled and self.group > 1

    def order_heads(self, size: int) -> Order:
        """Return the row in the file for each row of the weight in transformers' order of value
        heads, with ``size`` rows per head.
        """
        rows = np.arange(self.num_v_heads * size).reshape(self.group, self.num_k_heads, size)
        return rows.swapaxes(0, 1).ravel() if self.is_tiled else rows.ravel()

    def order_channels(self) -> Order:
        """Return the row in the file for each row of the weight over all queries, keys and values,
        in transformers' order.
        """
        first = 2 * self.num_k_heads * self.key_dim
        return np.concatenate((np.arange(first), first + self.order_heads(self.value_dim)))

    def join_by_head(self) -> Order:
        """Return the row in the file for each row of transformers' fused weight. The file has all
        queries, then keys, values and gates z; transformers has those of one key head together.
        """
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
        architecture: one of ``STATE_ARCHITECTURES``.
        count: returns a number of the metadata by its key without the architecture's name.

    Raises: the errors of ``count``; ValueError (sizes that do not fit together).
    """
    keys, values = count("ssm.group_count"), count("ssm.time_step_rank")
    inner = count("ssm.inner_size")
    if not keys or not values or values % keys or inner % values:
        raise ValueError(f"{values} value heads of {inner} items in all over {keys} key heads")
    tiled = architecture in TILED
    return StateSizes(keys, values, count("ssm.state_size"), inner // values, tiled)


def find_sizes(architecture: str, metadata: Mapping[str, object]) -> StateSizes | None:
    """Return the sizes stated in the metadata; None for an architecture without states.

    Raises: ValueError (sizes are missing or do not fit together).
    """
    if architecture not in STATE_ARCHITECTURES:
        return None

    def count(key: str) -> int:
        value = metadata.get(f"{architecture}.{key}")
        if type(value) is not int or not 0 <= value < 1 << 24:
            raise ValueError(f"{architecture}.{key} is {value!r}")
        return value

    return read_state_sizes(architecture, count)
