"""Decisions of a store as pure functions: the host of a replica, the host of a read, the bytes to
evict. Time and randomness are arguments.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["HostView", "Strategy", "count_bytes_to_evict", "order_hosts", "rank_replicas"]


class Strategy(StrEnum):
    """The order of hosts for new replicas if neither preference nor machine decides."""

    RANDOM = "random"
    MOST_FREE = "most_free"


@dataclass(frozen=True, slots=True)
class HostView:
    """The facts about a host by which the policies choose it for a new replica or for a read."""

    host: int
    name: str
    machine: str
    free_bytes: int
    capacity_bytes: int
    load_bytes: float = 0.0
    """Bytes that readers were recently sent to this host for, decaying over time."""
    is_silent: bool = False
    """True if the host has not answered for much longer than usual."""


def order_hosts(
    hosts: Sequence[HostView],
    *,
    strategy: Strategy,
    draw: Callable[[int], int],
    preferred: Sequence[str] = (),
    machine: str = "",
) -> list[int]:
    """Return host numbers in the order in which to try them for new replicas.

    Args:
        hosts: the hosts that take new objects.
        strategy: the order if neither preference nor machine decides.
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
    """Return host numbers in the order in which to read from them: answering hosts first, then the
    reader's machine, then the least loaded.
    """
    ordered = sorted(
        candidates,
        key=lambda view: (view.is_silent, view.machine != machine, view.load_bytes, view.host),
    )
    return [view.host for view in ordered]


def count_bytes_to_evict(
    used_bytes: int, capacity_bytes: int, *, high_watermark: float, step: float
) -> int:
    """Return the number of bytes to evict: 0 up to the watermark, above it the excess and one more
    step.
    """
    over_bytes = used_bytes - high_watermark * capacity_bytes
    return int(over_bytes + step * capacity_bytes) if over_bytes > 0 else 0
