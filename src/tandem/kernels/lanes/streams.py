"""Streaming of a prompt's routed experts to the device, layer by layer.

A step of many tokens uses nearly all experts of a layer, so they are copied in order: a host thread
writes a range of experts to one of two staging buffers while the previous range is copied and
computed. The thread continues with the next layer while the device works on other parts of the
model. Results do not depend on how a layer is cut into ranges.
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
"""Bytes of experts that are copied together: a copy takes far longer than queueing it."""
NUM_PLACES = 2


class _Place(NamedTuple):
    """The staging memory on the host and the memory on the device for one range of experts."""

    staging: Tensor
    memory: Tensor
    loaded: Event
    """Event that is recorded after the range's copy to the device: from then on the staging memory
    is free again.
    """
    used: Event
    """Event that is recorded after the device has computed with the range: from then on the device
    memory is free again.
    """


class _Range(NamedTuple):
    """A range of a layer's experts that is being copied to the device, or has been."""

    layer: int
    place: _Place
    first: int
    end: int


class ExpertStream:
    """Streaming of all layers' experts to a device, which sums their outputs. Not thread-safe.

    Args:
        device: device that computes the experts.
        loads: the layers that have experts, in order.
        range_bytes: most bytes of experts copied together; at least one expert is.
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
        """Layer whose experts the loading thread copies next; -1: the thread is idle."""

    def close(self) -> None:
        """End the thread that loads experts; idempotent."""
        self._stop()
        self._loader.shutdown()

    def run(self, layer: int, x_TD: Tensor, ids_TK: Tensor, w_TK: Tensor) -> Tensor:
        """Return the weighted sum of a layer's experts, float32 [T, D] on the device, new.

        Args:
            layer: index among the layers with experts. Loading of the next layer's experts begins
                too.
            x_TD: hidden states.
            ids_TK: expert ids, int64; -1 adds nothing.
            w_TK: router weights.

        Raises: errors of staging or of the device; the next call starts afresh.
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
        """Let the loading thread copy experts from this layer on, after stopping what it did
        before.
        """
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
        """Copy range after range to the device as buffers become free; runs in the loading
        thread.
        """
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
