"""One ``BlockTransfers`` of two: each load goes to the one that reaches its source."""

from dataclasses import replace

from tandem.core.wire import PrefillKv
from tandem.engine.scheduling.plan import BlockLoad, StepPlan
from tandem.engine.stepping.runner import BlockTransfers

__all__ = ["CombinedTransfers"]


class CombinedTransfers:
    """Sends loads from prefill instances to a reader and everything else to the tiers.

    Args:
        tiers: below the device; None: there are none.
        reader: of other instances.
    """

    def __init__(self, tiers: BlockTransfers | None, reader: BlockTransfers) -> None:
        self._tiers = tiers
        self._reader = reader

    @property
    def can_read_instances(self) -> bool:
        """As of the reader."""
        return self._reader.can_read_instances

    def begin(self, plan: StepPlan) -> None:
        """Take up what a plan asks; see ``BlockTransfers.begin``."""
        if self._tiers is not None:
            # First: a load may write into a block that is copied out as evicted.
            loads = [load for load in plan.loads if not _is_from_instance(load)]
            dropped = [load for load in plan.dropped if not _is_from_instance(load)]
            self._tiers.begin(replace(plan, loads=loads, dropped=dropped))
        loads = [load for load in plan.loads if _is_from_instance(load)]
        dropped = [load for load in plan.dropped if _is_from_instance(load)]
        self._reader.begin(replace(plan, loads=loads, dropped=dropped))


def _is_from_instance(load: BlockLoad) -> bool:
    return isinstance(load.source, PrefillKv)
