"""The gated delta rule of a layer: its weights, and the slots of sequences that go on with it.

A sequence's state is a function of its tokens alone, and does not grow with them: for each value
head a float32 matrix, in panels of 32 value columns, and the last inputs of the short convolution.
``Execution.gated_delta`` runs the rule.

Shapes: T rows, W convolution width, C channels, V value heads, v and k sizes of their heads, d
decays of a head: 1, or k in Kimi delta attention, whose items of a key decay apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from tandem import _native
from tandem.core.errors import ConfigError, ShapeError
from tandem.core.state_layout import STATE_PANEL
from tandem.kernels.native import Buffer, view_tensor

__all__ = ["GatedDeltaRows", "GatedDeltaRule", "StateRule", "StateSlots"]

GATES = ("silu", "sigmoid")


class GatedDeltaRule:
    """A layer between its projections; float32 throughout, whatever the model's dtype.

    Args:
        conv_WC: of the short convolution, the oldest input first; channels are the queries and the
            keys of all key heads, then the values of all value heads.
        decay_rate_V: exp(A_log): a decay is exp(-rate * softplus(a + bias)).
        decay_bias_Vd: dt_bias, [V * d]; its size says what d is.
        norm_v: weight of the RMSNorm of each head's output.
        num_k_heads: each serves as many consecutive value heads.
        key_dim: k.
        norm_eps: of that norm.
        beta_scale: beta is this times sigmoid(b).
        gate: of z on the normed output, ``silu`` or ``sigmoid``.

    Raises:
        ShapeError: sizes that do not fit.
        ConfigError: an unknown gate.
    """

    def __init__(
        self,
        conv_WC: Tensor,
        decay_rate_V: Tensor,
        decay_bias_Vd: Tensor,
        norm_v: Tensor,
        *,
        num_k_heads: int,
        key_dim: int,
        norm_eps: float,
        beta_scale: float = 1.0,
        gate: str = "silu",
    ) -> None:
        self.conv_WC, self.norm_v = conv_WC.float().contiguous(), norm_v.float().contiguous()
        self.decay_rate_V = decay_rate_V.float().contiguous()
        self.decay_bias_Vd = decay_bias_Vd.float().contiguous()
        self.num_k_heads, self.key_dim = num_k_heads, key_dim
        self.num_v_heads, self.value_dim = len(decay_rate_V), len(norm_v)
        self.norm_eps, self.beta_scale, self.gate = norm_eps, beta_scale, gate
        where = "kernels.gated_delta"
        if gate not in GATES:
            raise ConfigError(where, f"unknown gate {gate}: choose one of {', '.join(GATES)}")
        if len(decay_bias_Vd) not in (self.num_v_heads, self.num_v_heads * key_dim):
            raise ShapeError(
                where,
                f"{len(decay_bias_Vd)} biases of the decays of {self.num_v_heads} heads with keys "
                f"of {key_dim}: give one for each head, or for each item of their keys",
            )
        channels = 2 * num_k_heads * key_dim + self.num_v_heads * self.value_dim
        if self.num_v_heads % num_k_heads or conv_WC.shape[1] != channels:
            raise ShapeError(
                where,
                f"{self.num_v_heads} value heads of {self.value_dim}, {num_k_heads} key heads of "
                f"{key_dim} and {conv_WC.shape[1]} channels: give key heads that divide the value "
                f"heads, and {channels} channels",
            )

    @property
    def num_channels(self) -> int:
        """C."""
        return self.conv_WC.shape[1]

    @property
    def decays_by_item(self) -> bool:
        """True if each item of a key has a decay of its own."""
        return len(self.decay_bias_Vd) > self.num_v_heads

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """Shape of a sequence's state: [V, panels, k, columns of a panel]."""
        panels = -(-self.value_dim // STATE_PANEL)
        return (self.num_v_heads, panels, self.key_dim, STATE_PANEL)

    @property
    def carried_shape(self) -> tuple[int, int]:
        """Shape of the last inputs that the convolution still sees: [W - 1, C]."""
        return (len(self.conv_WC) - 1, self.num_channels)

    @cached_property
    def native(self) -> _native.GatedDelta:
        """The native rule, over the same weights.

        Raises:
            ShapeError: heads or a convolution wider than the native kernels take.
        """
        return _native.GatedDelta(
            view_tensor(self.conv_WC),
            view_tensor(self.decay_rate_V),
            view_tensor(self.decay_bias_Vd),
            view_tensor(self.norm_v),
            self.num_k_heads,
            self.key_dim,
            self.norm_eps,
            self.beta_scale,
            self.gate,
        )


class StateRule(Protocol):
    """A mixer with a state, as far as its slots go."""

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of a sequence's matrices."""
        ...

    @property
    def carried_shape(self) -> tuple[int, ...]:
        """Shape of the last inputs of its convolution."""
        ...


@dataclass(frozen=True, slots=True)
class StateSlots:
    """The states that sequences go on with, by slot; a slot of zeros begins one."""

    states: Buffer
    """float32 [slots, *state_shape]."""
    carried: Buffer
    """[slots, *carried_shape], of the model's dtype."""

    @classmethod
    def allocate(
        cls,
        rule: StateRule,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> "StateSlots":
        """Return slots of zeros."""
        states = torch.zeros(num_slots, *rule.state_shape, device=device)
        carried = torch.zeros(num_slots, *rule.carried_shape, dtype=dtype, device=device)
        return cls(Buffer(states), Buffer(carried))


@dataclass(frozen=True, slots=True)
class GatedDeltaRows:
    """A step's rows of a layer's projections, and the slots of their sequences."""

    x_TC: Tensor  # noqa: N815 - a shape suffix
    """Queries, keys and values before the convolution."""
    z_TVv: Tensor  # noqa: N815
    """[T, V * v], of the dtype of ``x_TC``."""
    a_TVd: Tensor  # noqa: N815
    """[T, V * d], before the bias; float32 or of the dtype of ``x_TC``."""
    b_TV: Tensor  # noqa: N815
    """Before the sigmoid; of the dtype of ``a_TVd``."""
    query_start: Sequence[int]
    """First row of each sequence, and T."""
    slot_ids: Sequence[int]
    """Slot ids of the sequences, no two alike."""
