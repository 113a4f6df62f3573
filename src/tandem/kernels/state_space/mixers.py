"""State spaces of layers with their projections: one product before the rule, one after it.

The operators hold weights and shapes; a ``Step`` runs them over the state slots of its sequences.

Shapes: T tokens, D hidden, W convolution width, C channels, H heads, P items of a head.
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tandem._native import ThreadPool
from tandem.core.model.mixers import Mamba2Spec, ShortConvSpec
from tandem.kernels.gated_delta import StateSlots
from tandem.kernels.interfaces import AdaptedPart, Matrix, MatrixWrapper, WeightReader
from tandem.kernels.native import Buffer
from tandem.kernels.operators.lora import AdaptedRows
from tandem.kernels.operators.operator import Operator, current_step
from tandem.kernels.state_space.part_reader import PartReader
from tandem.kernels.state_space.rules import Mamba2Rule, ShortConvRule, StateRows
from tandem.kernels.state_space.torch_form import run_mamba2, run_short_conv
from tandem.kernels.weights.matrix import TENSORS, MatrixSettings, read_matrix

__all__ = ["Mamba2", "NativeRows", "ShortConv", "StateSpace", "make_mamba2_rule"]


class NativeRows(NamedTuple):
    """The parts of a step of native kernels that a mixer needs: sequences, threads and buffers."""

    rows: StateRows
    pool: ThreadPool | None
    make: Callable[[str, int, torch.dtype | None], Buffer]
    """Function that returns the step's buffer [T, size] of a name; dtype None is the model's."""
    cut: Callable[[Buffer, int, int], Buffer]
    """Function that returns columns [first, end) of a buffer."""


@dataclass(frozen=True, slots=True)
class AdaptedStack:
    """A projection of the checkpoint whose outputs are spread over several matrices of an
    operator.
    """

    parts: tuple[AdaptedRows, ...]

    @property
    def in_features(self) -> int:
        """Number of inputs of the checkpoint's projection."""
        return self.parts[0].in_features

    @property
    def out_features(self) -> int:
        """Number of outputs of the checkpoint's projection, over all matrices that it is spread
        over.
        """
        return sum(part.out_features for part in self.parts)

    def set_delta(self, slot: int, a_RK: Tensor, b_NR: Tensor, scale: float) -> None:
        """Set an adapter's LoRA factors in a slot, divided among the matrices."""
        sizes = [part.out_features for part in self.parts]
        for part, own in zip(self.parts, b_NR.split(sizes), strict=True):
            part.set_delta(slot, a_RK, own.contiguous(), scale)


class StateSpace(Operator):
    """A mixer with a recurrent state that each token updates.

    Args:
        state_idx: index of the layer among those with a state.
        settings: how the projections are stored and run.
    """

    output_matrix: Matrix

    def __init__(self, *, state_idx: int, settings: MatrixSettings = TENSORS) -> None:
        super().__init__()
        self.state_idx = state_idx
        self.settings = settings

    @abstractmethod
    def mix_native(self, h_TD: Buffer, native: NativeRows, slots: StateSlots) -> Buffer:
        """Run the mixer natively; return the output projection's input, in a buffer of the step."""

    @abstractmethod
    def mix_torch(self, h_TD: Tensor, rows: StateRows, slots: StateSlots) -> Tensor:
        """Run the mixer in torch; return the output projection's input, new."""

    def forward(self, hidden_states: Tensor, **_: object) -> Tensor:
        """Run with the interface of transformers' recurrent mixers: [1, T, D] in, [1, T, D] out."""
        mixed = current_step().mix(self, hidden_states[0])
        return self.output_matrix.forward(mixed, dtype=mixed.dtype)[None]

    def _read_vector(self, reader: WeightReader, name: str, *shape: int) -> Tensor:
        """Read a weight as float32, whatever the model's dtype is."""
        read = torch.empty(shape, dtype=torch.float32, device=reader.device)
        reader.read_into(name, read)
        return read


