"""Blocks that outlive their request under a lease, so that a decode instance can read them.

Owns one reference to each block of a hold, from the end of a prefill-only request until its hold
is released or its lease has ended. Pure and single-threaded; time is an argument.
"""

import math
from collections.abc import Sequence

from tandem.engine.groups.reuse import StateReuse
from tandem.engine.groups.windows import WindowReuse
from tandem.engine.scheduling.blocks import BlockPool
from tandem.engine.scheduling.prefix_index import PrefixIndex
from tandem.engine.scheduling.request import Request

__all__ = ["BlockHolds"]


class BlockHolds:
    """The blocks of ended prefills that are kept under a lease, by request id.

    Args:
        pool: of the blocks.
        index: over that pool; learns when held blocks become evictable.
        states: whose slots held requests keep; None: the model has no state.
        windows: whose blocks they keep too; None: layers with a window have none of their own.
    """

    def __init__(
        self,
        pool: BlockPool,
        index: PrefixIndex,
        states: StateReuse | None = None,
        windows: WindowReuse | None = None,
    ) -> None:
        self._windows = windows
        self._pool = pool
        self._index = index
        self._states = states
        self._holds: dict[str, tuple[Request, float]] = {}
        self.num_pinned = 0
        """Number of block references of holds, which no preemption frees."""

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._holds

    def __len__(self) -> int:
        return len(self._holds)

    @property
    def next_end_s(self) -> float:
        """Time at which the first lease ends; ``inf`` without holds."""
        return min((until_s for _, until_s in self._holds.values()), default=math.inf)

    def hold(self, request: Request, until_s: float) -> None:
        """Keep the ``held_blocks`` of a request that ends; it still references them."""
        request_id = request.request_id
        assert request_id not in self._holds, f"request {request_id} is held already"
        for block_id in request.held_blocks:
            self._pool.retain(block_id)
        if self._windows is not None:
            self._windows.hold(request)
        self._holds[request_id] = (request, until_s)
        self.num_pinned += len(request.held_blocks)

    def find(self, request_id: str) -> Request | None:
        """Return the ended request whose blocks are held under this id."""
        hold = self._holds.get(request_id)
        return None if hold is None else hold[0]

    def release(self, request_id: str) -> bool:
        """End a hold; False if there is none, as its lease may just have ended."""
        hold = self._holds.pop(request_id, None)
        if hold is None:
            return False
        request = hold[0]
        block_ids = request.held_blocks
        if self._windows is not None:
            self._windows.release_hold(request)
        self._index.release(block_ids)
        if self._states is not None:
            self._states.release(request, request.prompt_len, is_sound=True)
        self.num_pinned -= len(block_ids)
        return True

    def expire(self, now_s: float) -> None:
        """End the holds whose lease has ended."""
        ended = [name for name, (_, until_s) in self._holds.items() if until_s <= now_s]
        for request_id in ended:
            self.release(request_id)

    def list_slots(self) -> Sequence[int]:
        """Return the slots of states held here; for checks."""
        return [request.state_notes.slot for request, _ in self._holds.values()]

    def list_window_blocks(self) -> Sequence[int]:
        """Return the blocks of layers with a window held here; for checks."""
        return [b for request, _ in self._holds.values() for b in request.held_window.blocks]

    def list_references(self) -> Sequence[int]:
        """Return the block ids referenced here, one entry for each reference; for checks."""
        return [b for request, _ in self._holds.values() for b in request.held_blocks]
