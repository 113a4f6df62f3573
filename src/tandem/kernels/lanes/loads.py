"""Routed experts of the host that a device computes after their weights are copied to it.

``ExpertLoads`` describes, for a layer, how the host writes an expert to staging memory and how the
device computes experts that are in its memory. ``PackedLoads`` copies packed weights, for a device
that runs the native kernels; ``UnpackedLoads`` copies weights dequantized to the model's dtype, and
multiplies with torch.

Shapes: T or B tokens, D hidden, F intermediate of one expert, E experts, K experts per token, U
experts in the device's memory.
"""

from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tandem._native import ThreadPool
from tandem.kernels.activation import activate
from tandem.kernels.cpu.experts import NativeExperts, PackedExperts
from tandem.kernels.cpu.linear import PANEL_COLUMNS, PackedLinear, count_bytes
from tandem.kernels.device import Device
from tandem.kernels.native import Buffer
from tandem.kernels.weights.formats import split_pair

__all__ = ["ExpertLoads", "LayerSum", "PackedLoads", "UnpackedLoads", "count_loaded", "make_loads"]

WORD_BYTES = 8
GATHERED_COST = 3
"""Cost of an expert whose weights are gathered first, relative to one that is multiplied in place:
its weights are read twice and written once.
"""


class LayerSum(Protocol):
    """A layer's weighted sum of experts for a prompt, built up as ranges of experts arrive."""

    def add(self, memory: Tensor, first: int, end: int) -> None:
        """Compute experts [first, end), whose weights lie one after the other in ``memory``, and
        add their outputs; ranges ascend without gaps.
        """
        ...

    def take(self) -> Tensor:
        """Return the weighted sum of the layer's experts, float32 [T, D], after all were added."""
        ...


class ExpertLoads(Protocol):
    """A layer's experts in the form in which they are copied to a device and computed there."""

    num_experts: int
    expert_bytes: int
    """Bytes of one expert in staging memory and on the device."""

    def stage(self, expert_id: int, place: Tensor) -> None:
        """Write an expert to staging memory, uint8 [expert_bytes]; runs on the host."""
        ...

    def run_pairs(
        self, x_BD: Tensor, ids_BK: Tensor, owners_U: Tensor, memory: Tensor, out_BKD: Tensor
    ) -> None:
        """Compute each token's outputs of its experts, without router weights; runs on the device.

        No tensor's value is read by the host and no shape depends on one, so the call can be
        captured in a graph.

        Args:
            x_BD: hidden states.
            ids_BK: expert ids, int64; for -1 the output is 0.
            owners_U: int64, the id of the expert in each place of ``memory``; -1: an empty place.
            memory: packed or unpacked experts, uint8 [U * expert_bytes].
            out_BKD: the outputs, float32.
        """
        ...

    def begin_sum(self, x_TD: Tensor, ids_TK: Tensor, w_TK: Tensor) -> LayerSum:
        """Return an empty sum of a prompt's expert outputs, to be filled range by range."""
        ...


def make_loads(native: NativeExperts, pool: ThreadPool, device: Device) -> ExpertLoads:
    """Return a layer's experts in the form (loads) in which they are copied to the device: packed,
    or dequantized.

    Raises: UnsupportedError (the experts are not in one piece of host memory).
    """
    if device.has_native_kernels:
        return PackedLoads(native, pool)
    return UnpackedLoads(native, pool, device)


def count_loaded(device: Device, num_weights: int, packed_bytes: int, *, is_float: bool) -> int:
    """Return the bytes that one expert takes on a device.

    Args:
        device: device that the expert is copied to.
        num_weights: number of the expert's weights.
        packed_bytes: size of the packed expert on the host.
        is_float: True if the expert's weight format is float32.
    """
    if device.has_native_kernels:
        return packed_bytes
    return _round_up(num_weights * (4 if is_float else 2))


