"""What a client remembers of its master's answers: where objects lie, while their leases hold.

A lease keeps an object's space from being used again, not the object from being removed. So what is
read from a remembered place is good only with the object's header: whoever removes or replaces an
object has its answer after that is gone.
"""

import threading

from tandem._native import LocationCache
from tandem.store.messages import Endpoint

__all__ = ["KnownPlaces"]


class KnownPlaces:
    """Of one client, for all its threads.

    Args:
        max_locations: objects that are remembered; 0 for none.
    """

    def __init__(self, max_locations: int) -> None:
        self.cache = LocationCache(max_locations)
        self._lock = threading.Lock()
        self._numbers: dict[Endpoint, int] = {}
        self._endpoints: list[Endpoint] = []

    def number(self, endpoint: Endpoint) -> int:
        """Return the number of an endpoint: a host that is back elsewhere has another one."""
        number = self._numbers.get(endpoint)
        if number is None:
            with self._lock:
                number = self._numbers.get(endpoint)
                if number is None:
                    number = len(self._endpoints)
                    self._endpoints.append(endpoint)
                    self._numbers[endpoint] = number
        return number

    def endpoint(self, number: int) -> Endpoint:
        """Return the endpoint of a number."""
        return self._endpoints[number]
