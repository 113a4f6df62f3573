"""The routing policies by name, as ``cluster.policy`` takes them."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from tandem.conductor.policies.mooncake import MooncakePolicy
from tandem.conductor.policies.policy import Policy
from tandem.conductor.policies.rivals import DynamoCost, SglangCacheAware
from tandem.conductor.policies.simple import LeastLoaded, PrefixAware, RandomChoice, RoundRobin

__all__ = ["POLICIES", "make_policy"]

POLICIES: Mapping[str, Callable[[], Policy]] = MappingProxyType({
    "random": RandomChoice,
    "round_robin": RoundRobin,
    "load": LeastLoaded,
    "prefix": PrefixAware,
    "sglang": SglangCacheAware,
    "dynamo": DynamoCost,
    "mooncake": MooncakePolicy,
})  # fmt: skip


def make_policy(name: str) -> Policy:
    """Return a new policy by its name, one of ``POLICIES``."""
    return POLICIES[name]()
