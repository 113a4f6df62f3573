"""Mixers with a state as plain data, and the size of what they keep in place of KV. No torch here.

Shapes: D hidden.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

__all__ = ["KimiDeltaSpec", "Mamba2Spec", "ShortConvSpec", "StateSizes"]

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]


class StateSizes(msgspec.Struct, frozen=True):
    """The sizes of a layer's state: a matrix for each head, and the inputs of its convolution."""

    num_heads: NonNegativeInt
    """Heads that have a matrix; 0 where a layer keeps the inputs of its convolution alone."""
    key_dim: NonNegativeInt
    value_dim: NonNegativeInt
    num_channels: PositiveInt
    """Channels of the convolution."""
    conv_width: PositiveInt
    """Inputs that an output of it sees."""


class ShortConvSpec(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="short_conv"):
    """A short convolution of a layer (LFM2): ``out(C * conv(B * x))``, where B, C, x = in(h)."""

    hidden_size: PositiveInt
    conv_width: Annotated[int, Meta(ge=2)]
    """Products B * x that an output of the convolution sees."""
    has_bias: bool = False
    """True if the projections and the convolution have biases."""
    in_name: str = "in_proj"
    conv_name: str = "conv"
    out_name: str = "out_proj"

    @property
    def state_sizes(self) -> StateSizes:
        """The sizes of the state."""
        return StateSizes(0, 0, 0, self.hidden_size, self.conv_width)


class Mamba2Spec(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="mamba2"):
    """A state space of a layer (Mamba2), between one projection and another.

    The first gives z, then x of all heads, B and C of all groups, and the time steps of the heads.
    """

    hidden_size: PositiveInt
    num_heads: PositiveInt
    """A multiple of ``num_groups``."""
    head_dim: PositiveInt
    num_groups: PositiveInt
    """Groups of B and C, and of the norm; each serves as many consecutive heads."""
    state_dim: PositiveInt
    """Items of a B or C."""
    conv_width: Annotated[int, Meta(ge=2)]
    """Inputs that an output of the convolution sees."""
    has_conv_bias: bool = False
    has_bias: bool = False
    """True if the projections have biases."""
    norm_eps: float
    dt_min: float = 0.0
    """The smallest time step."""
    dt_max: float | None = None
    """The largest; None is no limit."""

    @property
    def num_values(self) -> int:
        """Items of x of all heads."""
        return self.num_heads * self.head_dim

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.num_values + 2 * self.num_groups * self.state_dim

    @property
    def state_sizes(self) -> StateSizes:
        """The sizes of the state: that of a gated delta rule whose keys are B."""
        return StateSizes(
            self.num_heads, self.state_dim, self.head_dim, self.num_channels, self.conv_width
        )


class KimiDeltaSpec(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="kimi_delta"):
    """Kimi delta attention of a layer: a gated delta rule whose items of a key decay apart.

    Decays and the gate of the output are made in two products each, through a narrow waist.
    """

    hidden_size: PositiveInt
    num_heads: PositiveInt
    head_dim: PositiveInt
    """Items of a head's query, key and value."""
    conv_width: PositiveInt
    """Inputs that an output of the short convolution sees."""
    decay_waist: PositiveInt
    """Items between the two products that give decays."""
    gate_waist: PositiveInt
    """Items between the two products that give the gate."""
    norm_eps: float

    @property
    def num_values(self) -> int:
        """Items of the values of all heads, and of their queries and keys."""
        return self.num_heads * self.head_dim

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: all queries, keys and values."""
        return 3 * self.num_values

    @property
    def state_sizes(self) -> StateSizes:
        """The sizes of the state."""
        size = self.head_dim
        return StateSizes(self.num_heads, size, size, self.num_channels, self.conv_width)
