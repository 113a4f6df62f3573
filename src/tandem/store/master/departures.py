"""Objects and copies that leave a store: the wipes that come first, and the callers that wait.

An object has left the directory at once. It is *going* until no header of it is left that a new
master could find, and *leaving* while clients may still read it from their location caches.
"""

import asyncio
import logging
from collections.abc import Collection, Sequence
from typing import Any

from tandem._native import measure_extents
from tandem.store.master.state.index import NO_ROW
from tandem.store.master.state.space import Extent, HostSpace
from tandem.store.master.state.state import StoreState
from tandem.store.messages import Ack, VerifyExtent

__all__ = ["Departures"]

logger = logging.getLogger(__name__)


class Departures:
    """The objects that leave one master's store."""

    def __init__(self, state: StoreState) -> None:
        self._state = state
        self._removing: dict[str, asyncio.Future[Any]] = {}
        """Keys of removed objects whose headers are not all wiped yet."""
        self._replacing: dict[str, asyncio.Future[Any]] = {}
        """The same without copies that no client was ever shown; puts of the key wait for these."""
        self._leaving: dict[str, int] = {}
        """Keys of those that clients may still read, and how many headers there are."""

    # Leaving the directory.

    def drop_row(self, row: int) -> "list[asyncio.Future[None]]":
        """Remove an object; its space is free once it is wiped and unleased.

        Returns: futures that are done when all headers are wiped; see ``note_going``.
        """
        state, directory = self._state, self._state.directory
        key, version = directory.key(row), directory.version(row)
        length = state.extent_of(row, 0).length
        free_at_ms = directory.lease_until_ms(row)
        if state.awaited.is_adopting:
            state.dropped_versions[key] = version
        # Clients may remember where it was, and take it for present while there is a header.
        is_known = free_at_ms > state.now_ms()
        pending = self._abandon_copy(key, version)
        on_disk = set(directory.disks(row))
        wiped: dict[int, asyncio.Future[None]] = {}
        for replica in directory.remove(row):
            host = state.hosts[replica.host]
            if host.caller is None:
                self.note_unlisted(key)
            done = host.drops.drop([replica.offset], [length], free_at_ms)
            wiped[replica.host] = done
            pending.append(done)
            if host.disk is not None:
                on_disk.add(replica.host)  # Or it is being written there.
        for number in sorted(on_disk):
            host = state.hosts[number]
            if host.caller is None:
                self.note_unlisted(key)
            pending.append(host.drops.forget(key, version, after=wiped.get(number)))
        if is_known:
            earlier = self.find_going(key)  # Other copies, given up a moment ago.
            headers: list[asyncio.Future[Any]] = [] if earlier is None else [earlier]
            self._note_leaving(key, [*headers, *wiped.values()])
        if pending:
            self.note_going(key, pending)
        return pending

    def drop_rows(self, rows: Sequence[int]) -> "list[asyncio.Future[Any]]":
        """Do as ``drop_row`` of each. Those that nothing is known of but where they lie go at once.

        Returns: futures that are done when all headers are wiped.
        """
        state, directory = self._state, self._state.directory
        free_at_ms = state.now_ms()
        is_plain = bytes(h.caller is not None and h.disk is None for h in state.hosts.values())
        plain, rest = directory.split_plain(rows, is_plain, free_at_ms)
        keys = [directory.key(row) for row in plain]
        copied, removed = state.copies.keys(), self._removing.keys()
        if not (copied.isdisjoint(keys) and removed.isdisjoint(keys)):
            pairs = list(zip(plain, keys, strict=True))
            busy = {key for key in keys if key in copied or key in removed}
            rest += [row for row, key in pairs if key in busy]
            plain = [row for row, key in pairs if key not in busy]
            keys = [key for key in keys if key not in busy]
        pending: list[asyncio.Future[Any]] = []
        if plain:
            lengths = dict(zip(plain, measure_extents(keys, directory.sizes(plain)), strict=True))
            if state.awaited.is_adopting:
                versions = map(directory.version, plain)
                state.dropped_versions.update(zip(keys, versions, strict=True))
            for number, (owners, offsets) in directory.remove_many(plain).items():
                host = state.hosts[number]
                there = [lengths[row] for row in owners]
                pending.append(host.drops.drop(offsets, there, free_at_ms))
            self._note_many_going(keys, pending)
        for row in rest:
            pending += self.drop_row(row)
        return pending

    def _note_many_going(self, keys: Sequence[str], going: "Sequence[asyncio.Future[Any]]") -> None:
        """Do as ``note_going``, of keys of which nothing is going."""
        gone: asyncio.Future[Any] = going[0] if len(going) == 1 else asyncio.gather(*going)
        waiting = dict.fromkeys(keys, gone)
        self._removing |= waiting
        self._replacing |= waiting

        def forget(_: object) -> None:
            for all_going in (self._removing, self._replacing):
                for key in keys:
                    if all_going.get(key) is gone:
                        del all_going[key]

        gone.add_done_callback(forget)

    def _abandon_copy(self, key: str, version: int) -> "list[asyncio.Future[None]]":
        """Note that the object goes: end the copying of it, and wipe what may have come of that.

        Returns: if there is a copy, futures that are done when it is wiped.
        """
        copy = self._state.copies.get(key)
        if copy is None or copy.is_abandoned or copy.target.session != copy.session:
            return []
        copy.is_abandoned = True
        drops = copy.target.drops
        done = drops.drop([copy.extent.offset], [copy.extent.length], 0)
        return [done, drops.forget(key, version, after=done)]

    def evict_row(self, row: int) -> bool:
        """Take an object out of memory; returns whether a disk keeps it, or else it is gone."""
        state, directory = self._state, self._state.directory
        if not any(state.hosts[number].caller is not None for number in directory.disks(row)):
            # Its headers are still there, and it may be on its way to a disk: a removal that comes
            # now must not be over before it could not come back.
            self.drop_row(row)
            return False
        for replica in directory.replicas(row):
            self._drop_copy(row, replica.host)
        return True

    def drop_replica(self, row: int, host: int) -> None:
        """Give up one copy in memory, and the object if that was the last of any kind.

        A host without a copy changes nothing.
        """
        directory = self._state.directory
        replicas = directory.replicas(row)
        if all(replica.host != host for replica in replicas):
            return
        if len(replicas) == 1 and not directory.disks(row):
            # A removal that comes now must not be over before it could not come back.
            self.drop_row(row)
            return
        self._drop_copy(row, host)

    def _drop_copy(self, row: int, host: int) -> None:
        """Forget a copy in memory and have its header wiped; a removal waits for that as well.

        The disk of the host forgets it too, unless the directory lists that: a record that has not
        been reported is one that no later removal would reach.
        """
        state, directory = self._state, self._state.directory
        replica = directory.drop_replica(row, host)
        if replica is not None:
            extent = state.extent_of(row, replica.offset)
            unlisted = None if host in directory.disks(row) else directory.version(row)
            self.wipe_copy(
                directory.key(row),
                state.hosts[host],
                extent,
                directory.lease_until_ms(row),
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
        """Have a copy wiped that the directory does not know (any more).

        A removal of its key is not over before: a new master would find the header.

        Args:
            key: of the object.
            host: where it is, or may be.
            extent: there.
            free_at_ms: as ``Drops.drop``.
            version: if given, it may be on its way to the disk of the host, which is to forget it.
            was_shown: see ``note_going``.

        Returns: done when that is so, or the host is lost.
        """
        if host.caller is None:
            self.note_unlisted(key)
        done = host.drops.drop([extent.offset], [extent.length], free_at_ms)
        going = [done]
        if version is not None and host.disk is not None:
            going.append(host.drops.forget(key, version, after=done))
        self.note_going(key, going, was_shown=was_shown)
        return going

    def lose_disk(self, row: int, host: int) -> None:
        """Note that the copy on a disk is gone already, and the object if that was the last."""
        directory = self._state.directory
        directory.drop_disk(row, host)
        if not directory.replicas(row) and not directory.disks(row):
            self.drop_row(row)
            self._state.counters.objects_evicted += 1

    async def verify_replica(self, key: str, version: int, number: int) -> bool:
        """Have a host look at its copy, and give that up if it is bad.

        Returns: whether it is good, or not there.
        Raises: PeerLostError, DeadlineError.
        """
        state = self._state
        row = state.directory.find(key)
        host = state.hosts.get(number)
        if row == NO_ROW or state.directory.version(row) != version or host is None:
            return True
        offset = state.find_copy(row, number)
        if offset < 0:
            return True
        # The host checks for itself: the fault may lie in the reader's memory.
        verdict = await host.order("verify", VerifyExtent, Ack, offset=offset, version=version)
        is_same = state.is_version(row, key, version)
        # Of two who report a copy, the second may find a new one in its place, or none.
        if not verdict.ok and is_same and state.find_copy(row, number) == offset:
            logger.error("event=replica_corrupt host=%s key=%s", host.name, key)
            state.counters.replicas_corrupt += 1
            self.drop_replica(row, number)
        return verdict.ok

    # Going and leaving.

    def note_going(
        self, key: str, going: "Sequence[asyncio.Future[None]]", *, was_shown: bool = True
    ) -> None:
        """Note that an object is gone when these are done, and a removal of its key is not over
        before.

        Args:
            key: of the object.
            going: what is to be done.
            was_shown: it was in the directory. Else a put of the key, which has a higher version,
                need not wait: a host that does not answer would hold it up.
        """
        _join(self._removing, key, going)
        if was_shown:
            _join(self._replacing, key, going)

    def find_going(self, key: str) -> "asyncio.Future[Any] | None":
        """Return a future, done when an earlier object of the key is gone; None: there is none."""
        return self._removing.get(key)

    def find_going_of(self, keys: Collection[str]) -> "list[asyncio.Future[Any]]":
        """Do as ``find_going``, of several keys; each future once."""
        removing = self._removing
        if not removing or removing.keys().isdisjoint(keys):
            return []
        return list(dict.fromkeys(removing[key] for key in keys if key in removing))

    def find_going_below(self, prefix: str) -> "list[asyncio.Future[Any]]":
        """Do as ``find_going``, of all keys with a prefix; each future once."""
        found = (gone for key, gone in self._removing.items() if key.startswith(prefix))
        return list(dict.fromkeys(found))

    def find_replaced(self, key: str) -> "asyncio.Future[Any] | None":
        """Do as ``find_going``, of objects that clients were shown: a put of the key waits for
        it.
        """
        return self._replacing.get(key)

    def may_have_older(self, keys: Collection[str]) -> bool:
        """Return True if something of one of the keys is going, or may be with a host that is
        away.
        """
        unlisted = self._state.unlisted
        return bool(self._replacing) or (bool(unlisted) and not unlisted.isdisjoint(keys))

    def note_unlisted(self, key: str) -> None:
        """Note that a host that is away may have a copy that the directory does not list (any
        more).
        """
        self._state.unlisted.add(key)

    def note_lost(self) -> None:
        """Note that a host is about to be lost: what is being wiped may stay there."""
        for key in self._removing:
            self.note_unlisted(key)

    def hide(self, key: str) -> None:
        """Have nobody told of a key until ``show``: an older object of it could come back."""
        self._leaving[key] = self._leaving.get(key, 0) + 1

    def show(self, key: str) -> None:
        """End one ``hide``."""
        self._leaving[key] -= 1
        if not self._leaving[key]:
            del self._leaving[key]

    @property
    def leaving(self) -> Collection[str]:
        """The keys of which nothing can be said yet; nearly always none.

        Until the headers are wiped, no caller is told that such an object is gone, or of a new one:
        a client told so first that then reads by its location cache would see time go backwards.
        """
        return self._leaving

    def _note_leaving(self, key: str, headers: "Sequence[asyncio.Future[Any]]") -> None:
        for header in headers:
            if not header.done():
                self.hide(key)
                header.add_done_callback(lambda _: self.show(key))


def _join(
    all_going: "dict[str, asyncio.Future[Any]]", key: str, going: "Sequence[asyncio.Future[None]]"
) -> None:
    """Have a key wait for these as well, until they are done."""

    def forget(gone: "asyncio.Future[Any]") -> None:
        if all_going.get(key) is gone:
            del all_going[key]

    earlier = all_going.get(key)
    pending = [*going, *([] if earlier is None else [earlier])]
    gone: asyncio.Future[Any] = pending[0] if len(pending) == 1 else asyncio.gather(*pending)
    all_going[key] = gone
    gone.add_done_callback(forget)
