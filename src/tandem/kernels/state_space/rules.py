"""State spaces without their projections: weights in float32, and native rules.

A sequence's state depends on its tokens alone, and its size does not grow with their number.

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
    """The sequences of a step in a layer with a state: which rows each has, and its state's
    slot.
    """

    query_start: Sequence[int]
    """First row of each sequence, followed by T."""
    slot_ids: Sequence[int]
    """State slot of each sequence, all different."""
    slots_T: Tensor | None = None  # noqa: N815 - a shape suffix
    """State slot of each row, on the device; see ``GatedDeltaRows.slots_T``."""


class ShortConvRule:
    """Short convolution C * conv(B * x); products B * x are rounded to the dtype of the rows.

    Args:
        conv_WC: the convolution's weights, for the oldest product first.
        bias_C: bias of the convolution; None: none.
    """

    def __init__(self, conv_WC: Tensor, bias_C: Tensor | None = None) -> None:
        self.conv_WC = conv_WC.float().contiguous()
        self.bias_C = None if bias_C is None else bias_C.float().contiguous()

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of a sequence's state matrices: (0,), as this rule has none."""
        return (0,)

    @property
    def carried_shape(self) -> tuple[int, int]:
        """Shape [W - 1, C] of the last products, which the convolution needs for the next
        tokens.
        """
        return (len(self.conv_WC) - 1, self.conv_WC.shape[1])

    @cached_property
    def native(self) -> _native.ShortConv:
        """Native rule over the same weights.

        Raises: ShapeError (the convolution is wider than the native kernels support).
        """
        bias = None if self.bias_C is None else view_tensor(self.bias_C)
        return _native.ShortConv(view_tensor(self.conv_WC), bias)


class Mamba2Rule:
    """A Mamba2 state space without its projections (arXiv:2405.21060).

    Args:
        conv_WC: weights of the short convolution, for the oldest input first; channels are x of all
            heads, then B and C of all groups.
        decay_rate_H: exp(A_log); a decay is exp(-rate * dt).
        dt_bias_H: bias of the time step: dt is softplus(dt + bias), clamped to the limits.
        skip_H: factor D of the skip connection.
        norm_HP: weight of the RMSNorm over each group of the gated output.
        num_groups: groups of B and C; each serves equally many consecutive heads.
        state_dim: N.
        norm_eps: epsilon of the RMSNorm.
        dt_limits: smallest and largest dt; infinity: no limit.
        conv_bias_C: bias of the convolution; None: none.

    Raises: ShapeError by ``native`` (sizes that do not fit together).
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
        """Number of heads, H."""
        return len(self.decay_rate_H)

    @property
    def head_dim(self) -> int:
        """Items of a head, P."""
        return len(self.norm_HP) // self.num_heads

    @property
    def num_values(self) -> int:
        """Items of x over all heads, H * P."""
        return len(self.norm_HP)

    @property
    def num_channels(self) -> int:
        """Number of channels of the short convolution before the recurrence, C."""
        return self.num_values + 2 * self.num_groups * self.state_dim

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """Shape of a sequence's state: [H, panels, N, columns of a panel]; a panel is a block of
        columns that the kernels keep together.
        """
        panels = -(-self.head_dim // STATE_PANEL)
        return (self.num_heads, panels, self.state_dim, STATE_PANEL)

    @property
    def carried_shape(self) -> tuple[int, int]:
        """Shape [W - 1, C] of the last inputs, which the convolution needs for the next tokens."""
        return (len(self.conv_WC) - 1, self.num_channels)

    @cached_property
    def native(self) -> _native.Mamba2:
        """Native rule over the same weights.

        Raises:
            ShapeError: sizes do not fit together, or exceed what the native kernels support.
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
