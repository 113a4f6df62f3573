"""The decisions of a store, as pure functions: where a replica goes, where a read
goes, how much is evicted. Pure: chance and time are arguments.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["HostView", "Strategy", "count_bytes_to_evict", "order_hosts", "rank_replicas"]


class Strategy(StrEnum):
    """The order of hosts when nothing else decides."""

    RANDOM = "random"
    MOST_FREE = "most_free"


@dataclass(frozen=True, slots=True)
class HostView:
    """The facts of a host that the policies use."""

    host: int
    name: str
    machine: str
    free_bytes: int
    capacity_bytes: int
    load_bytes: float = 0.0
    """Bytes promised to readers lately."""
    is_silent: bool = False
    """It has not answered for much longer than it usually takes."""


def order_hosts(
    hosts: Sequence[HostView],
    *,
    strategy: Strategy,
    draw: Callable[[int], int],
    preferred: Sequence[str] = (),
    machine: str = "",
) -> list[int]:
    """Return host numbers in the order in which replicas should be tried on them.

    Args:
        hosts: those that take new objects.
        strategy: order of what neither preference nor machine decides.
        draw: ``draw(n)`` is a random number in ``[0, n)``.
        preferred: names of hosts that come first, in this order.
        machine: hosts of this machine come next; empty for none.
    """
    if strategy is Strategy.MOST_FREE:
        ordered = sorted(hosts, key=lambda view: (-view.free_bytes, view.host))
    else:
        ordered = list(hosts)
        for last in range(len(ordered) - 1, 0, -1):
            other = draw(last + 1)
            ordered[last], ordered[other] = ordered[other], ordered[last]
    if preferred or machine:
        rank = {name: position for position, name in enumerate(preferred)}
        after = len(rank)
        ordered.sort(
            key=lambda view: rank.get(
                view.name, after if machine and view.machine == machine else after + 1
            )
        )
    return [view.host for view in ordered]


def rank_replicas(candidates: Sequence[HostView], machine: str) -> list[int]:
    """Return host numbers in the order in which to read: those that answer first, of these the same
    machine, then by load.
    """
    ordered = sorted(
        candidates,
        key=lambda view: (view.is_silent, view.machine != machine, view.load_bytes, view.host),
    )
    return [view.host for view in ordered]


def count_bytes_to_evict(
    used_bytes: int, capacity_bytes: int, *, high_watermark: float, step: float
) -> int:
    """Return how many bytes to evict now: nothing up to the watermark, then down by a step."""
    over_bytes = used_bytes - high_watermark * capacity_bytes
    return int(over_bytes + step * capacity_bytes) if over_bytes > 0 else 0
