"""A client's cache of its master's answers: the places of objects, while their leases hold.

A lease keeps an object's space from reuse, and does not prevent the object's removal. So bytes read
from a cached place are valid only with the object's header: a remover gets its answer after the
header is wiped.
"""

import threading

from tandem._native import LocationCache as NativeCache
from tandem.store.messages import Endpoint

__all__ = ["LocationCache"]

MARGIN_SHARE = 0.1


class LocationCache:
    """The location cache of one client, for all its threads.

    Args:
        max_locations: limit of cached objects; 0 for no cache.
    """

    def __init__(self, max_locations: int) -> None:
        self.cache = NativeCache(max_locations)
        self.margin_s = 0.0
        """Seconds that must be left of a lease to use a cached place. A read that outlasts its
        lease is repeated, together with all objects of the same read.
        """
        self._lock = threading.Lock()
        self._count = 0
        self._numbers: dict[Endpoint, int] = {}
        self._endpoints: dict[int, Endpoint] = {}

    def number(self, endpoint: Endpoint) -> int:
        """Return the number that stands for an endpoint in the cache. A host that returns with
        other addresses gets a new number.
        """
        number = self._numbers.get(endpoint)
        if number is None:
            with self._lock:
                number = self._numbers.get(endpoint)
                if number is None:
                    number = self._count
                    self._count += 1
                    self._endpoints[number] = endpoint
                    self._numbers[endpoint] = number
        return number

    def endpoint(self, number: int) -> Endpoint | None:
        """Return the endpoint with a number; None if it was forgotten meanwhile."""
        return self._endpoints.get(number)

    def note_lease(self, lease_s: float) -> None:
        """Note for how many seconds a lease of the master keeps an object's bytes in place."""
        self.margin_s = MARGIN_SHARE * lease_s

    def clear(self) -> None:
        """Forget all places and endpoints, since another master may number hosts differently."""
        self.cache.clear()
        with self._lock:
            self._numbers, self._endpoints = {}, {}
