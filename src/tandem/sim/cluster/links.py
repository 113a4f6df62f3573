"""Network links whose bandwidth transfers share by max-min fairness.

A transfer uses several links at once, for example the sending port of one machine and the receiving
port of another. All rates rise equally until a link is full, which fixes the rates of its
transfers: no rate can be raised without lowering one that is not higher. Rates change when a
transfer begins or ends, and only those of transfers that share links with it, directly or through
others.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tandem.sim.cluster.events import Events

__all__ = ["Link", "Links", "Transfer"]


@dataclass(eq=False, slots=True)
class Link:
    """One direction of a network port, a disk or a bus."""

    name: str
    bytes_per_s: float
    transfers: dict["Transfer", None] = field(default_factory=dict["Transfer", None])
    moved_bytes: float = 0.0


@dataclass(eq=False, slots=True)
class Transfer:
    """Bytes that are being moved over one or several links."""

    links: tuple[Link, ...]
    left_bytes: float
    on_end: Callable[[], None]
    rate: float = 0.0
    since_s: float = 0.0
    """Time at which ``left_bytes`` was last updated."""
    version: int = 0
    """Number of the transfer's last change of rate. An event for its end that was scheduled at an
    earlier rate has a lower number and is ignored.
    """


class Links:
    """All transfers of a simulated run over its network links, which they share fairly.

    Args:
       events: the clock.
       latency_s: seconds from starting a transfer until its first byte moves.
    """

    def __init__(self, events: Events, latency_s: float = 0.0) -> None:
        self._events = events
        self._latency_s = latency_s

    def start(self, links: Sequence[Link], size_bytes: float, on_end: Callable[[], None]) -> None:
        """Move bytes over links; ``on_end`` is called when the last byte has arrived."""
        transfer = Transfer(tuple(links), size_bytes, on_end)
        self._events.call_at(self._events.now_s + self._latency_s, self._begin, transfer)

    def _begin(self, transfer: Transfer) -> None:
        transfer.since_s = self._events.now_s
        for link in transfer.links:
            link.transfers[transfer] = None
            link.moved_bytes += transfer.left_bytes
        self._share(transfer.links)
        if not transfer.links:
            self._end(transfer, transfer.version)

    def _end(self, transfer: Transfer, version: int) -> None:
        if version != transfer.version:
            return  # The rate has changed since this event was queued.
        for link in transfer.links:
            del link.transfers[transfer]
        self._share(transfer.links)
        transfer.on_end()

    def _share(self, links: Iterable[Link]) -> None:
        """Recompute the rates of the transfers that a change on some links can affect."""
        now_s = self._events.now_s
        for transfer, rate in share_fairly(links).items():
            if rate == transfer.rate:
                continue
            transfer.left_bytes -= transfer.rate * (now_s - transfer.since_s)
            transfer.rate, transfer.since_s = rate, now_s
            transfer.version += 1
            end_s = now_s + max(transfer.left_bytes, 0.0) / rate
            self._events.call_at(end_s, self._end, transfer, transfer.version)


def share_fairly(links: Iterable[Link]) -> dict[Transfer, float]:
    """Return the max-min fair rates of all transfers connected with some links."""
    free: dict[Link, float] = {}
    todo = list(links)
    waiting: dict[Transfer, None] = {}
    while todo:
        link = todo.pop()
        if link in free:
            continue
        free[link] = link.bytes_per_s
        for transfer in link.transfers:
            if transfer not in waiting:
                waiting[transfer] = None
                todo += transfer.links
    count = {link: len(link.transfers) for link in free}
    rates: dict[Transfer, float] = {}
    while waiting:
        # Max-min fairness: all rates grow alike, and the link that fills up first fixes the rate of
        # the transfers that use it.
        tightest = min(
            (link for link in free if count[link]), key=lambda link: free[link] / count[link]
        )
        rate = free[tightest] / count[tightest]
        for transfer in [each for each in tightest.transfers if each in waiting]:
            del waiting[transfer]
            rates[transfer] = rate
            for link in transfer.links:
                free[link] -= rate
                count[link] -= 1
    return rates
