"""The highest rate that a cluster serves within its objectives, and the price of its tokens.

The rate is found by bisection: it is doubled until too few requests meet the objectives, or halved
until enough do, and then the interval is halved. Prices are read from a file: US dollars per hour
by machine.
"""

from collections.abc import Callable, Mapping

import msgspec

from tandem.core.errors import ConfigError
from tandem.sim.cluster.scenario import Scenario

__all__ = ["Capacity", "Probe", "find_capacity", "price_hour", "price_tokens"]

MAX_DOUBLINGS = 8


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """The result at one request rate that was tried in the search for the highest one."""

    rate_scale: float
    request_rate: float
    """Requests per second that arrived."""
    attained: float
    """Share of requests that met the objectives."""
    goodput: float
    tokens_per_s: float
    """Tokens of prompts and answers per second."""


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a search for the highest request rate that a cluster serves within its
    objectives.
    """

    best: Probe | None
    """The highest rate that met the objectives; None if no rate did."""
    probes: list[Probe]
    """All rates that were tried, in increasing order."""
    usd_per_hour: float | None = None
    usd_per_million_tokens: float | None = None
    """Price of prompt and answer tokens together at the best rate."""


def find_capacity(measure: Callable[[float], Probe], *, share: float, tolerance: float) -> Capacity:
    """Find the largest factor on a load's rate at which enough requests meet the objectives.

    Args:
       measure: runs the load at a factor.
       share: required share of requests that meet the objectives.
       tolerance: relative tolerance of the factor.
    """
    probes: dict[float, Probe] = {}

    def holds(scale: float) -> bool:
        probes[scale] = measure(scale)
        return probes[scale].attained >= share

    low = high = 1.0
    if holds(1.0):
        for _ in range(MAX_DOUBLINGS):
            high = 2 * low
            if not holds(high):
                break
            low = high
    else:
        for _ in range(MAX_DOUBLINGS):
            low = high / 2
            if holds(low):
                break
            high = low
    if low < high and probes[low].attained >= share:
        while high / low > 1 + tolerance:
            middle = (low * high) ** 0.5
            if holds(middle):
                low = middle
            else:
                high = middle
    good = [probe for probe in probes.values() if probe.attained >= share]
    best = max(good, key=lambda probe: probe.rate_scale, default=None)
    return Capacity(best=best, probes=sorted(probes.values(), key=lambda probe: probe.rate_scale))


def price_hour(scenario: Scenario, prices: Mapping[str, float]) -> float:
    """Return the price of a scenario's machines in US dollars per hour.

    Raises: ConfigError (a machine has no price).
    """
    total = 0.0
    for group in scenario.instances:
        name = group.hardware or (group.calibration.machine if group.calibration else "")
        if name not in prices:
            what = f"no price of {name or 'a machine without a name'}: add it to the price file"
            raise ConfigError("sim.capacity", what)
        total += group.count * prices[name]
    return total


def price_tokens(usd_per_hour: float, tokens_per_s: float) -> float:
    """Return the price of a million tokens in US dollars."""
    return usd_per_hour / (tokens_per_s * 3600) * 1e6
