"""Work that a master does by itself: copies what has too few replicas, moves what must move."""

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.core.errors import CorruptionError, TandemError
from tandem.store.index import NO_ROW, Replica
from tandem.store.messages import Ack, HostStage, PullObject
from tandem.store.space import Extent, HostSpace

if TYPE_CHECKING:
    from tandem.store.master import StoreMaster

__all__ = ["Upkeep"]

logger = logging.getLogger(__name__)

REPAIR_PERIOD_MS = 250
PULL_TIMEOUT_MS = 10_000
RETRY_AFTER_MS = 1_000
QUEUE_LENGTH = 1_000
"""Objects to copy or drop that are looked up at a time."""


@dataclass(slots=True)
class _Copy:
    target: HostSpace
    session: int
    extent: Extent
    is_abandoned: bool = False


class Upkeep:
    """Repair and drain of one master; at most ``max_repairs`` copies are under way."""

    def __init__(self, master: "StoreMaster") -> None:
        self._master = master
        self._queue: deque[tuple[str, int]] = deque()
        """Objects to copy, with their rows when they were found; the next scan begins it anew."""
        self._copying: dict[str, _Copy] = {}
        self._not_before_ms: dict[str, int] = {}
        self._next_ms = 0

    def step(self, now_ms: int) -> None:
        """Begin what there is to do; returns at once."""
        if now_ms < self._next_ms:
            return
        self._next_ms = now_ms + REPAIR_PERIOD_MS
        self._not_before_ms = {k: at for k, at in self._not_before_ms.items() if at > now_ms}
        self._queue.clear()
        for host in list(self._master.hosts.values()):
            if host.stage is HostStage.DRAINING:
                self._drain(host)
        if len(self._master.writable_hosts()) > 1:
            limit = QUEUE_LENGTH + len(self._copying) + len(self._not_before_ms)
            for row in self._master.directory.list_under_replicated(limit):
                self._queue.append((self._master.directory.key(row), row))
        self._begin_copies()

    def _begin_copies(self) -> None:
        while self._queue and len(self._copying) < self._master.config.max_repairs:
            key, row = self._queue.popleft()
            if self._master.directory.find(key) == row:
                self._begin_copy(row)

    def _drain(self, host: HostSpace) -> None:
        directory = self._master.directory
        rows = directory.rows_on_host(host.number)
        if not rows and not host.dropped_bytes and not host.quarantined_bytes:
            host.stage = HostStage.DRAINED
            logger.info("event=host_drained host=%s", host.name)
            return
        for row in rows[:QUEUE_LENGTH]:
            others = [
                replica
                for replica in directory.replicas(row)
                if self._master.hosts[replica.host].is_writable
            ]
            possible = len(self._master.writable_hosts())
            if others and len(others) >= min(directory.wanted(row), possible):
                self._master.drop_replica(row, host.number)
            else:
                self._queue.append((directory.key(row), row))

    def _begin_copy(self, row: int) -> None:
        master, key = self._master, self._master.directory.key(row)
        if key in self._copying or key in self._not_before_ms:
            return
        holders = {replica.host for replica in master.directory.replicas(row)}
        length = master.extent_of(row, 0).length
        for number in master.choose_hosts():
            if number in holders:
                continue
            extent = master.hosts[number].allocate(length)
            if extent is not None:
                target = master.hosts[number]
                copy = _Copy(target, target.session, extent)
                self._copying[key] = copy
                master.spawn(self._copy(row, key, copy))
                return
        self._not_before_ms[key] = master.now_ms() + RETRY_AFTER_MS  # No room anywhere.

    def abandon(self, key: str, *, wait: bool) -> "asyncio.Future[None] | None":
        """The object goes: end the copying of it, and wipe what may have come of that.

        Returns: if ``wait`` and there is a copy, what is done when no header of it is left.
        """
        copy = self._copying.get(key)
        if copy is None or copy.is_abandoned or copy.target.session != copy.session:
            return None
        copy.is_abandoned = True
        return copy.target.drop(copy.extent, 0, wait=wait)

    async def _copy(self, row: int, key: str, copy: _Copy) -> None:
        """Have the target pull a copy of the object into the extent taken there."""
        master, directory = self._master, self._master.directory
        target, session, extent = copy.target, copy.session, copy.extent
        is_same = directory.find(key) == row and not copy.is_abandoned
        if not is_same or target.session != session or not directory.num_live(row):
            del self._copying[key]
            if target.session == session and not copy.is_abandoned:
                target.release(extent)
            return
        version = directory.version(row)
        is_done = False
        source, source_offset = self._choose_source(row)
        source.guarded.add(source_offset)
        try:
            await target.order(
                "pull",
                PullObject,
                Ack,
                timeout_s=1.5 * PULL_TIMEOUT_MS / 1e3,
                source=source.endpoint(),
                source_offset=source_offset,
                records=master.record_of(row, extent.offset),
                timeout_ms=PULL_TIMEOUT_MS,
            )
            is_done = True
        except CorruptionError:
            # What was read is not what was written; the holder looks for itself.
            await self._verify_all(row, key, version)
        except TandemError as error:
            logger.warning("event=copy_failed key=%s host=%s reason=%s", key, target.name, error)
        finally:
            source.guarded.discard(source_offset)
            del self._copying[key]
            self._not_before_ms[key] = master.now_ms() + RETRY_AFTER_MS
            self._begin_copies()
        if copy.is_abandoned or target.session != session:
            return  # Whoever let the object go has it wiped; or the next inventory settles it.
        is_same = directory.find(key) == row and row != NO_ROW
        is_wanted = is_same and directory.version(row) == version
        if is_done and is_wanted and not self._is_on(row, target):
            directory.add_replica(row, Replica(target.number, extent.offset))
            master.counters.replicas_copied += 1
            self._not_before_ms.pop(key, None)
        else:
            target.drop(extent, 0)  # Sealed or not; also ends a pull that is still under way.

    def _choose_source(self, row: int) -> tuple[HostSpace, int]:
        hosts = self._master.hosts
        return next(
            (hosts[host], offset)
            for host, offset in self._master.directory.replicas(row)
            if hosts[host].caller is not None
        )

    def _is_on(self, row: int, host: HostSpace) -> bool:
        return any(r.host == host.number for r in self._master.directory.replicas(row))

    async def _verify_all(self, row: int, key: str, version: int) -> None:
        for replica in self._master.directory.replicas(row):
            try:
                await self._master.verify_replica(key, version, replica.host)
            except TandemError as error:
                logger.warning("event=verify_failed key=%s reason=%s", key, error)
