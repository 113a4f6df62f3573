"""Upload of a decode step's experts to the device, in parallel with the host's computation.

The experts to upload are chosen in each layer after routing; how many each layer uploads is chosen
once a step, since a captured graph has a fixed number of places. ``placement.experts.lanes`` learns
that number from the times measured here. If layers have slots in the device's memory, uploads fill
them, and the device computes experts in slots without an upload.
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
"""Interval, in steps, at which an expert is uploaded for the slots even if the host alone is
faster, so that the slots follow changes in which experts are chosen.
"""


class Division(NamedTuple):
    """The experts of a layer's choice that are computed on the device, and which of these must
    be uploaded first.
    """

    on_device: NDArray[np.int64]
    uploads: list[int]
    """Experts of the layer's choices that are uploaded to the device, in the order of their
    uploads.
    """


class Split(Protocol):
    """Decision how many of a step's experts are uploaded; ``placement.experts.lanes.LaneSplit``
    implements it.
    """

    def choose(self, num_missed: int) -> int:
        """Return how many of ``num_missed`` experts (those in no device slot, over all layers) to
        upload in a step.
        """
        ...

    def note(self, num_host: int, host_s: float, num_uploaded: int, upload_s: float) -> None:
        """Take note of how long the host took for its experts of a step, and upload and device for
        theirs.
        """
        ...


class UploadLane:
    """Upload of some experts of a decode step to the device, beside those that the host computes:
    buffers that the layers share, and measured times.

    Args:
        device: device that experts are uploaded to.
        loads: loads by layer; None if a layer has no experts.
        split: decides how many experts are uploaded.
        max_uploads: most uploads of a layer, a power of two.
        slots: device slots by layer, made for as many uploads; empty: no expert stays on the
            device.
        read_clock: returns the time in seconds.
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
        """Number of experts that the previous step chose and that were in no slot on the device,
        over all layers.
        """
        self._begin_s = 0.0
        self.begin_step()

    def choose_count(self) -> int:
        """Return how many experts each layer of the next step uploads: zero or a power of two.

        The first step uploads none; it only counts the experts.
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
        """Counts of the experts that all steps chose: those in a slot of the device's memory, and
        the others.
        """
        slots = self._held_slots
        return sum(one.num_hits for one in slots), sum(one.num_missed for one in slots)

    def find_slots(self, layer_idx: int) -> ExpertSlots | None:
        """Return a layer's slots, which keep experts in the device's memory; None: none are
        kept.
        """
        return self._slots[layer_idx] if self._slots else None

    def begin_step(self) -> None:
        """Begin a step: set its counts of experts and its measured times to zero."""
        self._num_host = self._num_uploaded = 0
        self._host_s = self._upload_s = 0.0

    def end_step(self) -> None:
        """End a step: report its counts of experts and measured times to the ``Split``, which
        learns from them.
        """
        self._num_missed = self._num_host + self._num_uploaded
        if self._num_missed:
            self._split.note(self._num_host, self._host_s, self._num_uploaded, self._upload_s)

    def divide(self, layer_idx: int, ids_TK: NDArray[np.int64], count: int) -> Division:
        """Divide a layer's experts: upload those that most tokens chose.

        Args:
            layer_idx: layer number.
            ids_TK: expert ids that the layer chose; -1 is none.
            count: most experts to upload.
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
        """Write some of a layer's experts to the host's staging memory, from which the device
        copies them.
        """
        loads = self.loads[layer_idx]
        assert loads is not None, "a layer without experts"
        size = loads.expert_bytes
        for place, expert_id in enumerate(expert_ids):
            loads.stage(expert_id, self.there.memory[place * size : (place + 1) * size])

    def clear(self) -> None:
        """Empty all slots of the device's memory after a failed step, which may have left wrong
        contents in them.
        """
        for slots in self._held_slots:
            slots.clear()

    def note_uploaded(self) -> None:
        """Add the time since ``divide`` to the step's upload time, when the device has computed a
        layer's experts.
        """
        self._upload_s += self._read_clock() - self._begin_s

    def time_host(self, work: Callable[[], None]) -> None:
        """Compute the host's experts of a layer by ``work``, and add the time to the step's host
        time.
        """
        begin_s = self._read_clock()
        work()
        self._host_s += self._read_clock() - begin_s
