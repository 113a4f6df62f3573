"""The host's copies of a device's KV and states, between a lower tier and the runner of steps.

A lower tier moves bytes of host memory. ``MirroredTransfers`` copies what steps have filled there
before the tier sees it, and notes what the tier has loaded; the next step copies that to the
device, layer by layer behind its own computation.
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
    """Host memory of an engine's blocks, window blocks and states, whose own memory a device has.

    Threads: ``note_loaded`` on any; ``begin`` on the thread that runs steps; ``save`` on the one
    that plans them.

    Args:
        cache: the blocks.
        states: the states; None: the model has none.
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
        """Blocks, window blocks and states that only the host has, as numbers of transfers."""

    def save(self, numbers: Iterable[int]) -> None:
        """Copy what steps have filled to the host.

        Args:
            numbers: as of ``KeyedBlock.block_id``.
        """
        blocks, windows, states = _sort_out(numbers)
        self.blocks.save(blocks)
        if self.windows is not None:
            self.windows.save(windows)
        if self.states is not None:
            self.states.save(states)

    def note_loaded(self, numbers: Iterable[int]) -> None:
        """Note what has come to the host's memory, for the next step to copy."""
        with self._lock:
            self._loaded.update(numbers)

    def begin(self, step: StepInput) -> KvArrivals | None:
        """Begin to copy what has come to the device; return what the step waits for.

        States are waited for here, as the step begins by copying them.
        """
        for mirror in (self.blocks, self.windows, self.states):
            if mirror is not None:
                # A step that failed may have left copies behind that it did not wait for.
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
            # They read and write whole blocks before the first layer.
            loads.wait_all()
        return loads


def _mirror_blocks(cache: PagedKvCache) -> HostMirror:
    layout = cache.layout
    layers = [layout.layer_slice(0, layer) for layer in range(layout.num_layers)]
    return HostMirror(cache.device, cache.view_items(), layers)


def _sort_out(numbers: Iterable[int]) -> tuple[list[int], list[int], list[int]]:
    """Return blocks, window blocks and slots of states, each ascending."""
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
    """A ``BlockTransfers`` whose tier sees the host's copies.

    Args:
        tier: moves the host's memory.
        mirror: copies to the host and from it.
    """

    def __init__(self, tier: BlockTransfers, mirror: KvMirror) -> None:
        self._tier, self._mirror = tier, mirror

    @property
    def sources(self) -> frozenset[type[KvSource]]:
        """The kinds of sources that the tier reads."""
        return self._tier.sources

    def begin(self, plan: StepPlan) -> None:
        """Copy what was filled to the host, and pass the plan on.

        Evicted blocks are there already, as they were filled or loaded before.
        """
        self._mirror.save([block.block_id for block in plan.filled])
        self._tier.begin(plan)


class MirroredSink:
    """A ``LoadSink`` that notes what the next step copies to the device.

    Args:
        engine: hears of it too.
        mirror: of its blocks.
    """

    def __init__(self, engine: LoadSink, mirror: KvMirror) -> None:
        self._engine, self._mirror = engine, mirror
        self.load_failed, self.is_unchanged = engine.load_failed, engine.is_unchanged

    def load_done(self, request: Request, block_ids: Sequence[int]) -> None:
        """Note blocks before the engine may plan a step that reads them."""
        self._mirror.note_loaded(block_ids)
        self._engine.load_done(request, block_ids)