class ShortConv(StateSpace):
    """A short convolution over the tokens of sequences.

    Args:
        spec: sizes and checkpoint names.
        state_idx: index of the layer among those with a state.
        settings: how the projections are stored and run.
    """

    def __init__(
        self, spec: ShortConvSpec, *, state_idx: int, settings: MatrixSettings = TENSORS
    ) -> None:
        super().__init__(state_idx=state_idx, settings=settings)
        self.spec = spec

    def load(self, reader: WeightReader, name: str) -> None:
        """Read the projections, and the convolution in float32."""
        spec, size = self.spec, self.spec.hidden_size
        self.in_matrix, self.output_matrix = (
            read_matrix(
                self,
                prefix,
                reader,
                self.settings,
                [(f"{name}.{part}", rows)],
                size,
                has_bias=spec.has_bias,
            )
            for prefix, part, rows in (
                ("in_", spec.in_name, 3 * size),
                ("out_", spec.out_name, size),
            )
        )
        conv = f"{name}.{spec.conv_name}"
        weight = self._read_vector(reader, f"{conv}.weight", size, 1, spec.conv_width)
        bias = self._read_vector(reader, f"{conv}.bias", size) if spec.has_bias else None
        self.rule = ShortConvRule(weight[:, 0].T, bias)

    def adapt(self, wrapper: MatrixWrapper, name: str) -> dict[str, AdaptedPart]:
        """Make the projections take LoRA adapters; return them by checkpoint name."""
        spec, size = self.spec, self.spec.hidden_size
        self.in_matrix = first = wrapper.wrap_matrix(self.in_matrix)
        self.output_matrix = last = wrapper.wrap_matrix(self.output_matrix)
        return {
            f"{name}.{spec.in_name}": AdaptedRows(first, size, 3 * size),
            f"{name}.{spec.out_name}": AdaptedRows(last, size, size),
        }

    def mix_native(self, h_TD: Buffer, native: NativeRows, slots: StateSlots) -> Buffer:
        """Project natively and run the convolution; return the output projection's input, a step's
        buffer.
        """
        projected = native.make("conv_in", 3 * self.spec.hidden_size, None)
        mixed = native.make("state_mixed", self.spec.hidden_size, None)
        self.in_matrix.run(h_TD, projected)
        rows = native.rows
        self.rule.native.run(
            projected.view,
            mixed.view,
            slots.carried.view,
            rows.query_start,
            rows.slot_ids,
            native.pool,
        )
        return mixed

    def mix_torch(self, h_TD: Tensor, rows: StateRows, slots: StateSlots) -> Tensor:
        """Project and run the convolution in torch; return the output projection's input, new."""
        return run_short_conv(
            self.rule, self.in_matrix.forward(h_TD, dtype=h_TD.dtype), rows, slots
        )


