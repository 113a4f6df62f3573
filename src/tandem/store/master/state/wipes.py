"""The wipes of removed objects that are in progress, by key.

A removed object leaves the directory at once. It is *going* until no header of it is left that a
new master could find, and *hidden* while clients may still read it from their location caches.
"""

import asyncio
from collections.abc import Collection, Sequence
from typing import Any

__all__ = ["Wipes"]

Gone = asyncio.Future[Any]


class Wipes:
    """The keys that have removed objects whose headers are not wiped yet."""

    def __init__(self) -> None:
        self._removing: dict[str, Gone] = {}
        """A future for each key that has removed objects; done when all headers of these objects
        are wiped.
        """
        self._replacing: dict[str, Gone] = {}
        """The futures of ``_removing`` for objects that a client may have seen. A put of the key
        waits only for these.
        """
        self._hidden: dict[str, int] = {}
        """Number of reasons, by key, why no client is answered about the key."""

    def note(self, keys: Sequence[str], going: Sequence[Gone], *, was_shown: bool = True) -> None:
        """Record futures of wipes for keys. A removal of one of the keys waits until all are done.

        Args:
            keys: the objects' keys.
            going: futures of the wipes.
            was_shown: True if the directory has listed the objects. If not, a put of a key does not
                wait, since its version is higher, and a host that does not answer would delay the
                put.
        """
        _join(self._removing, keys, going)
        if was_shown:
            _join(self._replacing, keys, going)

    def list_keys(self) -> Collection[str]:
        """Return the keys with removed objects that are not wiped yet, as a view."""
        return self._removing.keys()

    def find(self, key: str) -> Gone | None:
        """Return a future that is done when the headers of all removed objects of the key are wiped
        on their hosts; None if there is nothing to wipe.
        """
        return self._removing.get(key)

    def find_of(self, keys: Collection[str]) -> list[Gone]:
        """Return the futures that are done when all removed objects of the keys are wiped, each
        future once.
        """
        removing = self._removing
        if not removing or removing.keys().isdisjoint(keys):
            return []
        return list(dict.fromkeys(removing[key] for key in keys if key in removing))

    def find_below(self, prefix: str) -> list[Gone]:
        """Return the futures that are done when all removed objects with a key prefix are wiped,
        each future once.
        """
        found = (gone for key, gone in self._removing.items() if key.startswith(prefix))
        return list(dict.fromkeys(found))

    @property
    def has_replaced(self) -> bool:
        """True if ``find_replaced`` could find something."""
        return bool(self._replacing)

    def find_replaced(self, key: str) -> Gone | None:
        """Return a future that is done when the objects of the key that clients have seen are
        wiped; None if there is nothing to wipe. A put of the key waits for it.
        """
        return self._replacing.get(key)

    @property
    def hidden(self) -> Collection[str]:
        """The keys that no client is answered about now; nearly always empty.

        Until the headers are wiped, no client is told that such an object is gone, or of a new one.
        A client that knew, and then read the old object by its location cache, would see the past.
        """
        return self._hidden

    def hide(self, key: str) -> None:
        """Answer no client about a key until ``show``, because an older object of the key could
        still come back.
        """
        self._hidden[key] = self._hidden.get(key, 0) + 1

    def show(self, key: str) -> None:
        """End one ``hide`` of a key; after the last one clients are answered about the key
        again.
        """
        self._hidden[key] -= 1
        if not self._hidden[key]:
            del self._hidden[key]

    def hide_until(self, key: str, headers: Sequence[Gone]) -> None:
        """Answer no client about a key until these headers are wiped."""
        for header in headers:
            if not header.done():
                self.hide(key)
                header.add_done_callback(lambda _: self.show(key))


def _join(waiting: dict[str, Gone], keys: Sequence[str], going: Sequence[Gone]) -> None:
    """Give the keys in ``waiting`` one future that is done when their earlier ones and all of
    ``going`` (the wipes of their objects) are done. The entries are removed then.
    """
    earlier = dict.fromkeys(waiting[key] for key in keys if key in waiting)
    pending = [*going, *earlier]
    gone: Gone = pending[0] if len(pending) == 1 else asyncio.gather(*pending)
    waiting.update(dict.fromkeys(keys, gone))

    def forget(_: Gone) -> None:
        for key in keys:
            if waiting.get(key) is gone:
                del waiting[key]

    gone.add_done_callback(forget)
