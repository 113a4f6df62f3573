"""Moving blocks of KV between the device, lower tiers and other instances: the interfaces.

The engine hands every plan to one ``BlockTransfers``. What comes from one kind of source has an
implementation of its own (``engine/tiers`` for ``TierKv``, ``engine/disaggregation`` for
``PrefillKv``); ``TransfersBySource`` makes one of several.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from tandem.core.wire import KvSource
from tandem.engine.scheduling.blocks import KeyedBlock
from tandem.engine.scheduling.plan import StepPlan
from tandem.engine.scheduling.request import Request

__all__ = ["BlockTransfers", "LoadSink", "TransfersBySource"]


class BlockTransfers(Protocol):
    """Moves blocks between the device and lower tiers or other instances, beside the steps."""

    @property
    def sources(self) -> frozenset[type[KvSource]]:
        """The kinds of sources from which this implementation loads."""
        ...

    def begin(self, plan: StepPlan) -> None:
        """Execute a plan's requests; see ``StepPlan`` for the order.

        Called for every plan, one without sequences too, before its step writes. Returns soon and
        does not raise. The end of each load is reported to a ``LoadSink`` within a time that is
        bounded, from any thread.
        """
        ...


class LoadSink(Protocol):
    """The receiver of the results of loads: the engine."""

    def load_done(self, request: Request, block_ids: Sequence[int]) -> None:
        """Record that blocks have their verified content."""
        ...

    def load_failed(
        self, request: Request, block_ids: Sequence[int], reason: str = "failed"
    ) -> None:
        """Record that blocks have no content and that nothing writes into them any more.

        Args:
            request: whose loads they were.
            block_ids: of the blocks.
            reason: as in the counters.
        """
        ...

    def is_unchanged(self, block: KeyedBlock) -> bool:
        """Return True if a block still has the content that it was reported with."""
        ...


class TransfersBySource:
    """A ``BlockTransfers`` that passes each load to the part that reads from its source.

    Args:
        parts: for different sources. A plan goes to them in this order: one that copies evicted
            blocks out comes before one whose loads write into them.
    """

    def __init__(self, parts: Sequence[BlockTransfers]) -> None:
        self._parts = parts
        self._sources = frozenset[type[KvSource]]().union(*(part.sources for part in parts))

    @property
    def sources(self) -> frozenset[type[KvSource]]:
        """The kinds of sources that a part reads."""
        return self._sources

    def begin(self, plan: StepPlan) -> None:
        """Pass a plan to the parts, each with the loads from its source."""
        for part in self._parts:
            loads = [load for load in plan.loads if type(load.source) in part.sources]
            dropped = [load for load in plan.dropped if type(load.source) in part.sources]
            part.begin(msgspec.structs.replace(plan, loads=loads, dropped=dropped))
