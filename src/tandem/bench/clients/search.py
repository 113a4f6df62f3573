"""A search for the most concurrent users to whom a server gives a required token rate each."""

from collections.abc import Awaitable, Callable

import msgspec

__all__ = ["UserSearch", "find_users"]


class UserSearch(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a search for the number of users."""

    users: int
    """The largest number of users at which the slow users still got the rate; 0 if one user did
    not.
    """
    tokens_per_s: float
    """Tokens per second of the slow users (10th percentile) at ``users`` users, or at one user if
    that is 0.
    """
    tried: dict[int, float]
    """Tokens per second of the slow users (10th percentile), by the number of users tried."""
    is_limited: bool
    """True if even the largest allowed number of users got the rate, so that the server may serve
    more.
    """


async def find_users(
    measure: Callable[[int], Awaitable[float]], *, slo_tps: float, most: int
) -> UserSearch:
    """Find the most concurrent users that all get a token rate, by doubling and then bisection.

    Args:
       measure: takes a number of users; returns the tokens per second of the slow ones.
       slo_tps: the required tokens per second of a user.
       most: the largest number of users to try.
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
