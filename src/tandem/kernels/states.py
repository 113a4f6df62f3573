"""Recurrent states of sequences: a pool of slots, beside the pool of KV blocks.

A running sequence has a slot, which each of its steps reads and updates; a slot that no running
sequence uses is a snapshot. A slot is contiguous (``StateLayout``), so it can be copied, sent and
stored as a whole.
"""

from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.core.errors import ShapeError, UnsupportedError
from tandem.core.state_layout import StateLayout
from tandem.kernels.cpu.device import CPU
from tandem.kernels.device import Device
from tandem.kernels.gated_delta import StateSlots
from tandem.kernels.native import TORCH_DTYPES, Buffer
from tandem.kernels.paged import wrap_memory

__all__ = ["StateCache"]


class StateCache:
    """The state slots of one model on one device, and the views of them that operators use.

    Args:
        layout: layout of a state.
        num_slots: slots in the pool; ids are 0 to ``num_slots - 1``.
        device: device of the slots.
        memory: memory to use as in ``PagedKvCache``, of ``num_slots * layout.bytes_per_state``
            bytes. Its contents do not matter: a sequence's first token clears its slot.

    Raises:
        ShapeError: ``memory`` is too small, not contiguous or not aligned.
        UnsupportedError: read-only ``memory``, or ``memory`` for another device.
    """

    def __init__(
        self,
        layout: StateLayout,
        num_slots: int,
        *,
        device: Device = CPU,
        memory: Tensor | memoryview | NDArray[np.uint8] | None = None,
    ) -> None:
        size_bytes = num_slots * layout.bytes_per_state
        if memory is None:
            tensor = device.allocate(size_bytes)
        elif isinstance(memory, Tensor):
            tensor = memory[:size_bytes]
        else:
            tensor = wrap_memory(memory, size_bytes, device)
        self.layout = layout
        self.device = device
        self.num_slots = num_slots
        self.tensor = tensor.view(torch.uint8).view(num_slots, layout.bytes_per_state)
        """All slots as bytes, uint8 [slots, bytes of a state]."""
        self.layers = [self._view_layer(i) for i in range(layout.num_layers)]
        """Views of the slots for each layer, by its index among the layers with a state."""

    def _view_layer(self, state_idx: int) -> StateSlots:
        layout, place = self.layout, self.layout.layer_slice(state_idx)
        dtype = TORCH_DTYPES[layout.dtype]
        recurrent = self._view_part(place.recurrent, layout.recurrent_shape, torch.float32)
        return StateSlots(recurrent, self._view_part(place.carried, layout.carried_shape, dtype))

    def _view_part(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Buffer:
        part = self.tensor[:, offset : offset + prod(shape) * dtype.itemsize]
        if not prod(shape):
            return Buffer(torch.empty(self.num_slots, *shape, dtype=dtype, device=part.device))
        return Buffer(part.view(dtype).unflatten(1, shape))

    def copy(self, source: int, target: int) -> None:
        """Copy a slot, the states of a sequence in all layers, to another.

        Raises: ShapeError (there is no such slot).
        """
        self._check(source, target)
        self.tensor[target] = self.tensor[source]

    def clear(self, slot: int) -> None:
        """Zero a slot: the state before a sequence's first token.

        Raises: ShapeError (there is no such slot).
        """
        self._check(slot)
        self.tensor[slot] = 0

    def view_bytes(self) -> NDArray[np.uint8]:
        """Return all slots as bytes, one after the other; shares the memory.

        Raises: UnsupportedError (the slots are not in host memory).
        """
        if not self.device.is_host:
            raise UnsupportedError(
                "kernels.view_state_bytes",
                f"the slots are on {self.device.torch_device}: only the host's are seen",
            )
        flat: Any = self.tensor.view(-1).numpy()
        return flat

    def _check(self, *slots: int) -> None:
        for slot in slots:
            if not 0 <= slot < self.num_slots:
                raise ShapeError(
                    "kernels.state_slot",
                    f"slot {slot} of {self.num_slots}: pass 0 to {self.num_slots - 1}",
                )
