"""The gated delta rule of a layer: its weights, and the state slots of its sequences.

A sequence's state depends on its tokens alone, and its size does not grow with their number: a
float32 matrix for each value head, in panels of 32 value columns, and the last inputs of the short
convolution. ``Execution.gated_delta`` runs the rule.

Shapes: T rows, W convolution width, C channels, V value heads; v and k sizes of value and key
heads; d decays of a head: 1, or k in Kimi delta attention, where each key item has its own decay.
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
    """Weights of a layer's gated delta rule, without the projections; always float32.

    Args:
        conv_WC: weights of the short convolution, for the oldest input first; channels are the
            queries and the keys of all key heads, then the values of all value heads.
        decay_rate_V: exp(A_log); a decay is exp(-rate * softplus(a + bias)).
        decay_bias_Vd: dt_bias, [V * d]; its size determines d.
        norm_v: weight of the RMSNorm of each head's output.
        num_k_heads: key heads; each serves equally many consecutive value heads.
        key_dim: k.
        norm_eps: epsilon of the RMSNorm.
        beta_scale: factor on sigmoid(b), which gives beta.
        gate: function of z that gates the normed output, ``silu`` or ``sigmoid``.

    Raises:
        ShapeError: sizes do not fit together.
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
        """Number of channels of the short convolution before the recurrence, C."""
        return self.conv_WC.shape[1]

    @property
    def decays_by_item(self) -> bool:
        """True if each item of a key has a decay of its own."""
        return len(self.decay_bias_Vd) > self.num_v_heads

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """Shape of a sequence's state: [V, panels, k, columns of a panel]; a panel is a block of
        value columns that the kernels keep together.
        """
        panels = -(-self.value_dim // STATE_PANEL)
        return (self.num_v_heads, panels, self.key_dim, STATE_PANEL)

    @property
    def carried_shape(self) -> tuple[int, int]:
        """Shape [W - 1, C] of the last inputs, which the convolution needs for the next tokens."""
        return (len(self.conv_WC) - 1, self.num_channels)

    @cached_property
    def native(self) -> _native.GatedDelta:
        """Native rule over the same weights.

        Raises:
            ShapeError: heads or a convolution larger than the native kernels support.
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
    """The state of a recurrent mixer: the shapes by which slots are allocated."""

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of one sequence's recurrent state in a layer."""
        ...

    @property
    def carried_shape(self) -> tuple[int, ...]:
        """Shape of the last inputs of a sequence that the mixer's convolution needs for the next
        tokens.
        """
        ...


@dataclass(frozen=True, slots=True)
class StateSlots:
    """Recurrent states of sequences by slot; a new sequence starts from a slot of zeros."""

    states: Buffer
    """State matrices, float32 [slots, *state_shape]."""
    carried: Buffer
    """Last inputs of the convolution, [slots, *carried_shape], in the model's dtype."""

    @classmethod
    def allocate(
        cls,
        rule: StateRule,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> "StateSlots":
        """Return slots of zeros, each with room for the state of one sequence by a rule's sizes."""
        states = torch.zeros(num_slots, *rule.state_shape, device=device)
        carried = torch.zeros(num_slots, *rule.carried_shape, dtype=dtype, device=device)
        return cls(Buffer(states), Buffer(carried))


@dataclass(frozen=True, slots=True)
class GatedDeltaRows:
    """A step's projected rows of a layer with a delta rule, and the slots of their sequences."""

    x_TC: Tensor  # noqa: N815 - a shape suffix
    """Queries, keys and values before the convolution."""
    z_TVv: Tensor  # noqa: N815
    """Gates z, [T, V * v], in the dtype of ``x_TC``."""
    a_TVd: Tensor  # noqa: N815
    """Inputs a of the decays, [T, V * d], before the bias; float32 or in the dtype of ``x_TC``."""
    b_TV: Tensor  # noqa: N815
    """Inputs b of beta, before the sigmoid; in the dtype of ``a_TVd``."""
    query_start: Sequence[int]
    """First row of each sequence, followed by T."""
    slot_ids: Sequence[int]
    """State slot of each sequence, all different."""
    slots_T: Tensor | None = None  # noqa: N815
    """State slot of each row, int64 on the device, if each row is a sequence's next token and no
    value may be read by the host; then ``slot_ids`` is not used. Equal slots have equal rows."""
