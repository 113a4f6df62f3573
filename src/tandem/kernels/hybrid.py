"""A decode step with attention on a device and routed experts on the host, as one graph.

The device's stream computes a layer up to its router's choice, copies the experts' inputs to
staging memory, and reaches a host function that submits the experts to a thread of the host. The
device continues with the shared experts, until a second host function waits for the sum, which is
copied back. Host functions are ordinary work of the stream, so all layers are captured in one
graph, made once for each batch size. A smaller batch launches the graph of the next size; the host
computes only the batch's own rows.

Staging memory has fixed places, two for each batch size, which layers use alternately: one layer's
may be written while the previous layer's deferred experts are computed from the other. Deferral
follows ``kernels.routing`` and is part of the graph: late experts are submitted after the immediate
ones, and the next layer's wait adds their sum.

An error of an expert on the host is kept; later host functions of that launch do nothing, the
device completes its work, and ``run`` raises the error.

Shapes: B tokens of the graph, T of the batch, D hidden, K experts per token.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tandem.core.errors import UnsupportedError
from tandem.kernels.device import Device, Graph, Stream
from tandem.kernels.lanes.pairs import sum_pairs
from tandem.kernels.lanes.places import Pairs, Places, Staging
from tandem.kernels.lanes.uploads import UploadLane
from tandem.kernels.native import Buffer
from tandem.kernels.operators.experts import MAX_RUN_S
from tandem.kernels.operators.moe import ExpertChoice
from tandem.kernels.routing import StepRouting

__all__ = ["BATCH_SIZES", "HostExperts", "HybridDecoder", "LayeredStep", "find_size"]

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Token counts of graphs: padding at most doubles a batch, and only few graphs are made."""


def find_size(num_tokens: int) -> int:
    """Return the token count of the captured graph that runs a batch of ``num_tokens``: the next
    larger one; the batch is padded to it.
    """
    return next((size for size in BATCH_SIZES if size >= num_tokens), num_tokens)


class LayeredStep(Protocol):
    """A step that can be interrupted in each layer after the router, so that the host computes the
    experts meanwhile.
    """

    def begin_(self) -> None:
        """Compute what all layers derive from the batch, such as angles, inside a captured step."""
        ...

    def choose_experts_(self, layer: nn.Module, x_TD: Tensor) -> ExpertChoice | None:
        """Run a layer up to its router's choice; None: it has no experts and is complete."""
        ...

    def run_shared_(self, choice: ExpertChoice) -> None:
        """Add the output of the shared experts to the residual stream."""
        ...

    def leave_sum_(self, out_TD: Buffer) -> None:
        """Leave the experts' weighted sum to be added to the residual stream, by the next norm."""
        ...

    def complete_(self, x_TD: Tensor) -> None:
        """Add to the residual stream what the last layer left for the next norm (see
        ``leave_sum_``), if anything; call it after the last layer.
        """
        ...


class HostExperts(Protocol):
    """A layer's routed experts that the host computes, beside a device that computes the rest."""

    def run(self, x_TD: Buffer, ids_TK: Buffer, w_TK: Buffer, out_TD: Buffer, /) -> None:
        """Write the experts' weighted sum for all tokens to a float32 buffer [T, D]."""
        ...


@dataclass(slots=True)
class _Batch:
    """The captured graphs for one number of tokens, their fixed memory, and the step that is
    running.
    """

    size: int
    on_device: Places
    staging: tuple[Staging, Staging]
    pairs: tuple[Pairs, Pairs] | None = None
    """Buffers on the device and in staging memory for separate expert outputs; None: none are
    uploaded.
    """
    graphs: dict[int, Graph] = field(default_factory=dict)
    """Graphs by the number of experts that each layer uploads."""
    step: LayeredStep | None = None
    routing: StepRouting | None = None
    hidden: Tensor | None = None
    """Residual stream of the step, [T, D] (tokens, hidden size)."""
    num_live: int = 0
    choice: ExpertChoice | None = None
    computed: Tensor | None = None
    """Expert outputs that the device computed in the running layer, [B, K, D] (tokens, chosen
    experts, hidden size).
    """
    jobs: "list[Future[None]]" = field(default_factory=list)
    """Futures of the host's work on the running layer's experts; deferred experts of the previous
    layer come first.
    """
    failure: BaseException | None = None


