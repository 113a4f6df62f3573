"""Advice: the machine to add next to a cluster, for its objectives and a budget.

Each candidate is added to each kind of group that it can join, within the budget; the cluster is
then run with the load that it has. The best is the one that brings most requests within the
objectives; of equals, the cheapest.
"""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from tandem.core.errors import ConfigError
from tandem.sim.cluster.scenario import Group, Scenario
from tandem.sim.study.capacity import price_hour

__all__ = ["Advice", "Option", "advise", "list_options"]


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One machine that could be added."""

    machine: str
    """Empty: none, the cluster as it is."""
    role: str = ""
    usd_per_hour: float = 0.0
    """The price of the machine."""
    scenario: Scenario


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """An option, and what the cluster would do with it."""

    machine: str
    role: str
    usd_per_hour: float
    attained: float
    """Share of requests within the objectives."""
    goodput: float


def list_options(
    scenario: Scenario, prices: Mapping[str, float], budget: float | None
) -> list[Option]:
    """Return the cluster as it is, and with one machine more of each that has a price.

    Args:
        scenario: of the cluster.
        prices: US dollars an hour by machine; all of them are candidates.
        budget: US dollars an hour of the whole cluster; None is any.

    Raises: ConfigError (a machine of the cluster has no price).
    """
    now = price_hour(scenario, prices) if budget is not None else 0.0
    options = [Option(machine="", scenario=scenario)]
    roles = {group.role: group for group in scenario.instances}
    for machine, usd in prices.items():
        if budget is not None and now + usd > budget:
            continue
        for role, group in roles.items():
            grown = _add(scenario, group, machine)
            options.append(Option(machine=machine, role=role, usd_per_hour=usd, scenario=grown))
    return options


def _add(scenario: Scenario, like: Group, machine: str) -> Scenario:
    """Return a scenario with one machine more, set up like a group."""
    if like.hardware == machine:
        groups = [
            msgspec.structs.replace(group, count=group.count + 1) if group is like else group
            for group in scenario.instances
        ]
    else:
        if not like.model:
            what = "a group with a calibration has no model that another machine could run"
            raise ConfigError("sim.advise", what, field="instances.model")
        # A machine of another type has another amount of memory: with kv_tokens 0 the KV gets what
        # fits there.
        changes = {"count": 1, "hardware": machine, "accelerators": None, "kv_tokens": 0}
        groups = [*scenario.instances, msgspec.structs.replace(like, **changes)]
    return msgspec.structs.replace(scenario, instances=tuple(groups))


def advise(
    options: Sequence[Option], measure: Callable[[Scenario], tuple[float, float]]
) -> list[Advice]:
    """Return what each option would bring, the best first.

    Args:
        options: of ``list_options``.
        measure: returns the share of requests within the objectives, and how many a second.
    """
    found: list[Advice] = []
    for option in options:
        attained, goodput = measure(option.scenario)
        found.append(
            Advice(
                machine=option.machine,
                role=option.role,
                usd_per_hour=option.usd_per_hour,
                attained=attained,
                goodput=goodput,
            )
        )
    return sorted(found, key=lambda each: (-each.attained, each.usd_per_hour))
