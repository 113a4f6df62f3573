"""The computations of state spaces between their projections: weights in float32, native rules.

A sequence's state is a function of its tokens alone, and does not grow with them.

Shapes: T rows, W convolution width, C channels, H heads, P items of a head, N items of B and C.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from tandem import _native
from tandem.core.state_layout import STATE_PANEL
from tandem.kernels.native import view_tensor

__all__ = ["Mamba2Rule", "ShortConvRule", "StateRows"]


@dataclass(frozen=True, slots=True)
class StateRows:
    """The sequences of a step's rows."""

    query_start: Sequence[int]
    """First row of each sequence, and T."""
    slot_ids: Sequence[int]
    """Slot ids of the sequences, no two alike."""


class ShortConvRule:
    """C * conv(B * x); products B * x are rounded to the dtype of the rows.

    Args:
        conv_WC: the oldest product first.
        bias_C: None is none.
    """

    def __init__(self, conv_WC: Tensor, bias_C: Tensor | None = None) -> None:
        self.conv_WC = conv_WC.float().contiguous()
        self.bias_C = None if bias_C is None else bias_C.float().contiguous()

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of a sequence's matrices: none."""
        return (0,)

    @property
    def carried_shape(self) -> tuple[int, int]:
        """Shape of the last products that the convolution still sees: [W - 1, C]."""
        return (len(self.conv_WC) - 1, self.conv_WC.shape[1])

    @cached_property
    def native(self) -> _native.ShortConv:
        """The native rule, over the same weights.

        Raises: ShapeError (a convolution wider than the native kernels take).
        """
        bias = None if self.bias_C is None else view_tensor(self.bias_C)
        return _native.ShortConv(view_tensor(self.conv_WC), bias)


class Mamba2Rule:
    """A state space between its projections (arXiv:2405.21060).

    Args:
        conv_WC: of the short convolution, the oldest input first; channels are x of all heads, then
            B and C of all groups.
        decay_rate_H: exp(A_log): a decay is exp(-rate * dt).
        dt_bias_H: dt is softplus(dt + bias), within the limits.
        skip_H: D.
        norm_HP: weight of the RMSNorm of each group of the gated output.
        num_groups: each serves as many consecutive heads.
        state_dim: N.
        norm_eps: of that norm.
        dt_limits: the smallest and the largest dt; infinity is no limit.
        conv_bias_C: None is none.

    Raises: ShapeError of ``native`` (sizes that do not fit).
    """

    def __init__(
        self,
        conv_WC: Tensor,
        decay_rate_H: Tensor,
        dt_bias_H: Tensor,
        skip_H: Tensor,
        norm_HP: Tensor,
        *,
        num_groups: int,
        state_dim: int,
        norm_eps: float,
        dt_limits: tuple[float, float] = (0.0, math.inf),
        conv_bias_C: Tensor | None = None,
    ) -> None:
        self.conv_WC, self.norm_HP = conv_WC.float().contiguous(), norm_HP.float().contiguous()
        self.decay_rate_H = decay_rate_H.float().contiguous()
        self.dt_bias_H = dt_bias_H.float().contiguous()
        self.skip_H = skip_H.float().contiguous()
        self.conv_bias_C = None if conv_bias_C is None else conv_bias_C.float().contiguous()
        self.num_groups, self.state_dim = num_groups, state_dim
        self.norm_eps, self.dt_limits = norm_eps, dt_limits

    @property
    def num_heads(self) -> int:
        """H."""
        return len(self.decay_rate_H)

    @property
    def head_dim(self) -> int:
        """P."""
        return len(self.norm_HP) // self.num_heads

    @property
    def num_values(self) -> int:
        """Items of x of all heads."""
        return len(self.norm_HP)

    @property
    def num_channels(self) -> int:
        """C."""
        return self.num_values + 2 * self.num_groups * self.state_dim

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """Shape of a sequence's state: [H, panels, N, columns of a panel]."""
        panels = -(-self.head_dim // STATE_PANEL)
        return (self.num_heads, panels, self.state_dim, STATE_PANEL)

    @property
    def carried_shape(self) -> tuple[int, int]:
        """Shape of the last inputs that the convolution still sees: [W - 1, C]."""
        return (len(self.conv_WC) - 1, self.num_channels)

    @cached_property
    def native(self) -> _native.Mamba2:
        """The native rule, over the same weights.

        Raises:
            ShapeError: sizes that do not fit, or are larger than the native kernels take.
        """
        return _native.Mamba2(
            view_tensor(self.conv_WC),
            view_tensor(self.decay_rate_H),
            view_tensor(self.dt_bias_H),
            view_tensor(self.skip_H),
            view_tensor(self.norm_HP),
            self.num_groups,
            self.state_dim,
            self.norm_eps,
            *self.dt_limits,
            conv_bias=None if self.conv_bias_C is None else view_tensor(self.conv_bias_C),
        )
