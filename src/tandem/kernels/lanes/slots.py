"""Routed experts of one layer that stay in a device's memory, as a cache above the host's.

A policy of ``placement.experts.cache`` decides which experts stay. A new expert is uploaded and
then moved to its slot on the device, so a later step that chooses it copies nothing. After the
slots come temporary places for uploads without a slot.

Shapes: S slots, U uploads of a step, P = S + U places.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tandem.kernels.device import Device

__all__ = ["ExpertSlots", "SlotPolicy"]


class SlotPolicy(Protocol):
    """Decision which experts stay in a layer's slots; ``placement.experts.cache.CachePolicy``
    implements it.
    """

    def touch(self, expert_ids: Sequence[int], max_insertions: int, /) -> Sequence[tuple[int, int]]:
        """Take note of the experts that a step chose; return those to put into slots, as pairs
        (expert, the one that it evicts, or -1).
        """
        ...

    def forget(self, expert_id: int, /) -> None:
        """Take note that an expert no longer holds a slot, as its load failed or slots were
        emptied.
        """
        ...


class ExpertSlots:
    """A layer's slots (places for experts that stay in the device's memory), and the host's record
    of their contents.

    Args:
        device: device that has the memory.
        expert_bytes: size of one expert on the device, a multiple of 8.
        num_slots: S.
        num_uploads: U.
        policy: decides which experts hold slots; made for S slots.
    """

    def __init__(
        self,
        device: Device,
        expert_bytes: int,
        num_slots: int,
        num_uploads: int,
        policy: SlotPolicy,
    ) -> None:
        assert expert_bytes % 8 == 0, expert_bytes
        self.num_slots, self.expert_bytes = num_slots, expert_bytes
        num_places = num_slots + num_uploads
        self.memory = device.allocate(num_places * expert_bytes)
        """Slots, then temporary places, on the device: uint8 [P * expert_bytes]."""
        self.owners_P = device.allocate(num_places * 8).view(torch.int64)
        """On the device, the expert id of each place; -1: nothing that a step may use."""
        self.owners_there_P = device.allocate_staging(num_places * 8).view(torch.int64)
        """The host's copy of ``owners_P``, in staging memory."""
        self.places_U = device.allocate(num_uploads * 8).view(torch.int64)
        """On the device, the place that each upload is moved to."""
        self.places_there_U = device.allocate_staging(num_uploads * 8).view(torch.int64)
        """The host's copy of ``places_U``, in staging memory."""
        self.num_hits = self.num_missed = 0
        """Experts that steps chose and that were in a slot (hits) or in none (missed), once per
        step.
        """
        self._policy = policy
        self._slot_of: dict[int, int] = {}
        self._free = list(range(num_slots - 1, -1, -1))
        self._owners, self._places = self.owners_there_P.numpy(), self.places_there_U.numpy()
        self._owners[:] = -1
        self._passing_places = np.arange(num_slots, num_places)

    @property
    def is_full(self) -> bool:
        """True if every slot holds an expert."""
        return not self._free

    def holds(self, expert_id: int) -> bool:
        """Return True if an expert is in a slot of the device's memory."""
        return expert_id in self._slot_of

    def admit(self, expert_ids: Sequence[int], max_uploads: int) -> list[int]:
        """Note a step's experts; return those to upload, in the order of their uploads.

        Args:
            expert_ids: distinct ids, those that most tokens chose first. Of experts that neither
                hold nor get a slot, the first are uploaded.
            max_uploads: most experts to upload, at most U.
        """
        missed = [expert_id for expert_id in expert_ids if expert_id not in self._slot_of]
        self.num_missed += len(missed)
        self.num_hits += len(expert_ids) - len(missed)
        owners, places = self._owners, self._places
        owners[self.num_slots :] = -1
        # By default an uploaded expert goes to a temporary place behind the slots. This also covers
        # the uploads that a step does not need but a captured graph copies anyway.
        places[:] = self._passing_places
        uploads: list[int] = []
        for expert_id, evicted in self._policy.touch(expert_ids, max_uploads):
            slot = self._free.pop() if evicted < 0 else self._slot_of.pop(evicted)
            self._slot_of[expert_id] = slot
            owners[slot], places[len(uploads)] = expert_id, slot
            uploads.append(expert_id)
        passing = [expert_id for expert_id in missed if expert_id not in self._slot_of]
        for expert_id in passing[: max_uploads - len(uploads)]:
            owners[self.num_slots + len(uploads)] = expert_id
            uploads.append(expert_id)
        return uploads

    def clear(self) -> None:
        """Empty all slots: no expert counts as present on the device any more."""
        for expert_id, slot in self._slot_of.items():
            self._free.append(slot)
            self._policy.forget(expert_id)
        self._slot_of.clear()
        self._owners[:] = -1

    def put(self, landing: Tensor) -> None:
        """Move uploaded experts to their places in the device's memory; runs on the device.

        Args:
            landing: uploaded experts one after the other, uint8, at most U.
        """
        rows = landing.view(torch.int64).view(-1, self.expert_bytes // 8)
        places = self.memory.view(torch.int64).view(-1, self.expert_bytes // 8)
        places.index_copy_(0, self.places_U[: len(rows)], rows)