class HybridDecoder:
    """Runs decode steps layer by layer, with routed experts on the host.

    Not thread-safe: one step at a time.

    Args:
        device: device that computes everything but routed experts.
        layers: the model's layers in order; passed to the step.
        experts: experts on the host, by layer; None for a layer without.
        has_shared: by layer, True if the step has work for ``run_shared_``.
        shape: (D, K).
        dtype: the model's dtype.
        num_deferred: experts of a token that are added one layer later.
        is_captured: True if steps are captured as graphs; otherwise their work is queued each time.
        lane: uploads some experts, which the device then computes; None: the host computes all.

    Raises: UnsupportedError (experts would be deferred into a layer that has none).
    """

    def __init__(
        self,
        device: Device,
        layers: Sequence[nn.Module],
        experts: Sequence[HostExperts | None],
        shape: tuple[int, int],
        dtype: torch.dtype,
        *,
        has_shared: list[bool],
        num_deferred: int = 0,
        is_captured: bool = True,
        lane: UploadLane | None = None,
    ) -> None:
        self._device, self._layers, self._experts = device, layers, experts
        self._lane = lane
        self._has_shared = has_shared
        self._shape, self._dtype = shape, dtype
        self._num_deferred = num_deferred
        self._is_captured = is_captured
        have = [one is not None for one in experts]
        first = have.index(True) if True in have else len(have)
        if num_deferred and not all(have[first:]):
            what = "a layer without experts follows one that defers: serve with deferred_experts 0"
            raise UnsupportedError("kernels.hybrid", what)
        self._stream: Stream = device.make_stream()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="tandem-hybrid")
        self._batches: dict[tuple[int, tuple[int, ...]], _Batch] = {}

    def close(self) -> None:
        """End the experts' thread and free the graphs, whose host functions refer to them."""
        self._worker.shutdown()
        self._batches.clear()

    def run(
        self,
        step: LayeredStep,
        routing: StepRouting | None,
        hidden_TD: Tensor,
        *,
        num_live: int | None = None,
        is_captured: bool | None = None,
        key: tuple[int, ...] = (),
    ) -> None:
        """Run all layers on the residual stream, in place.

        A captured graph keeps the addresses of its operators' memory: later steps of the same size
        must use the same addresses, also for ``hidden_TD``. The simulated device calls the step
        anew.

        Args:
            step: runs the layers.
            routing: defers experts; None: none are.
            hidden_TD: residual stream of all the step's tokens; changed in place.
            num_live: tokens whose experts are computed; None: all.
            is_captured: True to capture this step as a graph; None: as set for the decoder.
            key: distinguishes graphs of equally many tokens that use different memory.

        Raises: the errors of the experts and of the device; the step may then be run again.
        """
        num_live = len(hidden_TD) if num_live is None else num_live
        is_captured = self._is_captured if is_captured is None else is_captured
        size = find_size(len(hidden_TD))
        batch = self._batches.get((size, key))
        if batch is None:
            batch = self._batches[size, key] = self._make_batch(size)
        batch.step, batch.routing, batch.hidden = step, routing, hidden_TD
        batch.num_live, batch.failure, batch.jobs = num_live, None, []
        lane, count = self._lane, 0
        if lane is not None:
            count = lane.choose_count()
            lane.begin_step()
        self._device.follow(self._stream)
        try:
            if not is_captured:
                self._queue(batch, count)
            else:
                if count not in batch.graphs:
                    work = partial(self._queue, batch, count)
                    batch.graphs[count] = self._device.capture(self._stream, work)
                self._device.launch(batch.graphs[count], self._stream)
            self._stream.synchronize()
        except BaseException as error:  # noqa: BLE001 - raised below.
            batch.failure = error
        finally:
            # The host's jobs may still read the staging memory, so the step waits for them even
            # after an error.
            for job in batch.jobs:
                job.exception(MAX_RUN_S)
            batch.jobs = []
        if batch.failure is not None:
            if lane is not None:
                lane.clear()
            raise batch.failure
        if lane is not None:
            lane.end_step()

    def discard(self, is_stale: Callable[[tuple[int, ...]], bool]) -> None:
        """Free the captured graphs whose keys (see ``run``) are stale by ``is_stale``, as the
        memory that they use has moved.
        """
        stale = [named for named in self._batches if is_stale(named[1])]
        for named in stale:
            self._batches.pop(named).graphs.clear()

    def _make_batch(self, size: int) -> _Batch:
        device, shape = self._device, (size, *self._shape)
        staging = [Staging(device.allocate_staging, shape, self._dtype) for _ in range(2)]
        on_device = Places(device.allocate, shape, self._dtype)
        batch = _Batch(size, on_device, (staging[0], staging[1]))
        if self._lane is not None:
            batch.pairs = (Pairs(device.allocate, shape), Pairs(device.allocate_staging, shape))
        return batch

    def _queue(self, batch: _Batch, count: int) -> None:
        """Queue a step's work on the stream, with ``count`` uploaded experts in each layer.

        This reads no tensor's values, so it can be captured.
        """
        device, stream, here = self._device, self._stream, batch.on_device
        device.run(stream, partial(self._begin, batch), "begin")
        for layer_idx, layer in enumerate(self._layers):
            device.run(stream, partial(self._choose, batch, layer), f"layer {layer_idx}")
            if self._experts[layer_idx] is None:
                continue
            there = batch.staging[layer_idx % 2]
            device.copy(here.x_BD, there.x_BD, stream)
            device.copy(here.ids_BK, there.ids_BK, stream)
            device.copy(here.weights_BK, there.weights_BK, stream)
            if self._num_deferred:
                device.copy(here.late_BK, there.late_BK, stream)
            submit = partial(self._submit, batch, layer_idx, count)
            device.call_host(stream, submit, f"submit {layer_idx}")
            shares = self._shares(layer_idx, count)
            if shares:
                self._queue_lane(batch, layer_idx, count)
            if self._has_shared[layer_idx]:
                device.run(stream, partial(self._run_shared, batch), f"shared {layer_idx}")
            wait = partial(self._wait, batch, layer_idx, count)
            device.call_host(stream, wait, f"wait {layer_idx}")
            leave = partial(self._leave_sum, batch)
            if shares:
                assert batch.pairs is not None, "no lane"
                device.copy(batch.pairs[1].host_BKD, batch.pairs[0].host_BKD, stream)
                leave = partial(self._leave_pairs, batch, layer_idx)
            if not shares or self._is_carried(layer_idx):
                device.copy(there.sum_BD, here.sum_BD, stream)
            device.run(stream, leave, f"sum {layer_idx}")
        device.run(stream, partial(self._complete, batch), "end")

    def _queue_lane(self, batch: _Batch, layer_idx: int, count: int) -> None:
        """Queue the upload of ``count`` of a layer's experts to the device, and its computation
        with them.
        """
        device, stream, lane = self._device, self._stream, self._lane
        assert lane is not None, "no lane"
        assert batch.pairs is not None, "no lane"
        loads, slots = lane.loads[layer_idx], lane.find_slots(layer_idx)
        assert loads is not None, "a layer without experts"
        there, here = (side.take(count, loads.expert_bytes) for side in (lane.there, lane.here))
        if count:
            device.copy(there[0], here[0], stream)
        if slots is None:
            device.copy(there[1], here[1], stream)
        else:
            device.copy(slots.owners_there_P, slots.owners_P, stream)
            if count:
                device.copy(slots.places_there_U, slots.places_U, stream)
                device.run(stream, partial(slots.put, here[0]), f"put {layer_idx}")
            here = (slots.memory, slots.owners_P)
        device.copy(batch.pairs[1].on_device_BK, batch.pairs[0].on_device_BK, stream)
        work = partial(self._run_here, batch, layer_idx, here)
        device.run(stream, work, f"upload {layer_idx}")
        device.call_host(stream, lane.note_uploaded, f"uploaded {layer_idx}")

    # Methods that queue work on the device's stream.

    def _begin(self, batch: _Batch) -> None:
        assert batch.step is not None, "no step"
        batch.step.begin_()

    def _choose(self, batch: _Batch, layer: nn.Module) -> None:
        step, here = batch.step, batch.on_device
        assert step is not None and batch.hidden is not None, "no step"
        choice = batch.choice = step.choose_experts_(layer, batch.hidden)
        if choice is None:
            return
        weights_TK, ids_TK = choice.weights.tensor.float(), choice.ids.tensor
        late_TK = None
        if self._num_deferred and batch.routing is not None:
            ids_TK, late_TK = batch.routing.split(ids_TK, weights_TK)
        # The step's tensors set the number of rows: on a GPU they also hold the padding rows of the
        # graph.
        num_rows = len(ids_TK)
        here.x_BD[:num_rows] = choice.x.tensor
        here.ids_BK[:num_rows] = ids_TK
        here.weights_BK[:num_rows] = weights_TK
        if self._num_deferred:
            here.late_BK[:num_rows] = -1 if late_TK is None else late_TK

    def _run_shared(self, batch: _Batch) -> None:
        assert batch.step is not None and batch.choice is not None, "no choice"
        batch.step.run_shared_(batch.choice)

    def _leave_sum(self, batch: _Batch) -> None:
        assert batch.step is not None and batch.hidden is not None, "no step"
        batch.step.leave_sum_(Buffer(batch.on_device.sum_BD[: len(batch.hidden)]))

    def _run_here(self, batch: _Batch, layer_idx: int, places: tuple[Tensor, Tensor]) -> None:
        assert self._lane is not None, "no lane"
        assert batch.pairs is not None, "no lane"
        assert batch.hidden is not None, "no step"
        loads, here, rows = self._lane.loads[layer_idx], batch.on_device, len(batch.hidden)
        assert loads is not None, "a layer without experts"
        ids_BK = batch.pairs[0].on_device_BK[:rows]
        shape = (*ids_BK.shape, self._shape[0])
        batch.computed = torch.empty(shape, dtype=torch.float32, device=ids_BK.device)
        memory, owners = places
        loads.run_pairs(here.x_BD[:rows], ids_BK, owners, memory, batch.computed)

    def _leave_pairs(self, batch: _Batch, layer_idx: int) -> None:
        assert batch.step is not None and batch.hidden is not None, "no step"
        assert batch.computed is not None and batch.pairs is not None, "no lane"
        here, rows = batch.on_device, len(batch.hidden)
        # For each (token, expert) pair one of the two addends is zero: either the device or the
        # host computed that pair.
        outputs_BKD = batch.computed + batch.pairs[0].host_BKD[:rows]
        ids_BK, weights_BK = here.ids_BK[:rows], here.weights_BK[:rows]
        if self._device.has_native_kernels:
            sum_BD = sum_pairs(ids_BK, weights_BK, outputs_BKD)
        else:
            # Without native kernels the device rounds its products differently from the host, so
            # the order of the sum need not match the host's.
            sum_BD = (outputs_BKD * weights_BK[..., None]).sum(1)
        if self._is_carried(layer_idx):
            sum_BD += here.sum_BD[:rows]
        batch.step.leave_sum_(Buffer(sum_BD))

    def _complete(self, batch: _Batch) -> None:
        assert batch.step is not None and batch.hidden is not None, "no step"
        batch.step.complete_(batch.hidden)

    # Methods that run on the host as callbacks of the device's stream.

    # Staging memory is allocated under inference mode and may only be changed under that mode,
    # which the thread that runs the device's callbacks has not entered.
    @torch.inference_mode()
    def _submit(self, batch: _Batch, layer_idx: int, count: int) -> None:
        """Give the layer's experts to the host's thread to compute; return at once, or after
        experts to upload were written to staging memory.
        """
        lane = self._lane
        if batch.failure is not None:
            if batch.pairs is not None:
                # After a failure the device still runs to the end of the step, so it is given no
                # experts to compute.
                batch.pairs[1].on_device_BK.fill_(-1)
            return
        experts, there, num_live = (
            self._experts[layer_idx],
            batch.staging[layer_idx % 2],
            batch.num_live,
        )
        assert experts is not None, "a layer without experts"
        x, weights = Buffer(there.x_BD[:num_live]), Buffer(there.weights_BK[:num_live])
        ids, late = Buffer(there.ids_BK[:num_live]), Buffer(there.late_BK[:num_live])
        out, carried = Buffer(there.sum_BD[:num_live]), Buffer(there.carried_BD[:num_live])
        work = partial(experts.run, x, ids, weights, out)
        uploads: list[int] = []
        if lane is not None:
            on_device, uploads = lane.divide(layer_idx, there.ids_BK[:num_live].numpy(), count)
            if self._shares(layer_idx, count):
                work = self._divide(batch, experts, there, on_device)
            work = partial(lane.time_host, work)
        batch.jobs.append(self._worker.submit(work))
        if self._defers(layer_idx):
            batch.jobs.append(self._worker.submit(experts.run, x, late, weights, carried))
        if lane is not None and uploads:
            try:
                lane.stage(layer_idx, uploads)
            except BaseException as error:  # noqa: BLE001 - raised by ``run``.
                batch.failure = error

    def _divide(
        self, batch: _Batch, experts: HostExperts, there: Staging, on_device: NDArray[np.int64]
    ) -> Callable[[], None]:
        """Return the host's part of a layer whose other experts the device computes.

        Each expert's output is kept separate, so that the order of the sum is the same wherever it
        was computed.
        """
        assert batch.pairs is not None, "no lane"
        pairs, num_live, top_k = batch.pairs[1], batch.num_live, self._shape[1]
        ids_TK = there.ids_BK[:num_live]
        is_there = torch.from_numpy(np.isin(ids_TK.numpy(), on_device))
        pairs.on_device_BK[:num_live] = ids_TK.masked_fill(~is_there, -1)
        # Padding rows of the graph repeat the experts of the first row.
        pairs.on_device_BK[num_live:] = pairs.on_device_BK[:1]
        host_P1 = ids_TK.masked_fill(is_there, -1).view(-1, 1)
        x_PD = there.x_BD[:num_live].repeat_interleave(top_k, 0)
        ones_P1 = torch.ones(len(host_P1), 1)
        out_PD = pairs.host_BKD[:num_live].view(len(host_P1), -1)
        return partial(experts.run, *map(Buffer, (x_PD, host_P1, ones_P1, out_PD)))

    @torch.inference_mode()
    def _wait(self, batch: _Batch, layer_idx: int, count: int) -> None:
        """Wait until the host has computed the layer's experts, and those that the previous layer
        deferred to this one.
        """
        if batch.failure is not None:
            return
        there, before = batch.staging[layer_idx % 2], batch.staging[1 - layer_idx % 2]
        is_carried, shares = self._is_carried(layer_idx), self._shares(layer_idx, count)
        due = 2 if is_carried else 1
        try:
            for job in batch.jobs[:due]:
                job.result(MAX_RUN_S)
        except BaseException as error:  # noqa: BLE001 - raised by ``run``.
            batch.failure = error
            there.sum_BD.zero_()
            return
        del batch.jobs[:due]
        if is_carried:
            num_live = batch.num_live
            if shares:
                there.sum_BD[:num_live] = before.carried_BD[:num_live]
            else:
                there.sum_BD[:num_live].add_(before.carried_BD[:num_live])
        self._fill_up(batch, there, shares=shares)

    def _fill_up(self, batch: _Batch, there: Staging, *, shares: bool) -> None:
        """Copy the first token's expert outputs to the rows that pad the batch to the size of its
        captured graph.

        Padding rows repeat the first token and write its KV again, which must be the same.
        """
        assert batch.hidden is not None, "no step"
        num_live, num_rows = batch.num_live, len(batch.hidden)
        if num_rows == num_live:
            return
        there.sum_BD[num_live:num_rows] = there.sum_BD[:1]
        if shares:
            assert batch.pairs is not None, "no lane"
            host_BKD = batch.pairs[1].host_BKD
            host_BKD[num_live:num_rows] = host_BKD[:1]

    def _shares(self, layer_idx: int, count: int) -> bool:
        """Return True if the device computes some of a layer's experts: uploaded ones, or those in
        its slots.
        """
        lane = self._lane
        return count > 0 or (lane is not None and lane.find_slots(layer_idx) is not None)

    def _is_carried(self, layer_idx: int) -> bool:
        """Return True if the previous layer deferred experts, so that this layer must add their
        outputs.
        """
        return layer_idx > 0 and self._defers(layer_idx - 1)

    def _defers(self, layer_idx: int) -> bool:
        is_last = layer_idx == len(self._layers) - 1
        return bool(self._num_deferred) and self._experts[layer_idx] is not None and not is_last
