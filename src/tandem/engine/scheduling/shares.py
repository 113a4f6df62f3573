"""The number of live requests of each client, and the rule that refuses more of them. Pure.

While fewer than ``limit`` requests are live, every request is accepted. From ``limit`` to ``2 *
limit``, a client may add a request only while it has fewer than its share of ``limit``, by the
weights of the clients that have requests. So a client that fills the queue gets its own further
requests refused, and no others.
"""

from collections import Counter

__all__ = ["ClientShares"]


class ClientShares:
    """The numbers and weights of live requests by client, from which a client's share of the queue
    follows. Single-threaded.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._total = 0
        self._weights: dict[str, float] = {}
        """Weights of the clients that have requests, each as given with the client's latest
        request."""

    def __len__(self) -> int:
        """Return the number of requests of all clients."""
        return self._total

    @property
    def num_clients(self) -> int:
        """Number of clients that have a request."""
        return len(self._counts)

    def count(self, client: str) -> int:
        """Return the number of requests of a client."""
        return self._counts[client]

    def has_room(self, client: str, limit: int, weight: float = 1.0) -> bool:
        """Return True if a client may add a request while ``limit`` requests are the regular
        maximum.

        True while fewer than ``limit`` are live in all, False from ``2 * limit`` on; between, True
        if the client has fewer than its weighted share of ``limit``.
        """
        if self._total < limit:
            return True
        if self._total >= 2 * limit:
            return False
        others = sum(each for name, each in self._weights.items() if name != client)
        return self._counts[client] < int(limit * weight / (others + weight))

    def add(self, client: str, weight: float = 1.0) -> None:
        """Count one more request of a client, and store the client's weight."""
        self._counts[client] += 1
        self._total += 1
        self._weights[client] = weight

    def remove(self, client: str) -> None:
        """Count one request less of a client, when a request ends."""
        assert self._counts[client] > 0, f"client {client!r} has no request"
        self._counts[client] -= 1
        self._total -= 1
        if not self._counts[client]:
            del self._counts[client]
            del self._weights[client]
