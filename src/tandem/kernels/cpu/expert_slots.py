"""Memory for routed experts that lie on disk, and the order in which they are read and computed.

``ExpertTier`` owns the memory of all layers: slots, which keep experts between steps, and a staging
area for experts that are used once. ``LayerSlots`` manages one layer: its policy decides which
experts get slots, the others use the staging area. Experts are computed in ascending order while
the next ones are read. Each expert is one read.

A failed read raises and fails the step; nothing is computed from bytes that were not read, and
memory that a pending read may still write to is not reused. Use from one thread at a time.
"""

import contextlib
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tandem.core.errors import CapacityError, CorruptionError, DeadlineError, TandemError
from tandem.placement.experts.cache import CachePolicy, Insertion

__all__ = ["ExpertReader", "ExpertTier", "LayerSlots", "TierCounters"]

logger = logging.getLogger(__name__)

READ_TIMEOUT_MS = 30_000
"""Timeout of a read in milliseconds, longer than a disk takes to retry a bad sector; then the step
fails.
"""


class ExpertReader(Protocol):
    """Reader of file ranges into memory; ``tandem._native.DirectReader`` implements it."""

    def add_file(self, path: str) -> int:
        """Open a file to read from; return its number for ``begin``."""
        ...

    def begin(self, file: int, offset: int, length: int, at: int) -> int:
        """Begin to read a range of a file into the memory at offset ``at``; return the read's
        number.
        """
        ...

    def is_done(self, read: int) -> bool:
        """Return True if the read has ended, so that ``finish`` would not wait."""
        ...

    def finish(self, read: int, timeout_ms: int) -> None:
        """Wait for a read. Raises: DeadlineError (the read is still pending); TandemError (it
        failed).
        """
        ...

    def array(self) -> NDArray[np.uint8]:
        """Return the memory that reads write to, as bytes; shared, not copied."""
        ...


@dataclass(slots=True)
class TierCounters:
    """Counts of experts that steps found in memory or read from disk, over all layers."""

    hits: int = 0
    """Experts computed from a slot that already held them."""
    inserted: int = 0
    """Experts read into a slot because a step needed them."""
    passed: int = 0
    """Experts read from disk for one use, into the staging area, without taking a slot."""
    guessed: int = 0
    """Experts read into a slot ahead, because the next step was expected to need them."""
    guessed_right: int = 0
    """Experts read ahead that a step used before they were evicted."""
    read_bytes: int = 0
    """Bytes read from disk."""


@dataclass(slots=True)
class _Read:
    """A pending read of an expert from disk."""

    number: int
    place: int
    is_staged: bool
    file: int
    """Number of the file as it was open then."""


class ExpertTier:
    """Memory of all layers for experts that lie on disk: slots, which keep experts between steps,
    and a staging area for others that a step uses.

    Args:
        reader: reads the files and owns the memory; owned by the tier.
        slot_bytes: size of one expert's place, a multiple of ``alignment``.
        num_slots: slots of all layers together.
        num_staged: places in the staging area, at least 1.
        max_insertions: most experts of a layer that may be inserted into slots in one step.
        alignment: alignment of file ranges in bytes.
    """

    def __init__(
        self,
        reader: ExpertReader,
        *,
        slot_bytes: int,
        num_slots: int,
        num_staged: int,
        max_insertions: int,
        alignment: int,
    ) -> None:
        assert num_staged >= 1, num_staged
        self.reader = reader
        self.memory = reader.array()
        self.slot_bytes = slot_bytes
        self.alignment = alignment
        self.max_insertions = max_insertions
        self.num_staged = num_staged
        self.counters = TierCounters()
        self._num_slots = num_slots
        self._num_given = 0
        self._staged = [(num_slots + i) * slot_bytes for i in range(num_staged)]
        self._lost: list[tuple[int, int]] = []
        """Reads that were abandoned after a timeout, with their places in the staging area, which
        the reads may still write to.
        """
        self._is_stalled = False

    def give_slots(self, count: int) -> list[int]:
        """Allot places that keep experts between steps (slots) to a layer; return their offsets in
        memory.

        Raises: CapacityError (not enough slots are left).
        """
        first = self._num_given
        if first + count > self._num_slots:
            what = f"{count} slots of {self._num_slots - first} left: plan the model anew"
            raise CapacityError("kernels.give_slots", what)
        self._num_given = first + count
        return [(first + i) * self.slot_bytes for i in range(count)]

    def take_staged(self) -> int | None:
        """Take a free place of the staging area (for experts that stay no longer than their use);
        return its offset in memory, or None if none is free now.
        """
        for read, place in [lost for lost in self._lost if self.reader.is_done(lost[0])]:
            # The abandoned read has ended and nobody waits for its result, so its error is ignored.
            with contextlib.suppress(TandemError):
                self.reader.finish(read, 0)
            self._lost.remove((read, place))
            self._staged.append(place)
        return self._staged.pop() if self._staged else None

    def return_staged(self, place: int) -> None:
        """Give a place of the staging area (for experts that stay no longer than their use)
        back.
        """
        self._staged.append(place)

    def give_up(self, read: int, place: int) -> None:
        """Stop waiting for a read of an expert; its place in the staging area becomes free when the
        read has ended.
        """
        self._lost.append((read, place))

    def finish(self, read: int) -> None:
        """Wait for a read. After a timeout no later read is waited for, only checked.

        Raises: the errors of ``ExpertReader.finish``.
        """
        try:
            self.reader.finish(read, 0 if self._is_stalled else READ_TIMEOUT_MS)
        except DeadlineError:
            if not self._is_stalled:
                logger.exception("event=disk_stalled timeout_ms=%d", READ_TIMEOUT_MS)
            self._is_stalled = True
            raise
        except TandemError:
            self._is_stalled = False
            raise
        self._is_stalled = False


