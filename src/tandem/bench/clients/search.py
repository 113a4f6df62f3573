"""The number of users that a server gives a rate of tokens each: the question of a purchase."""

from collections.abc import Awaitable, Callable

import msgspec

__all__ = ["UserSearch", "find_users"]


class UserSearch(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a search."""

    users: int
    """The most users that all got the rate; 0 where one does not."""
    tokens_per_s: float
    """Tokens a second of the slow users (10th percentile) at that number; of one where it is 0."""
    tried: dict[int, float]
    """The same for every number that was tried."""
    is_limited: bool
    """True if the search ended at the most users it may try, and more may be served."""


async def find_users(
    measure: Callable[[int], Awaitable[float]], *, slo_tps: float, most: int
) -> UserSearch:
    """Find the most users at once that get a rate, by doubling and then by halves.

    Args:
        measure: returns the tokens a second that the slow ones of so many users got.
        slo_tps: the rate.
        most: users to try at most.
    """
    tried: dict[int, float] = {}

    async def holds(users: int) -> bool:
        tried[users] = await measure(users)
        return tried[users] >= slo_tps

    good, bad, users = 0, 0, 1
    while bad == 0 and users <= most:
        if await holds(users):
            good = users
            if users == most:
                break
            users = min(2 * users, most)
        else:
            bad = users
    while bad - good > 1:
        middle = (good + bad) // 2
        if await holds(middle):
            good = middle
        else:
            bad = middle
    return UserSearch(
        users=good,
        tokens_per_s=tried[max(good, 1)],
        tried=dict(sorted(tried.items())),
        is_limited=bad == 0,
    )
