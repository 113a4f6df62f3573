"""Counts of each client's requests, and the admission of one more when there are many. Pure.

Up to a limit everyone may come. Beyond it, a client that has less than its share of the limit, by
the weights of all that are there, still may, until there are twice as many: so one that fills the
queue refuses itself and nobody else.
"""

from collections import Counter

__all__ = ["ClientShares"]


class ClientShares:
    """Counts requests by client. Single-threaded."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._total = 0
        self._weights: dict[str, float] = {}
        """Weights of clients with requests, as given by each client's latest request."""

    def __len__(self) -> int:
        """Return the requests of all clients."""
        return self._total

    @property
    def num_clients(self) -> int:
        """Clients that have a request."""
        return len(self._counts)

    def count(self, client: str) -> int:
        """Return the requests of a client."""
        return self._counts[client]

    def has_room(self, client: str, limit: int, weight: float = 1.0) -> bool:
        """Return True if a client may have one more request; see the module's rule."""
        if self._total < limit:
            return True
        if self._total >= 2 * limit:
            return False
        others = sum(each for name, each in self._weights.items() if name != client)
        return self._counts[client] < int(limit * weight / (others + weight))

    def add(self, client: str, weight: float = 1.0) -> None:
        """Count one more request of a client."""
        self._counts[client] += 1
        self._total += 1
        self._weights[client] = weight

    def remove(self, client: str) -> None:
        """Remove a request of a client that was counted."""
        assert self._counts[client] > 0, f"client {client!r} has no request"
        self._counts[client] -= 1
        self._total -= 1
        if not self._counts[client]:
            del self._counts[client]
            del self._weights[client]
