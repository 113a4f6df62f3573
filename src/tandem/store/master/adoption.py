"""Adoption of the objects that a joining host reports: each is added to the directory, or wiped on
the host if it is dead or stale.
"""

from tandem._native import measure_extents
from tandem.store.election import Tombstones
from tandem.store.formats import layout
from tandem.store.formats.headers import ExtentHeader
from tandem.store.formats.records import append_record, iterate_records
from tandem.store.master.departures import Departures
from tandem.store.master.state.index import NO_ROW, Replica
from tandem.store.master.state.space import Extent, HostSpace
from tandem.store.master.state.state import StoreState
from tandem.store.messages import ExtentRecords

__all__ = ["Adoption"]


class Adoption:
    """Adds the inventories (lists of objects) of joining hosts to the directory.

    Args:
        state: the master's state.
        departures: removes dead and stale copies.
        tombstones: the tombstones of removed objects; not owned.
    """

    def __init__(self, state: StoreState, departures: Departures, tombstones: Tombstones) -> None:
        self._state = state
        self._departures = departures
        self._tombstones = tombstones

    def take_page(self, host: HostSpace, records: ExtentRecords, *, is_disk: bool) -> None:
        """Add the objects on one page of a joining host's inventory (its list of objects, in memory
        or on its disk) to the directory, or have the host remove them.

        Raises: CorruptionError (the columns of the page differ in length).
        """
        if not is_disk and self._adopt_columns(host, records):
            return
        listed = iterate_records(records)
        if is_disk:
            for _, header in listed:
                self._adopt_disk(host, header)
        else:
            for offset, header in self._adopt_new(host, listed):
                self._adopt(host, offset, header)

    def _adopt_columns(self, host: HostSpace, records: ExtentRecords) -> bool:
        """Insert the objects of an inventory page (a host's list of objects) at once if the
        directory knows none of them, as is usual after a restart of the master.

        Returns: False if an object needs a decision; nothing has changed then.
        """
        state, keys = self._state, records.keys
        columns = (records.sizes, records.versions, records.checksums, records.offsets)
        flags = (records.wanted, records.hard_pins, records.soft_pin_ms)
        if not keys or any(len(column) != len(keys) for column in (*columns, *flags)):
            return False
        if any(records.hard_pins) or any(records.soft_pin_ms):
            return False
        if state.dropped_versions or len(self._tombstones) or host.drops or host.is_known:
            return False
        if min(records.versions) <= host.dead_below or len(set(keys)) != len(keys):
            return False
        if state.directory.has_any(keys):
            return False
        self._insert_new(host, records)
        return True

    def _insert_new(self, host: HostSpace, records: ExtentRecords) -> None:
        state = self._state
        rows = state.directory.insert_many(
            records.keys,
            sizes=records.sizes,
            checksums=records.checksums,
            versions=records.versions,
            wanted=records.wanted,
            host=host.number,
            offsets=records.offsets,
            # Grant a lease: a client that an earlier master sent to this copy may still read it.
            lease_until_ms=state.now_ms() + state.config.lease_ms,
        )
        host.confirmed.update(zip(rows, measure_extents(records.keys, records.sizes), strict=True))

    def _find_dead(self, key: str, floor: int) -> int:
        """Return the highest version of ``key`` that was removed: objects up to it must not be
        adopted. ``floor`` is the version up to which all objects of the reporting host are dead.
        """
        dropped = self._state.dropped_versions.get(key, -1)
        return max(dropped, self._tombstones.find(key), floor)

    def _adopt_new(
        self, host: HostSpace, listed: list[tuple[int, ExtentHeader]]
    ) -> list[tuple[int, ExtentHeader]]:
        """Insert the objects that the directory does not know, nearly all after a restart. Return
        those that need a decision.
        """
        if host.is_known:
            return listed
        find, find_dead, floor = self._state.directory.find, self._find_dead, host.dead_below
        new: dict[str, tuple[int, ExtentHeader]] = {}
        rest: list[tuple[int, ExtentHeader]] = []
        for item in listed:
            offset, header = item
            key = header.key
            is_plain = not header.hard_pin and not header.soft_pin_ms
            is_new = find(key) == NO_ROW and key not in new
            is_alive = header.version > find_dead(key, floor)
            if is_new and is_plain and is_alive and offset not in host.drops:
                new[key] = item
            else:
                rest.append(item)
        records = ExtentRecords()
        for offset, header in new.values():
            append_record(records, offset, header)
        self._insert_new(host, records)
        return rest

    def _adopt(self, host: HostSpace, offset: int, header: ExtentHeader) -> None:
        """Add a copy in memory that a host reports to the directory, or have the host wipe it."""
        directory = self._state.directory
        row = directory.find(header.key)
        listed_at = -1 if row == NO_ROW else self._state.find_copy(row, host.number)
        is_same = row != NO_ROW and directory.version[row] == header.version
        length = layout.extent_bytes(len(header.key.encode()), header.size)
        if is_same and listed_at == offset:
            host.confirmed[row] = length
            return
        if offset in host.drops:  # Removed since the inventory began.
            wiped = host.drops.watch_wipe(offset)
            if wiped is not None:
                host.purging.append(wiped)
            return
        newest = self._find_dead(header.key, host.dead_below)
        is_alive = header.version > newest
        is_newer = is_alive and (row == NO_ROW or header.version > directory.version[row])
        if (is_newer and not host.is_known) or (is_alive and is_same and listed_at < 0):
            self._insert(host, offset, header, row if is_same else NO_ROW)
            return
        free_at_ms = self._state.now_ms() + self._state.config.lease_ms
        extent = Extent(offset, length)
        host.purging += self._departures.wipe_copy(header.key, host, extent, free_at_ms)

    def _insert(self, host: HostSpace, offset: int, header: ExtentHeader, row: int) -> None:
        """Add a reported copy to the object in ``row``, which the caller has found to be of the
        same version; for ``NO_ROW`` insert a new object, in place of an older one of the key.
        """
        directory, replica = self._state.directory, Replica(host.number, offset)
        if row != NO_ROW:
            directory.copies.add_replica(row, replica)
        else:
            older = directory.find(header.key)
            if older != NO_ROW:
                self._departures.drop_row(older)
            row = directory.insert(
                header.key,
                size=header.size,
                checksum=header.checksum,
                version=header.version,
                replicas=[replica],
                wanted=header.wanted,
            )
            self._set_pins(row, header)
        # Grant a lease: a client that an earlier master sent to this copy may still read it.
        directory.extend_lease(row, self._state.now_ms() + self._state.config.lease_ms)
        length = layout.extent_bytes(len(header.key.encode()), header.size)
        host.confirmed[row] = length

    def _set_pins(self, row: int, header: ExtentHeader) -> None:
        if header.hard_pin or header.soft_pin_ms:
            soft = self._state.now_ms() + header.soft_pin_ms if header.soft_pin_ms else 0
            self._state.directory.set_pins(row, hard=header.hard_pin, soft_until_ms=soft)

    def _adopt_disk(self, host: HostSpace, header: ExtentHeader) -> None:
        """Add a copy on disk that a host reports to the directory, or have the host forget it."""
        directory = self._state.directory
        row = directory.find(header.key)
        is_alive = header.version > self._find_dead(header.key, host.disk_dead_below)
        is_same = row != NO_ROW and directory.version[row] == header.version
        is_newer = row == NO_ROW or header.version > directory.version[row]
        if is_alive and is_same and directory.checksum[row] == header.checksum:
            if host.number not in directory.copies.disks(row):
                directory.copies.add_disk(row, host.number)
        elif is_alive and is_newer and not host.is_disk_known:
            if row != NO_ROW:
                self._departures.drop_row(row)
            row = directory.insert(
                header.key,
                size=header.size,
                checksum=header.checksum,
                version=header.version,
                replicas=[],
                wanted=header.wanted,
                disks=[host.number],
            )
            self._set_pins(row, header)
        else:
            forgotten = host.drops.forget(header.key, header.version)
            self._state.wipes.note([header.key], [forgotten])
            host.purging.append(forgotten)
            return
        host.confirmed_disk[row] = header.version
