"""Objects that go because somebody says so: an answer only when no restart brings them back."""

import asyncio
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from tandem.store.election import Tombstone
from tandem.store.master.lookups import SCAN_KEYS
from tandem.store.master.state.index import NO_ROW
from tandem.store.messages import KeyBytes, PrefixRemoval, RemoveObjects, RemovePrefix
from tandem.store.sessions import Caller

if TYPE_CHECKING:
    from tandem.store.master.master import StoreMaster

__all__ = ["Removals"]


class Removals:
    """The removals of one master."""

    def __init__(self, master: "StoreMaster") -> None:
        self._master = master
        self._removing: dict[str, asyncio.Future[Any]] = {}
        """Keys of objects that went and whose headers are not all gone yet."""
        self._replacing: dict[str, asyncio.Future[Any]] = {}
        """The same without copies that nobody was ever shown: what a put of the key waits for."""
        self._leaving: dict[str, int] = {}
        """Of these, the keys of what clients may still read, and how many headers there are."""

    async def remove(self, caller: Caller, request: RemoveObjects) -> KeyBytes:
        """Remove objects; answers when their headers are gone."""
        return KeyBytes(
            await self._master.requests.change(
                caller, request, lambda: self._remove_keys(request.keys, self._begin())
            )
        )

    def _begin(self) -> int:
        """Return what tells what is there now from what comes while a removal waits.

        Its caller may have given up, and put anew: that is not to go.
        """
        return self._master.newest_version

    async def _remove_keys(self, keys: Sequence[str], begin: int) -> bytes:
        # Whether they are found or not: a host that has not told yet may have a copy.
        await self._master.recover()
        num_lost = self._master.membership.num_lost
        flags, versions = await self._drop_keys(keys, begin, marked_below=-1)
        tombstones = list(map(Tombstone, keys, versions))
        await self._master.membership.bury(tombstones, num_lost)
        return flags

    async def _drop_keys(
        self, keys: Sequence[str], begin: int, *, marked_below: int
    ) -> tuple[bytes, list[int]]:
        """Remove what there is on hosts that are there; return when it is wiped.

        Args:
            keys: of the objects.
            begin: see ``_begin``.
            marked_below: what a tombstone of their prefix says already.

        Returns: a byte for each: 1 for what was found; and the version up to which it is dead.
        """
        flags = bytearray(len(keys))
        pending: list[asyncio.Future[Any]] = []
        directory = self._master.directory
        versions = [begin] * len(keys)
        for i, key in enumerate(keys):
            row = directory.find(key)
            if row != NO_ROW and not self._master.has_given(directory.version(row), since=begin):
                versions[i] = max(begin, directory.version(row))
                self._master.drop_row(row, wait=True)
                self._master.counters.objects_removed += 1
                flags[i] = 1
            # Else it may have been removed, or evicted, but not yet for good.
            going = self.find_going(key)
            if going is not None:
                pending.append(going)
        pairs = zip(keys, versions, strict=True)
        self._master.membership.mark_removed(
            [Tombstone(*pair) for pair in pairs if pair[1] > marked_below]
        )
        # Only then could no restart bring them back.
        for gone in pending:
            await asyncio.shield(gone)
        return bytes(flags), versions

    def note_going(
        self, key: str, going: "Sequence[asyncio.Future[None]]", *, was_shown: bool = True
    ) -> None:
        """An object is gone when these are done, and a removal of its key is not over before.

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
        """Return what is done when an earlier object of this key is gone; None if none is going."""
        return self._removing.get(key)

    def find_replaced(self, key: str) -> "asyncio.Future[Any] | None":
        """Return what a put of this key waits for: as ``find_going``, of what was ever shown."""
        return self._replacing.get(key)

    @property
    def has_going(self) -> bool:
        """Whether anything is going that a put may have to wait for."""
        return len(self._replacing) > 0

    def note_leaving(self, key: str, headers: "Sequence[asyncio.Future[Any]]") -> None:
        """Clients that remember an object may read it until these headers are gone.

        Until then nobody is told that it is gone, or of another one: who was told so first, and
        then read what it remembers, would see time go backwards.
        """
        for header in headers:
            if not header.done():
                self._leaving[key] = self._leaving.get(key, 0) + 1
                header.add_done_callback(lambda _: self._note_left(key))

    def _note_left(self, key: str) -> None:
        self._leaving[key] -= 1
        if not self._leaving[key]:
            del self._leaving[key]

    @property
    def leaving(self) -> Collection[str]:
        """The keys of which nothing can be said yet; nearly always none."""
        return self._leaving

    async def remove_prefix(self, caller: Caller, request: RemovePrefix) -> PrefixRemoval:
        """Remove all objects whose keys begin so."""
        return PrefixRemoval(
            await self._master.requests.change(
                caller, request, lambda: self._remove_matches(request.prefix, self._begin())
            )
        )

    async def _remove_matches(self, prefix: str, begin: int) -> int:
        matches = await self._master.lookups.match_prefix(prefix)
        membership = self._master.membership
        num_lost, tombstone = membership.num_lost, Tombstone(prefix, begin, is_prefix=True)
        # Also for what nobody here has heard of.
        membership.mark_removed([tombstone])
        count, newer = 0, list[Tombstone]()
        for at in range(0, len(matches), SCAN_KEYS):
            keys = matches[at : at + SCAN_KEYS]
            flags, versions = await self._drop_keys(keys, begin, marked_below=begin)
            count += sum(flags)
            newer += [
                Tombstone(*pair) for pair in zip(keys, versions, strict=True) if pair[1] > begin
            ]
        # What others are removing is not gone before its headers are.
        for gone in [gone for key, gone in self._removing.items() if key.startswith(prefix)]:
            await asyncio.shield(gone)
        await membership.bury([tombstone, *newer], num_lost)
        return count


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
