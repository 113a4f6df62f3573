"""A client's cache of its master's answers: the places of objects, while their leases hold.

A lease keeps an object's space from being used again, not the object from being removed. So what is
read from a remembered place is good only with the object's header: whoever removes or replaces an
object has its answer after that is gone.
"""

import threading

from tandem._native import LocationCache as NativeCache
from tandem.store.messages import Endpoint

__all__ = ["LocationCache"]

MARGIN_SHARE = 0.1


class LocationCache:
    """The location cache of one client, for all its threads.

    Args:
        max_locations: objects that are remembered; 0 for none.
    """

    def __init__(self, max_locations: int) -> None:
        self.cache = NativeCache(max_locations)
        self.margin_s = 0.0
        """Seconds that must be left of a lease for a place to be used: a read takes its time, and
        one that ends too late is read again, with all that was read beside it."""
        self._lock = threading.Lock()
        self._count = 0
        self._numbers: dict[Endpoint, int] = {}
        self._endpoints: dict[int, Endpoint] = {}

    def number(self, endpoint: Endpoint) -> int:
        """Return the number of an endpoint: a host that is back elsewhere has another one."""
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
        """Return the endpoint of a number; None if it has been forgotten meanwhile."""
        return self._endpoints.get(number)

    def note_lease(self, lease_s: float) -> None:
        """Note that the master gives leases of this length."""
        self.margin_s = MARGIN_SHARE * lease_s

    def clear(self) -> None:
        """Forget all: places, and the hosts of a master that may be another's now."""
        self.cache.clear()
        with self._lock:
            self._numbers, self._endpoints = {}, {}
