"""Host memory that mirrors a device's KV and states, because lower tiers access host memory only.

``MirroredTransfers`` copies blocks that steps have filled to the host before the tier sees them.
Blocks that the tier has loaded into host memory are copied to the device by the next step, layer by
layer beside its computation.
"""

import threading
from collections.abc import Iterable, Sequence

from tandem.core.wire import KvSource
from tandem.engine.groups.group import Group, GroupBlock
from tandem.engine.scheduling.plan import StepPlan
from tandem.engine.scheduling.request import Request
from tandem.engine.stepping.messages import StepInput
from tandem.engine.transfers import BlockTransfers, LoadSink
from tandem.kernels.lanes.mirrors import HostMirror, KvArrivals
from tandem.kernels.paged import PagedKvCache
from tandem.kernels.states import StateCache

__all__ = ["KvMirror", "MirroredSink", "MirroredTransfers"]


class KvMirror:
    """Host copies of an engine's blocks, window blocks and states, which live in a device's memory.

    Threads: ``note_loaded`` on any; ``begin`` on the thread that runs steps; ``save`` on the one
    that plans them.

    Args:
        cache: the blocks on the device.
        states: the states on the device; None: the model has none.
    """

    def __init__(self, cache: PagedKvCache, states: StateCache | None) -> None:
        self._device = cache.device
        self.groups = {Group.FULL: _mirror_blocks(cache)}
        """The host copies of each group that the model has."""
        if cache.windows is not None:
            self.groups[Group.WINDOW] = _mirror_blocks(cache.windows)
        if states is not None:
            whole = [(0, states.layout.bytes_per_state)]
            self.groups[Group.STATE] = HostMirror(states.device, states.tensor, whole)
        self._lock = threading.Lock()
        self._loaded: set[GroupBlock] = set()
        """Blocks and states that were loaded into host memory and not yet copied to the device."""

    def save(self, blocks: Iterable[GroupBlock]) -> None:
        """Copy blocks, window blocks and states from the device to the host."""
        for group, indices in _sort_out(blocks).items():
            self.groups[group].save(indices)

    def note_loaded(self, blocks: Iterable[GroupBlock]) -> None:
        """Record that blocks were loaded into host memory, so that the next step copies them to the
        device.
        """
        with self._lock:
            self._loaded.update(blocks)

    def begin(self, step: StepInput) -> KvArrivals | None:
        """Begin to copy loaded blocks to the device; return the copies that the step must wait for.

        Returns None if there are none. Copies of states have ended on return, because the step
        begins by copying states.
        """
        for mirror in self.groups.values():
            # A step that failed may have ended without waiting for the copies of loaded blocks to
            # the device: wait for them now.
            mirror.finish_loads()
        with self._lock:
            loaded, self._loaded = self._loaded, set()
        if not loaded:
            return None
        by_group = _sort_out(loaded)
        states = by_group.pop(Group.STATE, [])
        if states:
            KvArrivals(self._device, [self.groups[Group.STATE].load(states)]).wait_all()
        # The arrivals are those of full blocks, then those of window blocks.
        by_group = {Group.FULL: list[int]()} | by_group
        events = [self.groups[group].load(b) if b else [] for group, b in by_group.items()]
        loads = KvArrivals(self._device, events)
        if step.copies or step.window_copies:
            # The step begins with copies of whole blocks in all layers, so wait for the loaded
            # blocks before it and not layer by layer.
            loads.wait_all()
        return loads


def _mirror_blocks(cache: PagedKvCache) -> HostMirror:
    layout = cache.layout
    layers = [layout.layer_slice(0, layer) for layer in range(layout.num_layers)]
    return HostMirror(cache.device, cache.view_items(), layers)


def _sort_out(blocks: Iterable[GroupBlock]) -> dict[Group, list[int]]:
    """Return the blocks' indices by group, ascending."""
    by_group: dict[Group, list[int]] = {}
    for group, index in sorted(blocks):
        by_group.setdefault(group, []).append(index)
    return by_group


class MirroredTransfers:
    """A ``BlockTransfers`` for a device: it copies blocks to the host, where a tier reads them.

    Args:
        tier: stores and loads the host's copies.
        mirror: the host's copies.
    """

    def __init__(self, tier: BlockTransfers, mirror: KvMirror) -> None:
        self._tier, self._mirror = tier, mirror

    @property
    def sources(self) -> frozenset[type[KvSource]]:
        """The kinds of ``KvSource`` that the wrapped tier can load from."""
        return self._tier.sources

    def begin(self, plan: StepPlan) -> None:
        """Copy the blocks that were filled to the host, and pass the step's plan to the tier, which
        reads them there.

        Evicted blocks are on the host already: they were copied when they were filled or loaded.
        """
        self._mirror.save([block.block for block in plan.filled])
        self._tier.begin(plan)


class MirroredSink:
    """A ``LoadSink`` that records loaded blocks for the copy to the device, and informs the engine.

    Args:
        engine: the sink to which every call is passed on.
        mirror: the host's copies of its blocks.
    """

    def __init__(self, engine: LoadSink, mirror: KvMirror) -> None:
        self._engine, self._mirror = engine, mirror
        self.load_failed, self.is_unchanged = engine.load_failed, engine.is_unchanged

    def load_done(self, request: Request, blocks: Sequence[GroupBlock]) -> None:
        """Record loaded blocks for the copy, then inform the engine.

        The order matters: the engine may plan a step that reads them at once.
        """
        self._mirror.note_loaded(blocks)
        self._engine.load_done(request, blocks)
