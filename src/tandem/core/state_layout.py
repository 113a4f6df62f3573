"""The one layout of a sequence's state in every tier: what layers keep in place of KV."""

from math import prod
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from tandem.core.kv_layout import DTYPE_BYTES

__all__ = ["NO_SLOT", "STATE_PANEL", "StateLayout", "StateSlice"]

NO_SLOT = -1
"""The state's slot of a sequence that has none."""

STATE_PANEL = 32
"""Value columns of a head that lie side by side; the native kernels' own."""

ALIGNMENT = 64
"""Bytes: a cache line. Each part of a state begins at a multiple of it."""

STATE_BYTES = 4
"""Bytes of an item of the recurrent state, which is float32 whatever the model's dtype."""

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]


class StateSlice(NamedTuple):
    """The place of a layer's parts within a state, in bytes."""

    recurrent: int
    """The begin of the recurrent state."""
    carried: int
    """The begin of the carried inputs."""


class StateLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The state of one sequence, all layers that have one: contiguous, and the same in every tier.

    A layer's part is the recurrent state, float32 ``[value_heads, panels, key_dim, 32]``, whose
    last panel is completed by zeros, and then the last inputs of its short convolution, of the
    model's dtype, ``[conv_width - 1, channels]``, the oldest first. Version 1 of the layout. A
    layer that is a convolution alone has no heads; of Mamba2 the keys are B, the values x.
    """

    num_layers: PositiveInt
    """Layers that have a state."""
    num_value_heads: NonNegativeInt
    key_dim: NonNegativeInt
    value_dim: NonNegativeInt
    num_channels: PositiveInt
    """Channels of the convolution."""
    conv_width: PositiveInt
    """Inputs that an output of the convolution sees."""
    dtype: str = "bfloat16"
    """The model's, a name of ``DTYPE_BYTES``."""

    @property
    def recurrent_shape(self) -> tuple[int, int, int, int]:
        """Shape of a layer's recurrent state."""
        panels = -(-self.value_dim // STATE_PANEL)
        return (self.num_value_heads, panels, self.key_dim, STATE_PANEL)

    @property
    def carried_shape(self) -> tuple[int, int]:
        """Shape of a layer's carried inputs."""
        return (self.conv_width - 1, self.num_channels)

    @property
    def recurrent_bytes(self) -> int:
        """Bytes of a layer's recurrent state."""
        return prod(self.recurrent_shape) * STATE_BYTES

    @property
    def carried_bytes(self) -> int:
        """Bytes of a layer's carried inputs."""
        return prod(self.carried_shape) * DTYPE_BYTES[self.dtype]

    @property
    def bytes_per_layer(self) -> int:
        """Bytes of a layer's part, with what completes it to whole cache lines."""
        return _align(self.recurrent_bytes) + _align(self.carried_bytes)

    @property
    def bytes_per_state(self) -> int:
        """Bytes of a sequence's state, all layers."""
        return self.bytes_per_layer * self.num_layers

    def layer_slice(self, state_idx: int) -> StateSlice:
        """Return where the parts of a layer lie; ``state_idx`` counts the layers with a state."""
        assert 0 <= state_idx < self.num_layers, (state_idx, self.num_layers)
        first = state_idx * self.bytes_per_layer
        return StateSlice(first, first + _align(self.recurrent_bytes))


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
