"""Where a request goes: the product's policy, shown the simulated instances.

The one module that knows the shape of policies. Loads are measured at the moment of a decision: as
if every instance had just told its own.
"""

from collections.abc import Iterable, Sequence

from tandem.core.wire import AddRequest
from tandem.engine.cluster.machine import InstanceRef, Place
from tandem.engine.cluster.selection import InstanceView, Route, make_policy
from tandem.sim.cluster.instance import SimInstance

__all__ = ["Placing"]

IDENTITY = "simulated"


class Placing:
    """Asks a policy.

    Args:
        name: as ``cluster.policy``.
        instances: of the run.
    """

    def __init__(self, name: str, instances: Iterable[SimInstance]) -> None:
        self.policy = make_policy(name)
        self._instances = list(instances)
        self._refs = [InstanceRef(each.name, 0, IDENTITY) for each in self._instances]
        prefills = frozenset(each.name for each in self._instances if each.role == "prefill")
        self._sources = [
            prefills if each.role == "decode" else frozenset[str]() for each in self._instances
        ]

    def choose(self, place: Place, request: AddRequest) -> Route | None:
        """Return where a request goes; see ``Policy.choose``."""
        return self.policy.choose(place, request, self._view())

    def _view(self) -> Sequence[InstanceView]:
        views: list[InstanceView] = []
        for instance, ref, sources in zip(self._instances, self._refs, self._sources, strict=True):
            load = instance.measure_load()
            config = instance.setup.engine
            views.append(
                InstanceView(
                    ref,
                    instance.role,
                    sources,
                    num_blocks=config.num_kv_blocks,
                    block_size=config.block_size,
                    max_model_len=config.max_model_len,
                    queued_tokens=load.queued_tokens,
                    num_decoding=load.num_decoding,
                    used_blocks=config.num_kv_blocks - load.free_blocks,
                    largest_blocks=load.largest_blocks,
                )
            )
        return views
