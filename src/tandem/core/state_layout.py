"""The layout of a sequence's recurrent state, the same in every tier."""

from math import prod
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from tandem.core.kv_layout import DTYPE_BYTES

__all__ = ["NO_SLOT", "STATE_PANEL", "StateLayout", "StateSlice"]

NO_SLOT = -1
"""Slot number that means that a sequence has no state slot."""

STATE_PANEL = 32
"""Number of value columns of an attention head that are stored side by side in a recurrent state,
because the native kernels read such panels.
"""

ALIGNMENT = 64
"""Alignment in bytes of each part of a state: a cache line."""

STATE_BYTES = 4
"""Bytes of an element of the recurrent matrices, which are float32 for every dtype of the model."""

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]


class StateSlice(NamedTuple):
    """The places of the parts of one layer in a recurrent state: offsets in bytes."""

    recurrent: int
    """Byte offset of the layer's recurrent matrices within a sequence's state."""
    carried: int
    """Byte offset of the short convolution's last inputs within a sequence's state."""


class StateLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The layout of one sequence's state, with all layers that have one; contiguous.

    A layer's part consists of its recurrent matrices, float32 ``[value_heads, panels, key_dim,
    32]`` with the last panel filled up with zeros, followed by the last inputs of its short
    convolution, in the model's dtype, ``[conv_width - 1, channels]``, oldest first. A layer that is
    only a convolution has no heads; in Mamba2 the keys are B and the values x. Version 1 of the
    layout.
    """

    num_layers: PositiveInt
    """Number of layers with a state."""
    num_value_heads: NonNegativeInt
    key_dim: NonNegativeInt
    value_dim: NonNegativeInt
    num_channels: PositiveInt
    """Number of channels of the convolution."""
    conv_width: PositiveInt
    """Width of the convolution: number of inputs per output."""
    dtype: str = "bfloat16"
    """Dtype of the model, a name in ``DTYPE_BYTES``."""

    @property
    def recurrent_shape(self) -> tuple[int, int, int, int]:
        """Shape of a layer's recurrent matrices."""
        panels = -(-self.value_dim // STATE_PANEL)
        return (self.num_value_heads, panels, self.key_dim, STATE_PANEL)

    @property
    def carried_shape(self) -> tuple[int, int]:
        """Shape of the last inputs of a layer's convolution."""
        return (self.conv_width - 1, self.num_channels)

    @property
    def recurrent_bytes(self) -> int:
        """Bytes of a layer's recurrent matrices."""
        return prod(self.recurrent_shape) * STATE_BYTES

    @property
    def carried_bytes(self) -> int:
        """Bytes of the last inputs of a layer's convolution."""
        return prod(self.carried_shape) * DTYPE_BYTES[self.dtype]

    @property
    def bytes_per_layer(self) -> int:
        """Bytes of one layer's part of a state, padded to whole cache lines."""
        return _align(self.recurrent_bytes) + _align(self.carried_bytes)

    @property
    def bytes_per_state(self) -> int:
        """Bytes of a sequence's state in all layers."""
        return self.bytes_per_layer * self.num_layers

    def layer_slice(self, state_idx: int) -> StateSlice:
        """Return where a layer's parts lie in a state; ``state_idx`` is the layer's index among
        those that have a state.
        """
        assert 0 <= state_idx < self.num_layers, (state_idx, self.num_layers)
        first = state_idx * self.bytes_per_layer
        return StateSlice(first, first + _align(self.recurrent_bytes))


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
