"""The lane by which missed experts of a decode step are uploaded, beside the one of the host.

Which experts go by it is decided when a layer has chosen; how many a layer uploads, once a step,
as a graph has so many places. ``placement.experts.lanes`` learns that number from the times that
are taken here. Where layers have slots in the device's memory, uploads fill them, and experts that
are in one are the device's without an upload.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tandem.kernels.device import Device
from tandem.kernels.lanes.loads import ExpertLoads
from tandem.kernels.lanes.places import Landing
from tandem.kernels.lanes.slots import ExpertSlots

__all__ = ["Division", "Split", "UploadLane"]

REFILL_STEPS = 8
"""Steps of which one uploads an expert for the slots even where the host alone is faster: what is
chosen most changes, and slots must follow."""


class Division(NamedTuple):
    """The experts of a layer that the device computes."""

    on_device: NDArray[np.int64]
    uploads: list[int]
    """Those of them that are uploaded, in the order of their uploads."""


class Split(Protocol):
    """Divides a step's missed experts; ``placement.experts.lanes.LaneSplit`` is one."""

    def choose(self, num_missed: int) -> int:
        """Return how many of so many are uploaded."""
        ...

    def note(self, num_host: int, host_s: float, num_uploaded: int, upload_s: float) -> None:
        """Take in how long each lane took."""
        ...


class UploadLane:
    """Places for uploaded experts, used by layers in turn, and the times of both lanes.

    Args:
        device: takes them.
        loads: by layer; None where a layer has no experts.
        split: decides how many.
        max_uploads: of a layer, a power of two.
        slots: by layer, made for as many uploads; empty: experts do not stay on the device.
        read_clock: seconds.
    """

    def __init__(
        self,
        device: Device,
        loads: Sequence[ExpertLoads | None],
        split: Split,
        *,
        max_uploads: int,
        slots: Sequence[ExpertSlots | None] = (),
        read_clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert max_uploads & (max_uploads - 1) == 0, max_uploads
        self.loads = loads
        held = [one for one in loads if one is not None]
        expert_bytes = max(one.expert_bytes for one in held)
        self.there = Landing(device.allocate_staging, max_uploads, expert_bytes)
        self.here = Landing(device.allocate, max_uploads, expert_bytes)
        self._slots = slots
        self._held_slots = [one for one in slots if one is not None]
        self._num_steps = 0
        self._num_layers = len(held)
        self._max_uploads = max_uploads
        self._split = split
        self._read_clock = read_clock
        self._num_missed = 0
        """Experts of the step before, over all layers."""
        self._begin_s = 0.0
        self.begin_step()

    def choose_count(self) -> int:
        """Return how many experts each layer of the next step uploads: none or a power of two.

        The first step tells how many there are, and uploads none.
        """
        each = min(round(self._split.choose(self._num_missed) / self._num_layers),
                   self._max_uploads)  # fmt: skip
        self._num_steps += 1
        is_filling = not all(slots.is_full for slots in self._held_slots)
        if self._held_slots and (is_filling or self._num_steps % REFILL_STEPS == 0):
            each = max(each, 1)
        return 1 << (each.bit_length() - 1) if each > 0 else 0

    @property
    def counts(self) -> tuple[int, int]:
        """Experts of all steps that were in a slot, and that were in none."""
        slots = self._held_slots
        return sum(one.num_hits for one in slots), sum(one.num_missed for one in slots)

    def find_slots(self, layer_idx: int) -> ExpertSlots | None:
        """Return a layer's slots; None: its experts do not stay on the device."""
        return self._slots[layer_idx] if self._slots else None

    def begin_step(self) -> None:
        """Forget what the last step took."""
        self._num_host = self._num_uploaded = 0
        self._host_s = self._upload_s = 0.0

    def end_step(self) -> None:
        """Tell the split what the step took."""
        self._num_missed = self._num_host + self._num_uploaded
        if self._num_missed:
            self._split.note(self._num_host, self._host_s, self._num_uploaded, self._upload_s)

    def divide(self, layer_idx: int, ids_TK: NDArray[np.int64], count: int) -> Division:
        """Divide a layer's experts: those that most tokens chose are uploaded.

        Args:
            layer_idx: of the layer.
            ids_TK: its choices; -1 is none.
            count: uploads at most.
        """
        self._begin_s = self._read_clock()
        found, uses = np.unique(ids_TK[ids_TK >= 0], return_counts=True)
        found = found[np.lexsort((found, -uses))]
        slots = self.find_slots(layer_idx)
        if slots is None:
            on_device = found[:count]
            uploads = on_device.tolist()
            owners = self.there.owners_U.numpy()
            owners[:] = -1
            owners[: len(uploads)] = uploads
        else:
            uploads = slots.admit(found.tolist(), count)
            known = [expert_id in uploads or slots.holds(expert_id) for expert_id in found.tolist()]
            on_device = found[np.asarray(known, bool)]
        self._num_host += len(found) - len(on_device)
        self._num_uploaded += len(uploads)
        return Division(on_device, uploads)

    def stage(self, layer_idx: int, expert_ids: Sequence[int]) -> None:
        """Write experts of a layer to the staging memory."""
        loads = self.loads[layer_idx]
        assert loads is not None, "a layer without experts"
        size = loads.expert_bytes
        for place, expert_id in enumerate(expert_ids):
            loads.stage(expert_id, self.there.memory[place * size : (place + 1) * size])

    def clear(self) -> None:
        """Give up all slots, after a step that has failed: it may have put anything there."""
        for slots in self._held_slots:
            slots.clear()

    def note_uploaded(self) -> None:
        """Note that the device has computed a layer's experts."""
        self._upload_s += self._read_clock() - self._begin_s

    def time_host(self, work: Callable[[], None]) -> None:
        """Do the host's part of a layer."""
        begin_s = self._read_clock()
        work()
        self._host_s += self._read_clock() - begin_s
