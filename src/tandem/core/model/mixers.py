"""Token mixers with a recurrent state, as plain data, and the sizes of their states. No torch here.

Shapes: D hidden.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

__all__ = ["KimiDeltaSpec", "Mamba2Spec", "ShortConvSpec", "StateSizes"]

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]


class StateSizes(msgspec.Struct, frozen=True):
    """The sizes of a layer's recurrent state: a matrix per head, and the last inputs of its
    convolution.
    """

    num_heads: NonNegativeInt
    """Number of heads with a matrix; 0 if the state is the convolution's inputs only."""
    key_dim: NonNegativeInt
    value_dim: NonNegativeInt
    num_channels: PositiveInt
    """Number of channels of the convolution."""
    conv_width: PositiveInt
    """Width of the convolution: number of inputs per output."""


class ShortConvSpec(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="short_conv"):
    """A short convolution of a layer (LFM2): ``out(C * conv(B * x))``, where B, C, x = in(h)."""

    hidden_size: PositiveInt
    conv_width: Annotated[int, Meta(ge=2)]
    """Width of the convolution: number of products B * x per output."""
    has_bias: bool = False
    """True if the projections and the convolution have biases."""
    in_name: str = "in_proj"
    conv_name: str = "conv"
    out_name: str = "out_proj"

    @property
    def state_sizes(self) -> StateSizes:
        """Sizes of the layer's recurrent state."""
        return StateSizes(0, 0, 0, self.hidden_size, self.conv_width)


class Mamba2Spec(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="mamba2"):
    """A state space model of a layer (Mamba2), between an input and an output projection.

    The input projection gives z, then x of all heads, B and C of all groups, and the heads' time
    steps.
    """

    hidden_size: PositiveInt
    num_heads: PositiveInt
    """Number of heads, a multiple of ``num_groups``."""
    head_dim: PositiveInt
    num_groups: PositiveInt
    """Number of groups of B and C, and of the norm; each group serves consecutive heads."""
    state_dim: PositiveInt
    """Number of elements of a group's B or C."""
    conv_width: Annotated[int, Meta(ge=2)]
    """Width of the convolution: number of inputs per output."""
    has_conv_bias: bool = False
    has_bias: bool = False
    """True if the projections have biases."""
    norm_eps: float
    dt_min: float = 0.0
    """Lower limit of the time step."""
    dt_max: float | None = None
    """Upper limit of the time step; None: no limit."""

    @property
    def num_values(self) -> int:
        """Number of elements of x in all heads."""
        return self.num_heads * self.head_dim

    @property
    def num_channels(self) -> int:
        """Number of channels of the convolution: x, B and C."""
        return self.num_values + 2 * self.num_groups * self.state_dim

    @property
    def state_sizes(self) -> StateSizes:
        """Sizes of the layer's recurrent state, which is that of a gated delta rule with B as
        keys.
        """
        return StateSizes(
            self.num_heads, self.state_dim, self.head_dim, self.num_channels, self.conv_width
        )


class KimiDeltaSpec(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="kimi_delta"):
    """Kimi delta attention of a layer: a gated delta rule with a separate decay for each key
    element.

    The decays and the output gate are each computed by two projections with a small size between
    them.
    """

    hidden_size: PositiveInt
    num_heads: PositiveInt
    head_dim: PositiveInt
    """Number of elements of a head's query, key and value."""
    conv_width: PositiveInt
    """Width of the short convolution: number of inputs per output."""
    decay_waist: PositiveInt
    """Output size of the first, and input size of the second, of the two projections that compute
    the decays.
    """
    gate_waist: PositiveInt
    """Output size of the first, and input size of the second, of the two projections that compute
    the output gate.
    """
    norm_eps: float

    @property
    def num_values(self) -> int:
        """Number of elements of the values of all heads; the same for queries and keys."""
        return self.num_heads * self.head_dim

    @property
    def num_channels(self) -> int:
        """Number of channels of the convolution: all queries, keys and values."""
        return 3 * self.num_values

    @property
    def state_sizes(self) -> StateSizes:
        """Sizes of the layer's recurrent state."""
        size = self.head_dim
        return StateSizes(self.num_heads, size, size, self.num_channels, self.conv_width)
