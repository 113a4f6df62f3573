"""Work that a master does by itself: copies what has too few replicas, moves what must move."""

import logging
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
DROPS_PER_STEP = 1_000


class Upkeep:
    """Repair and drain of one master; at most ``max_repairs`` copies are under way."""

    def __init__(self, master: "StoreMaster") -> None:
        self._master = master
        self._copying: set[str] = set()
        self._not_before_ms: dict[str, int] = {}
        self._next_ms = 0

    def step(self, now_ms: int) -> None:
        """Begin what there is to do; returns at once."""
        if now_ms < self._next_ms:
            return
        self._next_ms = now_ms + REPAIR_PERIOD_MS
        self._not_before_ms = {k: at for k, at in self._not_before_ms.items() if at > now_ms}
        for host in list(self._master.hosts.values()):
            if host.stage is HostStage.DRAINING:
                self._drain(host)
        if len(self._master.writable_hosts()) > 1:
            room = self._master.config.max_repairs - len(self._copying)
            limit = max(0, room) + len(self._copying) + len(self._not_before_ms)
            for row in self._master.directory.list_under_replicated(limit) if room > 0 else ():
                self._begin_copy(row)

    def _drain(self, host: HostSpace) -> None:
        directory = self._master.directory
        rows = directory.rows_on_host(host.number)
        if not rows and not host.dropped_bytes and not host.quarantined_bytes:
            host.stage = HostStage.DRAINED
            logger.info("event=host_drained host=%s", host.name)
            return
        for row in rows[:DROPS_PER_STEP]:
            others = [
                replica
                for replica in directory.replicas(row)
                if self._master.hosts[replica.host].is_writable
            ]
            possible = len(self._master.writable_hosts())
            if others and len(others) >= min(directory.wanted(row), possible):
                self._master.drop_replica(row, host.number)
            else:
                self._begin_copy(row)

    def _begin_copy(self, row: int) -> None:
        master, key = self._master, self._master.directory.key(row)
        if (
            len(self._copying) >= master.config.max_repairs
            or key in self._copying
            or key in self._not_before_ms
        ):
            return
        holders = {replica.host for replica in master.directory.replicas(row)}
        length = master.extent_of(row, 0).length
        for number in master.choose_hosts():
            if number in holders:
                continue
            extent = master.hosts[number].allocate(length)
            if extent is not None:
                self._copying.add(key)
                target = master.hosts[number]
                master.spawn(self._copy(row, key, target, target.session, extent))
                return
        self._not_before_ms[key] = master.now_ms() + RETRY_AFTER_MS  # No room anywhere.

    async def _copy(
        self, row: int, key: str, target: HostSpace, session: int, extent: Extent
    ) -> None:
        """Have ``target`` pull a copy of the object into ``extent``, taken in ``session``."""
        master, directory = self._master, self._master.directory
        if directory.find(key) != row or target.session != session:
            self._copying.discard(key)
            if target.session == session:
                target.release(extent)
            return
        version = directory.version(row)
        is_done = False
        try:
            source, source_offset = self._choose_source(row)
            # Nobody may reuse the source while it is read.
            directory.extend_lease(row, master.now_ms() + 2 * PULL_TIMEOUT_MS)
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
            self._copying.discard(key)
            self._not_before_ms[key] = master.now_ms() + RETRY_AFTER_MS
        if target.session != session:
            return  # Its next inventory tells what became of it.
        is_same = directory.find(key) == row and row != NO_ROW
        is_wanted = is_same and directory.version(row) == version
        if is_done and is_wanted and not self._is_on(row, target):
            directory.add_replica(row, Replica(target.number, extent.offset))
            master.counters.replicas_copied += 1
            self._not_before_ms.pop(key, None)
        else:
            target.drop(extent, 0)  # Sealed or not; also ends a pull that is still under way.

    def _choose_source(self, row: int) -> tuple[HostSpace, int]:
        master = self._master
        for host, offset in master.directory.replicas(row):
            if master.hosts[host].caller is not None:
                return master.hosts[host], offset
        raise CorruptionError("store.copy", "no readable replica is left")

    def _is_on(self, row: int, host: HostSpace) -> bool:
        return any(r.host == host.number for r in self._master.directory.replicas(row))

    async def _verify_all(self, row: int, key: str, version: int) -> None:
        for replica in self._master.directory.replicas(row):
            try:
                await self._master.verify_replica(key, version, replica.host)
            except TandemError as error:
                logger.warning("event=verify_failed key=%s reason=%s", key, error)
