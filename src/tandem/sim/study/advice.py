"""Advice on the machine to add next to a cluster, given its objectives and a budget.

Each candidate is added to each kind of group that it can join, within the budget, and the cluster
is run with its present load. The best option brings most requests within the objectives; of equal
options, the cheapest.
"""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from tandem.core.errors import ConfigError
from tandem.sim.cluster.scenario import Group, Scenario
from tandem.sim.study.capacity import price_hour

__all__ = ["Advice", "Option", "advise", "list_options"]


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One possible addition of a machine to the cluster, or none."""

    machine: str
    """Name of the machine; empty for the cluster as it is."""
    role: str = ""
    usd_per_hour: float = 0.0
    """Price of the machine, US dollars per hour."""
    scenario: Scenario


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """An option (an addition to the cluster), and the results of the cluster with it."""

    machine: str
    role: str
    usd_per_hour: float
    attained: float
    """Share of requests within the objectives."""
    goodput: float


def list_options(
    scenario: Scenario, prices: Mapping[str, float], budget: float | None
) -> list[Option]:
    """Return the present cluster, and the cluster with one more machine of each type and role.

    Args:
       scenario: the cluster.
       prices: US dollars per hour by machine; every machine listed is a candidate.
       budget: US dollars per hour for the whole cluster; None for no limit.

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
    """Return a scenario with one more machine, set up like the group ``like``.

    Raises: ConfigError (the group has a calibration and no model).
    """
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
    """Return the results of each option (an addition to the cluster), best first.

    Args:
       options: from ``list_options``.
       measure: returns the share of requests within the objectives, and their number per second.
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