class LayerSlots:
    """One layer's experts on disk: their places in memory (slots keep experts between steps) and
    their pending reads.

    Args:
        tier: the memory.
        path: file that holds the layer's experts one after the other.
        expert_bytes: size of one expert.
        num_experts: experts in the file.
        num_slots: slots of this layer.
        policy: decides which experts are kept in the slots.
        is_unchanged: reads the file again and returns True if its content is what it was; asked
            when the file seems to have been written to. None: then it is refused.
    """

    def __init__(
        self,
        tier: ExpertTier,
        path: Path,
        *,
        expert_bytes: int,
        num_experts: int,
        num_slots: int,
        policy: CachePolicy,
        is_unchanged: Callable[[], bool] | None = None,
    ) -> None:
        self._tier = tier
        self._path = str(path)
        self._is_unchanged = is_unchanged
        self._file = tier.reader.add_file(self._path)
        self._expert_bytes = expert_bytes
        self._policy = policy
        self._free = tier.give_slots(num_slots)
        self._slots: dict[int, int] = {}
        """Slot of each expert that has one, including experts that are still being read into it."""
        self._reads: dict[int, _Read] = {}
        self._lost: list[tuple[int, int]] = []
        """Reads in progress of experts that were evicted meanwhile, each with the slot that it may
        still write to.
        """
        self._guessed: set[int] = set()
        """Experts that were read ahead and not computed since."""
        self.places = np.full(num_experts, -1, np.int64)
        """Offset of each expert in the memory; -1 if the expert is not in memory."""

    def run(
        self,
        ids: NDArray[np.int64],
        compute: Callable[[int, int, bool], None],
        *,
        is_cached: bool,
        on_begun: Callable[[], None] | None = None,
    ) -> None:
        """Compute the experts in ``ids`` in ascending order, as their reads complete.

        Args:
            ids: expert ids of all tokens; -1 means none.
            compute: function that computes experts [first, end) from ``places``; its third argument
                is True if its sum is added to that of earlier calls.
            is_cached: True to let the policy change the slots; False to leave them as they are.
            on_begun: called once the layer's reads have begun, before the first is waited for.

        Raises: the errors of the reads.
        """
        order: list[int] = np.unique(ids[ids >= 0]).tolist()
        try:
            self._run(order, compute, is_cached=is_cached, on_begun=on_begun)
        finally:
            self._end_staged()

    def list_missing(self, expert_ids: list[int]) -> list[int]:
        """Return those of some experts that hold no slot in memory, in the given order."""
        return [expert_id for expert_id in expert_ids if expert_id not in self._slots]

    def guess(self, expert_ids: list[int]) -> None:
        """Begin to read experts into slots that the next step is likely to use, likeliest first."""
        insertions = self._policy.guess(expert_ids, self._tier.max_insertions)
        self._insert(insertions)
        self._guessed.update(insertion.expert_id for insertion in insertions)
        self._tier.counters.guessed += len(insertions)
        self._tier.counters.read_bytes += len(insertions) * self._expert_bytes

    def _run(
        self,
        order: list[int],
        compute: Callable[[int, int, bool], None],
        *,
        is_cached: bool,
        on_begun: Callable[[], None] | None,
    ) -> None:
        passing = self._begin_missing(order, is_cached=is_cached)
        # A decode computes each expert as soon as it is read. A prefill prepares all its rows at
        # each call, so it computes half of the staging area while the other half is being read.
        grain = 1 if is_cached else max(1, self._tier.num_staged // 2)
        first, is_added = 0, False
        while first < len(order) or not is_added:
            while passing and self._stage(passing[0]):
                passing.popleft()
            if on_begun is not None:
                on_begun()
                on_begun = None
            # Reads into the staging area begin in ascending order of experts, so ``passing[0]``,
            # the first whose read has not begun, ends the experts that can be computed now.
            last = len(order) if not passing else order.index(passing[0])
            if first == last < len(order):
                what = "reads that were given up hold the whole staging area: see the kernel's log"
                raise DeadlineError("kernels.read_expert", what)
            end = min(first + grain, last)
            for expert_id in order[first:end]:
                self._finish(expert_id)
            while end < last and self._is_here(order[end]):
                self._finish(order[end])
                end += 1
            stop = len(self.places) if end == len(order) else order[end - 1] + 1
            compute(order[first] if first < end else 0, stop, is_added)
            for expert_id in order[first:end]:
                self._release(expert_id)
            first, is_added = end, True

    def _begin_missing(self, order: list[int], *, is_cached: bool) -> deque[int]:
        """Begin to read experts that are not in memory into slots, as the policy decides; return
        the others, which need the staging area.
        """
        counters = self._tier.counters
        missing = [expert_id for expert_id in order if expert_id not in self._slots]
        counters.hits += len(order) - len(missing)
        counters.read_bytes += len(missing) * self._expert_bytes
        if self._guessed:
            counters.guessed_right += sum(expert_id in self._guessed for expert_id in order)
            self._guessed.difference_update(order)
        if is_cached:
            insertions = self._policy.touch(order, self._tier.max_insertions)
            self._insert(insertions)
            counters.inserted += len(insertions)
        passing = deque(expert_id for expert_id in missing if expert_id not in self._slots)
        counters.passed += len(passing)
        return passing

    def _is_here(self, expert_id: int) -> bool:
        read = self._reads.get(expert_id)
        return True if read is None else self._tier.reader.is_done(read.number)

    def _insert(self, insertions: list[Insertion]) -> None:
        """Evict experts and begin to read others into their slots, as the policy decided."""
        for insertion in insertions:
            if insertion.evicted != -1:
                self._evict(insertion.evicted)
        for i, insertion in enumerate(insertions):
            try:
                place = self._take_slot()
                try:
                    self._begin(insertion.expert_id, place, is_staged=False)
                except TandemError:
                    self._free.append(place)
                    raise
            except TandemError:
                for failed in insertions[i:]:
                    self._policy.forget(failed.expert_id)
                raise
            self._slots[insertion.expert_id] = place

    def _evict(self, expert_id: int) -> None:
        place = self._slots.pop(expert_id)
        self.places[expert_id] = -1
        self._guessed.discard(expert_id)
        read = self._reads.pop(expert_id, None)
        if read is None:
            self._free.append(place)
        else:
            self._lost.append((read.number, place))

    def _take_slot(self) -> int:
        """Return a free slot, if needed after waiting for the read of an evicted expert that still
        writes to it.
        """
        if self._free:
            return self._free.pop()
        number, place = self._lost[0]
        try:
            self._tier.finish(number)
        except DeadlineError:
            raise
        except TandemError:
            logger.warning("event=guessed_read_failed read=%d", number)
        del self._lost[0]
        return place

    def _stage(self, expert_id: int) -> bool:
        """Begin to read an expert into the staging area; return False if the area is full."""
        place = self._tier.take_staged()
        if place is None:
            return False
        try:
            self._begin(expert_id, place, is_staged=True)
        except TandemError:
            self._tier.return_staged(place)
            raise
        return True

    def _begin(self, expert_id: int, place: int, *, is_staged: bool) -> None:
        size = self._expert_bytes
        number = self._tier.reader.begin(self._file, expert_id * size, size, place)
        self._reads[expert_id] = _Read(number, place, is_staged, self._file)

    def _finish(self, expert_id: int) -> None:
        """Wait for an expert's read, if one is pending, and note where the expert lies."""
        read = self._reads.get(expert_id)
        if read is None:
            assert self.places[expert_id] >= 0, f"expert {expert_id} is not read"
            return
        try:
            self._wait(read, expert_id)
        except DeadlineError:
            raise
        except TandemError:
            del self._reads[expert_id]
            if read.is_staged:
                self._tier.return_staged(read.place)
            else:
                self._free.append(self._slots.pop(expert_id))
                self._policy.forget(expert_id)
            raise
        del self._reads[expert_id]
        offset = expert_id * self._expert_bytes
        self.places[expert_id] = read.place + offset % self._tier.alignment

    def _wait(self, read: _Read, expert_id: int) -> None:
        """Wait for an expert's read. If the file was touched (copied over by a backup, say) and has
        the same content, it is opened again and read once more.
        """
        try:
            self._tier.finish(read.number)
        except CorruptionError:
            if read.file == self._file:
                if self._is_unchanged is None or not self._is_unchanged():
                    raise
                logger.warning("event=experts_reopened path=%s", self._path)
                self._file = self._tier.reader.add_file(self._path)
            self._begin(expert_id, read.place, is_staged=read.is_staged)
            self._tier.finish(self._reads[expert_id].number)

    def _release(self, expert_id: int) -> None:
        """Free the place of an expert that lies in the staging area; one that holds a slot
        stays.
        """
        if expert_id in self._slots:
            return
        place = int(self.places[expert_id])
        self.places[expert_id] = -1
        self._tier.return_staged(place - place % self._tier.alignment)

    def _end_staged(self) -> None:
        """Free all places of the staging area that this layer uses, also after a failed step."""
        for expert_id in [e for e, read in self._reads.items() if read.is_staged]:
            read = self._reads[expert_id]
            try:
                self._finish(expert_id)
            except DeadlineError:
                del self._reads[expert_id]
                self._tier.give_up(read.number, read.place)
            except TandemError:
                logger.warning("event=read_failed expert=%d", expert_id)
            else:
                self._release(expert_id)
        here = np.flatnonzero(self.places >= 0).tolist()
        for expert_id in here:
            self._release(expert_id)
