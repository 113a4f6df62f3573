"""Pins: blocks that clients ask the store to keep for a time, with a limit for each client.
Pure.
"""

from collections.abc import Sequence

__all__ = ["PinLedger"]

_SWEEP_S = 10.0
"""Seconds between two searches for expired pins."""


class PinLedger:
    """The blocks that clients have pinned (asked to be evicted late), by client and key, each with
    the time at which its pin ends.

    Args:
        max_blocks: largest number of pinned blocks of one client; 0: pinning is off.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._clients: dict[str, dict[bytes, float]] = {}
        self._swept_s = 0.0

    def take(self, client: str, keys: Sequence[bytes], pin_s: float, now_s: float) -> list[bytes]:
        """Pin a chain of blocks for a time; return the leading keys that are within the client's
        limit.

        Args:
            client: name of the client that asks.
            keys: keys of the blocks, from the start of the prefix on.
            pin_s: seconds from now; an earlier pin that ends later is kept.
            now_s: monotonic seconds.
        """
        self._sweep(now_s)
        pins = self._clients.get(client, {})
        pinned: list[bytes] = []
        for key in keys:
            if key not in pins and len(pins) >= self._max_blocks:
                break
            pins[key] = max(pins.get(key, 0.0), now_s + pin_s)
            pinned.append(key)
        if pins:
            self._clients[client] = pins
        return pinned

    def find_left(self, key: bytes, now_s: float) -> float:
        """Return the seconds for which a block is still pinned (to be evicted late) by any client;
        0 if it is not.
        """
        ends = (pins.get(key, 0.0) for pins in self._clients.values())
        return max(max(ends, default=0.0) - now_s, 0.0)

    def _sweep(self, now_s: float) -> None:
        if now_s - self._swept_s < _SWEEP_S:
            return
        self._swept_s = now_s
        for client, pins in [*self._clients.items()]:
            left = {key: end for key, end in pins.items() if end > now_s}
            if left:
                self._clients[client] = left
            else:
                del self._clients[client]
