"""KV blocks of ended prefill requests, kept under a lease until a decode instance has read them.

Owns one reference to each held block, from the end of the prefill until ``release`` is called or
the lease ends. Pure and single-threaded; time is an argument.
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
    """The blocks kept for ended prefill requests, by request id.

    Args:
        pool: the pool of the blocks.
        index: the prefix index over that pool; told when kept blocks become evictable.
        states: state slots, which are kept with the blocks; None: the model has no state.
        windows: window blocks, which are kept too; None: window layers have no blocks of their own.
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
        """Number of block references held for other instances that will read the blocks (prefills
        under a lease); preemption of running requests cannot free these blocks.
        """

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._holds

    def __len__(self) -> int:
        return len(self._holds)

    @property
    def next_end_s(self) -> float:
        """Time at which the first lease (the time limit of held blocks) ends, in monotonic seconds;
        ``inf`` if nothing is held.
        """
        return min((until_s for _, until_s in self._holds.values()), default=math.inf)

    def hold(self, request: Request, until_s: float) -> None:
        """Keep the ``held_blocks`` of a request that is ending, by references of our own, until
        ``until_s``.

        The request must still have its own references.
        """
        request_id = request.request_id
        assert request_id not in self._holds, f"request {request_id} is held already"
        for block_id in request.held_blocks:
            self._pool.retain(block_id)
        if self._windows is not None:
            self._windows.hold(request)
        self._holds[request_id] = (request, until_s)
        self.num_pinned += len(request.held_blocks)

    def find(self, request_id: str) -> Request | None:
        """Return the ended request whose blocks are held under this id; None if there is none."""
        hold = self._holds.get(request_id)
        return None if hold is None else hold[0]

    def release(self, request_id: str) -> bool:
        """Release the blocks held for a request; return False if none are held, for example after
        the end of their lease.
        """
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
        """Release the blocks held for ended prefills whose lease (time limit) has ended."""
        ended = [name for name, (_, until_s) in self._holds.items() if until_s <= now_s]
        for request_id in ended:
            self.release(request_id)

    def list_slots(self) -> Sequence[int]:
        """Return the state slots that are held for ended prefills, for consistency checks."""
        return [request.state_notes.slot for request, _ in self._holds.values()]

    def list_window_blocks(self) -> Sequence[int]:
        """Return the window blocks that are held for ended prefills, for consistency checks."""
        return [b for request, _ in self._holds.values() for b in request.held_window.blocks]

    def list_references(self) -> Sequence[int]:
        """Return the ids of held blocks, one entry for each reference, for consistency checks."""
        return [b for request, _ in self._holds.values() for b in request.held_blocks]
