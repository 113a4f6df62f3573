"""A prompt's routed experts, streamed to the device layer by layer.

In a step of many tokens nearly all experts of a layer are used, so they come in order: a thread of
the host writes a range of them to one of two places of staging memory while the other range is
copied and computed. The thread goes on with the next layer while the device is still at work
between the layers. Results do not depend on how a layer is cut into ranges.
"""

import queue
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.core.errors import DeadlineError
from tandem.kernels.device import Device, Event
from tandem.kernels.lanes.loads import ExpertLoads, LayerSum
from tandem.kernels.operators.experts import MAX_RUN_S

__all__ = ["RANGE_BYTES", "ExpertStream"]

RANGE_BYTES = 64 << 20
"""Experts that come together, so that a copy is far longer than what queueing it takes."""
NUM_PLACES = 2


class _Place(NamedTuple):
    """Memory of a range on both sides."""

    staging: Tensor
    memory: Tensor
    loaded: Event
    """The range is on the device, and its staging memory free."""
    used: Event
    """The device has computed with it."""


class _Range(NamedTuple):
    """Experts of a layer that have come, or are about to."""

    layer: int
    place: _Place
    first: int
    end: int


class ExpertStream:
    """Streams the experts of all layers, and sums them on the device. Not thread-safe.

    Args:
        device: takes and computes them.
        loads: of the layers that have experts, in order.
        range_bytes: of experts that come together, at most; one expert at least.
    """

    def __init__(
        self, device: Device, loads: Sequence[ExpertLoads], *, range_bytes: int = RANGE_BYTES
    ) -> None:
        self._device, self._loads = device, list(loads)
        self._range_bytes = range_bytes
        self._places: list[_Place] = []
        self._loading = device.make_stream()
        self._computing = device.make_stream()
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="tandem-stream")
        self._job: Future[None] | None = None
        self._free: queue.SimpleQueue[_Place | None] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[_Range | BaseException] = queue.SimpleQueue()
        self._next_layer = -1
        """The layer that the thread is at, or -1: it does nothing."""

    def close(self) -> None:
        """End the thread; idempotent."""
        self._stop()
        self._loader.shutdown()

    def run(self, layer: int, x_TD: Tensor, ids_TK: Tensor, w_TK: Tensor) -> Tensor:
        """Return the weighted sum of a layer's experts, float32 [T, D] on the device, new.

        Args:
            layer: number among those with experts. The experts of the one behind it are begun.
            x_TD: hidden states.
            ids_TK: int64; -1 adds nothing.
            w_TK: router weights.

        Raises: what staging or the device raises; the next call begins anew.
        """
        if layer != self._next_layer:
            self._begin(layer)
        try:
            total = self._sum(layer, x_TD, ids_TK, w_TK)
        except BaseException:
            self._stop()
            raise
        self._next_layer = layer + 1 if layer + 1 < len(self._loads) else -1
        return total

    def _sum(self, layer: int, x_TD: Tensor, ids_TK: Tensor, w_TK: Tensor) -> Tensor:
        device, stream, loads = self._device, self._computing, self._loads[layer]
        sums: list[LayerSum] = []
        results: list[Tensor] = []
        device.follow(stream)
        device.run(stream, lambda: sums.append(loads.begin_sum(x_TD, ids_TK, w_TK)), "begin")
        end = 0
        while end < loads.num_experts:
            arrived = self._take()
            assert (arrived.layer, arrived.first) == (layer, end), arrived
            place, end = arrived.place, arrived.end
            stream.wait(place.loaded)
            add = partial(_add, sums, place.memory, arrived.first, end)
            device.run(stream, add, f"experts {layer}")
            place.used.record(stream)
            self._free.put(place)
        device.run(stream, lambda: results.append(sums[0].take()), "sum")
        stream.synchronize()
        return results[0]

    def _take(self) -> _Range:
        try:
            arrived = self._ready.get(timeout=MAX_RUN_S)
        except queue.Empty as error:
            what = f"no expert came within {MAX_RUN_S} s"
            raise DeadlineError("kernels.stream_experts", what) from error
        if isinstance(arrived, BaseException):
            raise arrived
        return arrived

    def _begin(self, layer: int) -> None:
        """Let the thread begin with a layer, after it has left what it was at."""
        self._stop()
        if not self._places:
            self._places = self._make_places()
        self._free, self._ready = queue.SimpleQueue(), queue.SimpleQueue()
        for place in self._places:
            self._free.put(place)
        self._job = self._loader.submit(self._load, layer, self._free, self._ready)

    def _stop(self) -> None:
        if self._job is not None:
            self._free.put(None)
            self._job.exception(MAX_RUN_S)
            self._loading.synchronize()
        self._job, self._next_layer = None, -1

    def _make_places(self) -> list[_Place]:
        size = max(self._range_bytes, *(loads.expert_bytes for loads in self._loads))
        device = self._device
        return [
            _Place(
                device.allocate_staging(size),
                device.allocate(size),
                device.make_event(),
                device.make_event(),
            )
            for _ in range(NUM_PLACES)
        ]

    @torch.inference_mode()
    def _load(
        self,
        first_layer: int,
        free: "queue.SimpleQueue[_Place | None]",
        ready: "queue.SimpleQueue[_Range | BaseException]",
    ) -> None:
        """Bring range after range, as places become free; the thread's work."""
        try:
            for layer in range(first_layer, len(self._loads)):
                loads = self._loads[layer]
                count = max(1, self._range_bytes // loads.expert_bytes)
                for first in range(0, loads.num_experts, count):
                    place = free.get()
                    if place is None:
                        return
                    end = min(first + count, loads.num_experts)
                    self._bring(loads, place, first, end)
                    ready.put(_Range(layer, place, first, end))
        except BaseException as error:  # noqa: BLE001 - raised by ``run``.
            ready.put(error)

    def _bring(self, loads: ExpertLoads, place: _Place, first: int, end: int) -> None:
        size = loads.expert_bytes
        place.loaded.synchronize()
        for i, expert_id in enumerate(range(first, end)):
            loads.stage(expert_id, place.staging[i * size : (i + 1) * size])
        self._loading.wait(place.used)
        taken = (end - first) * size
        self._device.copy(place.staging[:taken], place.memory[:taken], self._loading)
        place.loaded.record(self._loading)


def _add(sums: list[LayerSum], memory: Tensor, first: int, end: int) -> None:
    sums[0].add(memory, first, end)
