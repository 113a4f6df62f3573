"""Objects and copies that leave a store: they leave the directory at once, and their hosts wipe
their headers; see ``state/wipes.py``.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from tandem._native import measure_extents
from tandem.store.master.state.index import NO_ROW
from tandem.store.master.state.space import Extent, HostSpace
from tandem.store.master.state.state import StoreState
from tandem.store.messages import Ack, VerifyExtent

__all__ = ["Departures"]

logger = logging.getLogger(__name__)


class Departures:
    """The removals of objects and copies that are in progress in one master's store."""

    def __init__(self, state: StoreState) -> None:
        self._state = state

    def drop_row(self, row: int) -> "list[asyncio.Future[None]]":
        """Remove an object from the directory and wipe its copies. Their space is free when wiped
        and without leases.

        Returns: futures that are done when all headers are wiped; see ``Wipes.note``.
        """
        state, directory = self._state, self._state.directory
        key, version = directory.key[row], directory.version[row]
        length = state.extent_of(row, 0).length
        free_at_ms = directory.lease_until_ms[row]
        if state.awaited.is_adopting:
            state.dropped_versions[key] = version
        # Clients with a lease may have cached the object's location, and may read it there until
        # its header is wiped.
        is_known = free_at_ms > state.now_ms()
        pending = self._abandon_copy(key, version)
        on_disk = set(directory.copies.disks(row))
        wiped: dict[int, asyncio.Future[None]] = {}
        for replica in directory.remove(row):
            host = state.hosts[replica.host]
            if host.caller is None:
                self._state.note_unlisted(key)
            done = host.drops.drop([replica.offset], [length], free_at_ms)
            wiped[replica.host] = done
            pending.append(done)
            if host.disk is not None:
                on_disk.add(replica.host)  # A record may be in the course of being written there.
        for number in sorted(on_disk):
            host = state.hosts[number]
            if host.caller is None:
                self._state.note_unlisted(key)
            pending.append(host.drops.forget(key, version, after=wiped.get(number)))
        if is_known:
            earlier = state.wipes.find(key)  # Other copies, removed a moment ago.
            headers: list[asyncio.Future[Any]] = [] if earlier is None else [earlier]
            state.wipes.hide_until(key, [*headers, *wiped.values()])
        if pending:
            state.wipes.note([key], pending)
        return pending

    def drop_rows(self, rows: Sequence[int]) -> "list[asyncio.Future[Any]]":
        """Remove many objects from the directory as ``drop_row`` does. Those with nothing but
        unleased copies in memory are removed in one pass.

        Returns: futures that are done when all headers are wiped.
        """
        state, directory = self._state, self._state.directory
        free_at_ms = state.now_ms()
        is_plain = bytes(h.caller is not None and h.disk is None for h in state.hosts.values())
        plain, rest = directory.split_plain(rows, is_plain, free_at_ms)
        keys = [directory.key[row] for row in plain]
        copied, removed = state.copies.keys(), state.wipes.list_keys()
        busy = {key for key in keys if key in copied or key in removed}
        if busy:
            pairs = list(zip(plain, keys, strict=True))
            rest += [row for row, key in pairs if key in busy]
            plain = [row for row, key in pairs if key not in busy]
            keys = [key for key in keys if key not in busy]
        pending: list[asyncio.Future[Any]] = []
        if plain:
            sizes = [directory.size[row] for row in plain]
            lengths = dict(zip(plain, measure_extents(keys, sizes), strict=True))
            if state.awaited.is_adopting:
                versions = map(directory.version.__getitem__, plain)
                state.dropped_versions.update(zip(keys, versions, strict=True))
            for number, (owners, offsets) in directory.remove_many(plain).items():
                host = state.hosts[number]
                there = [lengths[row] for row in owners]
                pending.append(host.drops.drop(offsets, there, free_at_ms))
            state.wipes.note(keys, pending)
        for row in rest:
            pending += self.drop_row(row)
        return pending

    def _abandon_copy(self, key: str, version: int) -> "list[asyncio.Future[None]]":
        """Abandon the copy of a removed object that a host is making, and have the range that it is
        written to wiped.

        Returns: futures that are done when the extent is wiped; none without a running copy.
        """
        copy = self._state.copies.get(key)
        if copy is None or copy.is_abandoned or copy.target.session != copy.session:
            return []
        copy.is_abandoned = True
        drops = copy.target.drops
        done = drops.drop([copy.extent.offset], [copy.extent.length], 0)
        return [done, drops.forget(key, version, after=done)]

    def evict_row(self, row: int) -> bool:
        """Evict an object (given by its row in the directory) from all memory. Return True if a
        disk keeps it, False if the object is removed.
        """
        if not self._state.hosts_with_disk_copy(row):
            # Remove the whole object: while headers are left in memory, or the object may be on its
            # way to a disk, a removal of the key must wait for their end, since a restart would
            # find them.
            self.drop_row(row)
            return False
        for replica in self._state.directory.copies.replicas(row):
            self._drop_copy(row, replica.host)
        return True

    def drop_replica(self, row: int, host: int) -> None:
        """Remove one copy in memory, and the object if it was the last copy on any tier.

        Does nothing if the host has no copy.
        """
        directory = self._state.directory
        replicas = directory.copies.replicas(row)
        if all(replica.host != host for replica in replicas):
            return
        if len(replicas) == 1 and not directory.copies.disks(row):
            # Remove the whole object with its last copy, so that a removal of the key waits until
            # the copy's header is wiped.
            self.drop_row(row)
            return
        self._drop_copy(row, host)

    def _drop_copy(self, row: int, host: int) -> None:
        """Remove a copy in memory from the directory and have its header wiped. A removal of the
        key waits for the wipe.

        The host's disk forgets the object too, unless the directory lists the disk's record: no
        later removal would reach a record that has not been reported.
        """
        state, directory = self._state, self._state.directory
        replica = directory.copies.drop_replica(row, host)
        if replica is not None:
            extent = state.extent_of(row, replica.offset)
            unlisted = None if host in directory.copies.disks(row) else directory.version[row]
            self.wipe_copy(
                directory.key[row],
                state.hosts[host],
                extent,
                directory.lease_until_ms[row],
                version=unlisted,
            )

    def wipe_copy(
        self,
        key: str,
        host: HostSpace,
        extent: Extent,
        free_at_ms: int = 0,
        *,
        version: int | None = None,
        was_shown: bool = True,
    ) -> "list[asyncio.Future[None]]":
        """Have a host wipe a copy that the directory does not list.

        A removal of its key waits for the wipe, because a new master would find the header.

        Args:
            key: the object's key.
            host: the host that has the copy, or may have it.
            extent: the copy's extent in the host's segment.
            free_at_ms: earliest time to free the extent, as in ``Drops.drop``.
            version: if given, the host's disk forgets the key up to this version, since the copy
                may be on its way there.
            was_shown: True if the directory has listed the object; see ``Wipes.note``.

        Returns: futures that are done when the copy is wiped, or the host is lost.
        """
        if host.caller is None:
            self._state.note_unlisted(key)
        done = host.drops.drop([extent.offset], [extent.length], free_at_ms)
        going = [done]
        if version is not None and host.disk is not None:
            going.append(host.drops.forget(key, version, after=done))
        self._state.wipes.note([key], going, was_shown=was_shown)
        return going

    def lose_disk(self, row: int, host: int) -> None:
        """Note that the copy of an object on a host's disk is gone, and remove the object if that
        was its last copy.
        """
        directory = self._state.directory
        directory.copies.drop_disk(row, host)
        if not directory.copies.has_any(row):
            self.drop_row(row)
            self._state.counters.objects_evicted += 1

    async def verify_replica(self, key: str, version: int, number: int) -> bool:
        """Have a host verify the checksum of its copy, and remove a corrupt copy.

        Returns: False if the copy is corrupt; True if it is intact or absent.
        Raises: PeerLostError (the host has no session); DeadlineError (it does not answer).
        """
        state = self._state
        row = state.directory.find(key)
        host = state.hosts.get(number)
        if row == NO_ROW or state.directory.version[row] != version or host is None:
            return True
        offset = state.find_copy(row, number)
        if offset < 0:
            return True
        # The host verifies its own memory, since the error may be in the reader's memory.
        verdict = await host.line.order("verify", VerifyExtent, Ack, offset=offset, version=version)
        is_same = state.is_version(row, key, version)
        # Check that the copy is still the one that was verified: if two readers report a copy, it
        # may be gone or replaced when the second one's answer comes.
        if not verdict.ok and is_same and state.find_copy(row, number) == offset:
            logger.error("event=replica_corrupt host=%s key=%s", host.name, key)
            state.counters.replicas_corrupt += 1
            self.drop_replica(row, number)
        return verdict.ok