class Mamba2(StateSpace):
    """A Mamba2 state space over the tokens of sequences.

    The projection to time steps, which control the state's decay, is a separate matrix in a format
    without loss.

    Args:
        spec: sizes of the layer.
        state_idx: index of the layer among those with a state.
        settings: how the other projections are stored and run.
        step_settings: how the projection to time steps is stored and run.
    """

    def __init__(
        self,
        spec: Mamba2Spec,
        *,
        state_idx: int,
        settings: MatrixSettings = TENSORS,
        step_settings: MatrixSettings = TENSORS,
    ) -> None:
        super().__init__(state_idx=state_idx, settings=settings)
        self.spec = spec
        self.step_settings = step_settings

    def load(self, reader: WeightReader, name: str) -> None:
        """Read the projections, and in float32 the convolution's, the time steps' and the norm's
        weights.
        """
        spec, part = self.spec, f"{name}.in_proj"
        first = spec.num_values + spec.num_channels
        whole = first + spec.num_heads
        self.in_matrix, self.step_matrix = (
            read_matrix(
                self,
                prefix,
                PartReader(reader, begin, end, whole),
                settings,
                [(part, end - begin)],
                spec.hidden_size,
                has_bias=spec.has_bias,
            )
            for prefix, settings, begin, end in (
                ("in_", self.settings, 0, first),
                ("dt_", self.step_settings, first, whole),
            )
        )
        self.output_matrix = read_matrix(
            self,
            "out_",
            reader,
            self.settings,
            [(f"{name}.out_proj", spec.hidden_size)],
            spec.num_values,
            has_bias=spec.has_bias,
        )
        heads, channels = spec.num_heads, spec.num_channels
        conv = self._read_vector(reader, f"{name}.conv1d.weight", channels, 1, spec.conv_width)
        a_log, dt_bias, skip, norm = (
            self._read_vector(reader, f"{name}.{part}", size)
            for part, size in (
                ("A_log", heads),
                ("dt_bias", heads),
                ("D", heads),
                ("norm.weight", spec.num_values),
            )
        )
        bias = None
        if spec.has_conv_bias:
            bias = self._read_vector(reader, f"{name}.conv1d.bias", channels)
        self.rule = make_mamba2_rule(spec, conv, a_log, dt_bias, skip, norm, bias)

    def adapt(self, wrapper: MatrixWrapper, name: str) -> dict[str, AdaptedPart]:
        """Make the projections take LoRA adapters; return them by checkpoint name."""
        spec = self.spec
        self.in_matrix = first = wrapper.wrap_matrix(self.in_matrix)
        self.step_matrix = steps = wrapper.wrap_matrix(self.step_matrix)
        self.output_matrix = last = wrapper.wrap_matrix(self.output_matrix)
        rows = (
            AdaptedRows(first, spec.hidden_size, spec.num_values + spec.num_channels),
            AdaptedRows(steps, spec.hidden_size, spec.num_heads),
        )
        return {
            f"{name}.in_proj": AdaptedStack(rows),
            f"{name}.out_proj": AdaptedRows(last, spec.num_values, spec.hidden_size),
        }

    def mix_native(self, h_TD: Buffer, native: NativeRows, slots: StateSlots) -> Buffer:
        """Project natively and run the state space; return the output projection's input, a step's
        buffer.
        """
        spec, rows = self.spec, native.rows
        values, end = spec.num_values, spec.num_values + spec.num_channels
        projected = native.make("mamba_in", end, None)
        steps = native.make("mamba_dt", spec.num_heads, self.step_matrix.out_dtype)
        read = native.make("mamba_read", values, torch.float32)
        mixed = native.make("state_mixed", values, None)
        self.in_matrix.run(h_TD, projected)
        self.step_matrix.run(h_TD, steps)
        self.rule.native.run(
            native.cut(projected, values, end).view,
            native.cut(projected, 0, values).view,
            steps.view,
            read.view,
            mixed.view,
            slots.states.view,
            slots.carried.view,
            rows.query_start,
            rows.slot_ids,
            native.pool,
        )
        return mixed

    def mix_torch(self, h_TD: Tensor, rows: StateRows, slots: StateSlots) -> Tensor:
        """Project and run the state space in torch; return the output projection's input, new."""
        values = self.spec.num_values
        projected = self.in_matrix.forward(h_TD, dtype=h_TD.dtype)
        steps = self.step_matrix.forward(h_TD, dtype=torch.float32)
        z_THP, x_TC = projected[:, :values], projected[:, values:]
        return run_mamba2(self.rule, x_TC, z_THP, steps, rows, slots)


def make_mamba2_rule(
    spec: Mamba2Spec,
    conv_C1W: Tensor,
    a_log_H: Tensor,
    dt_bias_H: Tensor,
    skip_H: Tensor,
    norm_HP: Tensor,
    conv_bias_C: Tensor | None,
) -> Mamba2Rule:
    """Return a layer's Mamba2 rule (the recurrence's weights and sizes), made of the checkpoint's
    tensors.
    """
    return Mamba2Rule(
        conv_C1W[:, 0].T,
        a_log_H.float().exp(),
        dt_bias_H,
        skip_H,
        norm_HP,
        num_groups=spec.num_groups,
        state_dim=spec.state_dim,
        norm_eps=spec.norm_eps,
        dt_limits=(spec.dt_min, math.inf if spec.dt_max is None else spec.dt_max),
        conv_bias_C=conv_bias_C,
    )
