"""Host memory beside a device's KV blocks or states, and the copies between the two.

Lower tiers read and write host memory only. Data that they store is copied to the host first. Data
that they have loaded is copied to the device by the next step, layer by layer on a separate stream:
the attention of a layer waits for that layer's copies, while those of later layers continue.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tandem.kernels.device import Device, Event
from tandem.kernels.paged import LayerPlace

__all__ = ["HostMirror", "KvArrivals"]


class KvArrivals:
    """Copies to the device that a step waits for, layer by layer.

    Args:
        device: makes operators wait.
        events: for each group of layers (``LayerPlace.group``), the event of each layer's copies;
            empty: nothing of the group is copied.
    """

    def __init__(self, device: Device, events: Sequence[Sequence[Event]]) -> None:
        self._device, self._events = device, events

    def wait(self, place: LayerPlace) -> None:
        """Let later operators begin only once a layer's KV that is being copied has arrived on the
        device.
        """
        events = self._events[place.group] if place.group < len(self._events) else ()
        if events:
            self._device.wait(events[place.layer_idx])

    def wait_all(self) -> None:
        """Let later operators begin only once the KV of all layers that is being copied has arrived
        on the device.
        """
        for events in self._events:
            if events:
                self._device.wait(events[-1])


class HostMirror:
    """Pinned host memory for items (blocks or states) that lie on a device, under the same numbers.

    Args:
        device: has the items, and makes the host memory.
        items: the memory on the device, uint8 [items, bytes of an item], contiguous.
        layers: first byte and number of bytes of each layer within an item, in order.
    """

    def __init__(self, device: Device, items: Tensor, layers: Sequence[tuple[int, int]]) -> None:
        self._device, self._items, self._layers = device, items, list(layers)
        self._memory = device.allocate_staging(items.numel()).view(items.shape)
        self._loading, self._saving = device.make_stream(), device.make_stream()
        self._events = [device.make_event() for _ in self._layers]

    def view_bytes(self) -> NDArray[np.uint8]:
        """Return the mirror's host memory as bytes, one item (block or state) after the other;
        shares the memory.
        """
        return self._memory.view(-1).numpy()

    def save(self, numbers: Sequence[int]) -> None:
        """Copy items (blocks or states) from the device to the host; return when they are there.
        The caller ensures that no step writes them.
        """
        for number in numbers:
            self._device.copy(self._items[number], self._memory[number], self._saving)
        if numbers:
            self._saving.synchronize()

    def load(self, numbers: Sequence[int]) -> list[Event]:
        """Begin to copy items to the device; return the event of each layer.

        The copies follow operators that were called before. The host memory must not change until
        the last event has happened.
        """
        self._device.follow(self._loading)
        for (first, size), event in zip(self._layers, self._events, strict=True):
            for number in numbers:
                source = self._memory[number, first : first + size]
                target = self._items[number, first : first + size]
                self._device.copy(source, target, self._loading)
            event.record(self._loading)
        return self._events

    def finish_loads(self) -> None:
        """Wait on the host until the copies to the device that were begun have ended."""
        self._loading.synchronize()