def _round_up(num_bytes: int) -> int:
    """Round up to whole words, the unit in which a device moves experts."""
    return -(-num_bytes // WORD_BYTES) * WORD_BYTES


class PackedLoads:
    """Experts copied as they are packed; results are bitwise those of ``NativeExperts``.

    Args:
        native: the loaded experts; borrowed.
        pool: runs the kernels; borrowed.

    Raises: UnsupportedError (experts on disk, or in parts on NUMA nodes).
    """

    def __init__(self, native: NativeExperts, pool: ThreadPool) -> None:
        self._packed = native.view_packed()
        self.num_experts, self.expert_bytes = self._packed.shape
        self._pool = pool
        self._bank = native.make_apart()

    def stage(self, expert_id: int, place: Tensor) -> None:
        """Copy the expert's packed bytes to staging memory."""
        np.copyto(place.numpy(), self._packed[expert_id])

    def run_pairs(
        self, x_BD: Tensor, ids_BK: Tensor, owners_U: Tensor, memory: Tensor, out_BKD: Tensor
    ) -> None:
        """Compute each token's outputs of its experts with the native kernels, without router
        weights.
        """
        tokens, top_k = ids_BK.shape
        # ``places`` maps an expert to its offset in ``memory``. Empty places of the memory have no
        # expert: they write to one surplus entry at the end, which is cut off below.
        places = torch.full((self.num_experts + 1,), -1, dtype=torch.int64)
        offsets = torch.arange(len(owners_U)) * self.expert_bytes
        places[owners_U.where(owners_U >= 0, self.num_experts)] = offsets
        self._bank.run_apart(
            Buffer(x_BD.repeat_interleave(top_k, 0)),
            Buffer(ids_BK.reshape(-1, 1)),
            Buffer(torch.ones(tokens * top_k, 1)),
            Buffer(out_BKD.view(tokens * top_k, -1)),
            memory.numpy(),
            places[:-1].numpy(),
        )

    def begin_sum(self, x_TD: Tensor, ids_TK: Tensor, w_TK: Tensor) -> LayerSum:
        """Return an empty sum of a prompt's expert outputs, computed by the native kernels."""
        return _PackedSum(self._bank, self.expert_bytes, x_TD, ids_TK, w_TK)


class _PackedSum:
    """A prompt's sum over packed experts, in the order in which a single call sums them."""

    def __init__(
        self, bank: PackedExperts, expert_bytes: int, x_TD: Tensor, ids_TK: Tensor, w_TK: Tensor
    ) -> None:
        self._bank, self._expert_bytes = bank, expert_bytes
        self._given = (Buffer(x_TD), Buffer(ids_TK.contiguous()), Buffer(w_TK.float().contiguous()))
        self._out = Buffer.allocate(*x_TD.shape, dtype=torch.float32)

    def add(self, memory: Tensor, first: int, end: int) -> None:
        """Compute experts [first, end), whose weights lie one after the other in ``memory``, and
        add their outputs.
        """
        places = np.full(self._bank.num_experts, -1, np.int64)
        places[first:end] = np.arange(end - first) * self._expert_bytes
        self._bank.run_apart(
            *self._given, self._out, memory.numpy(), places, first, end, is_added=first > 0
        )

    def take(self) -> Tensor:
        """Return the weighted sum of the layer's experts, float32 [T, D], after all were added."""
        return self._out.tensor


class UnpackedLoads:
    """Experts dequantized to the model's dtype, for a device without native kernels.

    Args:
        native: the loaded experts; borrowed.
        pool: threads that dequantize; borrowed.
        device: device that the experts are copied to.

    Raises: UnsupportedError (experts on disk, or in parts on NUMA nodes).
    """

    def __init__(self, native: NativeExperts, pool: ThreadPool, device: Device) -> None:
        self._packed = native.view_packed()
        self.num_experts = native.num_experts
        self._formats = split_pair(native.weight_format)
        self._pool = pool
        self._activation = native.activation
        self._hidden, self._inner = native.hidden_size, native.intermediate_size
        self.dtype = torch.float32 if native.weight_format.bits == 32 else torch.bfloat16
        """Dtype of the copied weights; bfloat16's 8 significant bits suffice for quantized weights.
        """
        self._num_items = 3 * self._hidden * self._inner
        self.expert_bytes = _round_up(self._num_items * self.dtype.itemsize)
        self._biases: tuple[Tensor, Tensor] | None = None
        if native.biases is not None:
            gate, up, down = (part.to(device.torch_device) for part in native.biases)
            self._biases = (torch.cat((gate, up), 1), down)

    def stage(self, expert_id: int, place: Tensor) -> None:
        """Dequantize an expert and write its weights to staging memory."""
        numbers = place.view(self.dtype)
        half = 2 * self._hidden * self._inner
        gate_up, down = self._unpack(expert_id)
        numbers[:half].view_as(gate_up).copy_(gate_up)
        numbers[half : self._num_items].view_as(down).copy_(down)

    def _unpack(self, expert_id: int) -> tuple[Tensor, Tensor]:
        """Return an expert's dequantized weights, float32 [2 F, D] and [D, F].

        A packed expert alternates panels of gate and up, followed by those of down. So it is
        unpacked as two matrices, and the outputs of the first are put in order.
        """
        packed, hidden, inner = self._packed[expert_id], self._hidden, self._inner
        first_format, down_format = self._formats
        down_bytes = count_bytes(down_format, inner, hidden)
        stored = packed[: len(packed) - down_bytes]
        panel_bytes = count_bytes(first_format, hidden, PANEL_COLUMNS)
        num_panels = len(stored) // panel_bytes
        both = PackedLinear(
            first_format, hidden, num_panels * PANEL_COLUMNS, pool=self._pool, storage=stored
        ).unpack()
        panels = both.view(-1, 2, PANEL_COLUMNS, hidden).transpose(0, 1)
        gate_up = panels.reshape(2, -1, hidden)[:, :inner].reshape(2 * inner, hidden)
        down = PackedLinear(
            down_format, inner, hidden, pool=self._pool, storage=packed[len(stored) :]
        ).unpack()
        return gate_up, down

    def _view(self, memory: Tensor, place: int) -> tuple[Tensor, Tensor]:
        start = place * self.expert_bytes
        numbers = memory[start : start + self.expert_bytes].view(self.dtype)
        half = 2 * self._hidden * self._inner
        return (
            numbers[:half].view(2 * self._inner, self._hidden),
            numbers[half : self._num_items].view(self._hidden, self._inner),
        )

    def _multiply(
        self, x_TD: Tensor, memory: Tensor, place: int, biases: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """Return the output of one expert, whose weights lie at ``place`` of the memory, for all
        tokens: float32 [T, D].
        """
        gate_up, down = self._view(memory, place)
        hidden = x_TD.to(self.dtype) @ gate_up.t()
        if biases is not None:
            hidden = hidden + biases[0]
        out = (activate(self._activation, hidden) @ down.t()).float()
        return out if biases is None else out + biases[1]

    def run_pairs(
        self, x_BD: Tensor, ids_BK: Tensor, owners_U: Tensor, memory: Tensor, out_BKD: Tensor
    ) -> None:
        """Compute each token's outputs of its experts with torch, without router weights.

        If few experts are in memory, each computes all tokens and the unwanted outputs are masked;
        if many, the chosen experts' weights are gathered first, which reads and writes them once
        more.
        """
        if len(owners_U) > GATHERED_COST * ids_BK.numel():
            self._run_gathered(x_BD, ids_BK, owners_U, memory, out_BKD)
            return
        out_BKD.zero_()
        for place in range(len(owners_U)):
            owner = owners_U[place : place + 1]
            biases = None
            if self._biases is not None:
                known = owner.clamp_min(0)
                biases = tuple(part.index_select(0, known)[0] for part in self._biases)
            y_BD = self._multiply(x_BD, memory, place, biases)  # type: ignore[arg-type]
            is_own = (ids_BK == owner) & (ids_BK >= 0)
            out_BKD.copy_(torch.where(is_own[..., None], y_BD[:, None], out_BKD))

    def _run_gathered(
        self, x_BD: Tensor, ids_BK: Tensor, owners_U: Tensor, memory: Tensor, out_BKD: Tensor
    ) -> None:
        half = 2 * self._hidden * self._inner
        numbers = memory.view(self.dtype).view(len(owners_U), -1)
        # ``places`` maps an expert to its place in ``memory``. Empty places of the memory write to
        # one surplus entry at the end. A choice of -1 (no expert, or one that is computed
        # elsewhere) is looked up as expert 0, and its output is zeroed below.
        places = torch.zeros(self.num_experts + 1, dtype=torch.int64, device=owners_U.device)
        known = owners_U.where(owners_U >= 0, self.num_experts)
        places.index_copy_(0, known, torch.arange(len(owners_U), device=owners_U.device))
        ids_P = ids_BK.flatten().clamp_min(0)
        places_P = places.index_select(0, ids_P)
        gate_up = numbers[:, :half].index_select(0, places_P)
        down = numbers[:, half : self._num_items].index_select(0, places_P)
        x_P1D = x_BD.to(self.dtype).repeat_interleave(ids_BK.shape[1], 0)[:, None]
        hidden = x_P1D @ gate_up.view(-1, 2 * self._inner, self._hidden).mT
        if self._biases is not None:
            hidden = hidden + self._biases[0].index_select(0, ids_P)[:, None]
        weights = down.view(-1, self._hidden, self._inner)
        y_PD = (activate(self._activation, hidden) @ weights.mT).float()[:, 0]
        if self._biases is not None:
            y_PD = y_PD + self._biases[1].index_select(0, ids_P)
        out_BKD.copy_(y_PD.view_as(out_BKD).masked_fill(ids_BK[..., None] < 0, 0))

    def begin_sum(self, x_TD: Tensor, ids_TK: Tensor, w_TK: Tensor) -> LayerSum:
        """Begin a prompt's sum; the choices are copied to the host, which costs little for many
        tokens.
        """
        return _UnpackedSum(self, x_TD, ids_TK, w_TK)

    def find_biases(self, expert_id: int) -> tuple[Tensor, Tensor] | None:
        """Return an expert's biases of gate and up together, and of down; None if it has none."""
        if self._biases is None:
            return None
        return self._biases[0][expert_id], self._biases[1][expert_id]

    def multiply(self, x_TD: Tensor, memory: Tensor, place: int, expert_id: int) -> Tensor:
        """Return the output of the expert at ``place`` of the memory, float32 [T, D]."""
        return self._multiply(x_TD, memory, place, self.find_biases(expert_id))


class _UnpackedSum:
    """A prompt's sum over dequantized experts; each token's outputs are added by ascending
    expert.
    """

    def __init__(self, loads: UnpackedLoads, x_TD: Tensor, ids_TK: Tensor, w_TK: Tensor) -> None:
        self._loads, self._x = loads, x_TD
        top_k = ids_TK.shape[1]
        sorted_ids, order = torch.sort(ids_TK.flatten(), stable=True)
        bounds = torch.arange(loads.num_experts + 1, device=ids_TK.device)
        self._ranges = list(pairwise(torch.searchsorted(sorted_ids, bounds).tolist()))
        self._rows = order // top_k
        self._weights = w_TK.float().flatten()[order]
        self._out = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)

    def add(self, memory: Tensor, first: int, end: int) -> None:
        """Compute experts [first, end), whose weights lie one after the other in ``memory``, and
        add their outputs.
        """
        for expert_id in range(first, end):
            begin, stop = self._ranges[expert_id]
            if begin == stop:
                continue
            rows = self._rows[begin:stop]
            y = self._loads.multiply(self._x[rows], memory, expert_id - first, expert_id)
            # A token chooses an expert at most once, so no row index occurs twice in an expert's
            # share.
            self._out.index_add_(0, rows, y * self._weights[begin:stop, None])

    def take(self) -> Tensor:
        """Return the weighted sum of the layer's experts, float32 [T, D], after all were added."""
        return self._out
