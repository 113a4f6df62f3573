"""Host memory that mirrors a device's KV and states, because lower tiers access host memory only.

``MirroredTransfers`` copies blocks that steps have filled to the host before the tier sees them.
Blocks that the tier has loaded into host memory are copied to the device by the next step, layer by
layer beside its computation.
"""

import threading
from collections.abc import Iterable, Sequence

from tandem.core.wire import KvSource
from tandem.engine.scheduling.blocks import find_state_slot, find_window_block
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
        self.blocks = _mirror_blocks(cache)
        self.windows = None if cache.windows is None else _mirror_blocks(cache.windows)
        self.states: HostMirror | None = None
        if states is not None:
            whole = [(0, states.layout.bytes_per_state)]
            self.states = HostMirror(states.device, states.tensor, whole)
        self._lock = threading.Lock()
        self._loaded: set[int] = set()
        """Ids (numbered as in transfers) of KV blocks, window blocks and states that were loaded
        into host memory and not yet copied to the device.
        """

    def save(self, numbers: Iterable[int]) -> None:
        """Copy blocks, window blocks and states from the device to the host.

        Args:
            numbers: their ids, as in ``KeyedBlock.block_id``.
        """
        blocks, windows, states = _sort_out(numbers)
        self.blocks.save(blocks)
        if self.windows is not None:
            self.windows.save(windows)
        if self.states is not None:
            self.states.save(states)

    def note_loaded(self, numbers: Iterable[int]) -> None:
        """Record that blocks were loaded into host memory, so that the next step copies them to the
        device.
        """
        with self._lock:
            self._loaded.update(numbers)

    def begin(self, step: StepInput) -> KvArrivals | None:
        """Begin to copy loaded blocks to the device; return the copies that the step must wait for.

        Returns None if there are none. Copies of states have ended on return, because the step
        begins by copying states.
        """
        for mirror in (self.blocks, self.windows, self.states):
            if mirror is not None:
                # A step that failed may have ended without waiting for the copies of loaded blocks
                # to the device: wait for them now.
                mirror.finish_loads()
        with self._lock:
            loaded, self._loaded = self._loaded, set()
        if not loaded:
            return None
        blocks, windows, states = _sort_out(loaded)
        if states and self.states is not None:
            KvArrivals(self._device, [self.states.load(states)]).wait_all()
        events = [self.blocks.load(blocks) if blocks else []]
        if windows and self.windows is not None:
            events.append(self.windows.load(windows))
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


def _sort_out(numbers: Iterable[int]) -> tuple[list[int], list[int], list[int]]:
    """Split transfers' ids by kind; return block ids, window block ids and state slots, each
    ascending.
    """
    blocks, windows, states = list[int](), list[int](), list[int]()
    for number in sorted(numbers):
        slot, window = find_state_slot(number), find_window_block(number)
        if slot is not None:
            states.append(slot)
        elif window is not None:
            windows.append(window)
        else:
            blocks.append(number)
    return blocks, windows, states


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
        self._mirror.save([block.block_id for block in plan.filled])
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

    def load_done(self, request: Request, block_ids: Sequence[int]) -> None:
        """Record loaded blocks for the copy, then inform the engine.

        The order matters: the engine may plan a step that reads them at once.
        """
        self._mirror.note_loaded(block_ids)
        self._engine.load_done(request, block_ids)
