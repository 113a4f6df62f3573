"""Interfaces of the transfer of KV blocks between the device, lower tiers and other instances.

The engine passes every plan to one ``BlockTransfers``. Each kind of source has its own
implementation (``engine/tiers`` for ``TierKv``, ``engine/disaggregation`` for ``PrefillKv``);
``TransfersBySource`` combines several.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from tandem.core.wire import KvSource
from tandem.engine.groups.group import GroupBlock
from tandem.engine.scheduling.blocks import KeyedBlock
from tandem.engine.scheduling.plan import StepPlan
from tandem.engine.scheduling.request import Request

__all__ = ["BlockTransfers", "LoadSink", "TransfersBySource"]


class BlockTransfers(Protocol):
    """The mover of blocks between the device and lower tiers or other instances, at the same time
    as steps run.
    """

    @property
    def sources(self) -> frozenset[type[KvSource]]:
        """The kinds of ``KvSource`` that this implementation loads from."""
        ...

    def begin(self, plan: StepPlan) -> None:
        """Begin the loads and stores of a plan; see ``StepPlan`` for their order.

        Called for every plan, also one without sequences, before its step writes. Must return soon
        and not raise. The end of each load is reported to a ``LoadSink`` within a bounded time,
        from any thread.
        """
        ...


class LoadSink(Protocol):
    """The receiver of the results of loads, which is the engine."""

    def load_done(self, request: Request, blocks: Sequence[GroupBlock]) -> None:
        """Record that blocks have been loaded and their content verified."""
        ...

    def load_failed(
        self, request: Request, blocks: Sequence[GroupBlock], reason: str = "failed"
    ) -> None:
        """Record that blocks could not be loaded and that nothing writes into them any more.

        Args:
            request: the request for which they were loaded.
            blocks: the blocks.
            reason: name of the reason in the counters.
        """
        ...

    def is_unchanged(self, block: KeyedBlock) -> bool:
        """Return True if a block still has the content with which the scheduler's plan listed it
        for copying.
        """
        ...


class TransfersBySource:
    """A ``BlockTransfers`` that passes each load to the part that reads from its source.

    Args:
        parts: implementations for different sources, called in this order with each plan. A part
            that copies evicted blocks must come before one whose loads overwrite them.
    """

    def __init__(self, parts: Sequence[BlockTransfers]) -> None:
        self._parts = parts
        self._sources = frozenset[type[KvSource]]().union(*(part.sources for part in parts))

    @property
    def sources(self) -> frozenset[type[KvSource]]:
        """The kinds of ``KvSource`` that any of the parts loads from."""
        return self._sources

    def begin(self, plan: StepPlan) -> None:
        """Pass a step's plan to every part, each with the loads from its own sources only."""
        for part in self._parts:
            loads = [load for load in plan.loads if type(load.source) in part.sources]
            dropped = [load for load in plan.dropped if type(load.source) in part.sources]
            part.begin(msgspec.structs.replace(plan, loads=loads, dropped=dropped))
