"""A hand-over: the transfer of one prompt's blocks from the prefilling to the decoding instance.

The rules are those of ``tandem.engine.disaggregation``: blocks are moved as they are computed, the
reader accepts only whole blocks, and the end of each is reported. Blocks of a chunk may be moved
layer by layer during its computation; they are complete only after its last layer.
"""

from collections.abc import Sequence
from typing import Protocol

from tandem.engine.groups.group import GroupBlock
from tandem.engine.scheduling.plan import BlockLoad
from tandem.engine.scheduling.request import Request
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.sim.cluster.events import Events
from tandem.sim.cluster.links import Link, Links

__all__ = ["HandOver", "Reader", "Source"]


class Reader(Protocol):
    """The instance that decodes a request and reads the KV blocks of its prompt."""

    scheduler: Scheduler
    ingress: Link
    block_bytes: int
    num_layers: int

    def load_done(self, request: Request, blocks: Sequence[GroupBlock]) -> None:
        """Tell this instance's scheduler that these KV blocks of a request have arrived."""
        ...

    def load_failed(self, request: Request, blocks: Sequence[GroupBlock]) -> None:
        """Tell this instance's scheduler that these KV blocks of a request will not arrive."""
        ...

    def end_reading(self, request_id: str) -> None:
        """Forget the hand-over (the transfer of a prompt's KV blocks to this instance) of a
        request, which has ended.
        """
        ...


class Source(Protocol):
    """The instance that prefills a prompt and sends its KV blocks."""

    scheduler: Scheduler
    egress: Link
    readers: dict[str, "HandOver"]
    """Hand-overs (moves of a prompt's KV) that read this instance's blocks, by id of the prefilling
    request.
    """


class HandOver:
    """The transfer of the KV blocks of one prompt from the prefilling to the decoding instance.

    Args:
       reader: the instance that decodes.
       source: the instance that prefills.
       request: the request at the reader.
       loads: blocks to move, in order of the prompt.
       events: the clock.
       links: the network between the two.
    """

    def __init__(
        self,
        reader: Reader,
        source: Source,
        request: Request,
        loads: Sequence[BlockLoad],
        events: Events,
        links: Links,
    ) -> None:
        assert request.prefill_kv is not None, request.request_id
        self._reader, self._source, self._request = reader, source, request
        self._source_id = request.prefill_kv.handle.request_id
        self._events, self._links = events, links
        self._todo = list(loads)
        """Blocks whose transfer has not begun."""
        self._num_moving = 0
        self._dropped: set[GroupBlock] = set()

    def begin(self) -> None:
        """Register at the source (the instance that prefills), which reports the prefill's progress
        from now on, and start to move the blocks that are computed already.
        """
        self._source.readers[self._source_id] = self
        self.note_progress()

    def drop(self, load: BlockLoad) -> None:
        """Note that the reader does not need a block any more. If its transfer has not begun, its
        load fails at once.
        """
        if load in self._todo:
            self._todo.remove(load)
            self._reader.load_failed(self._request, [load.block])
            self._finish()
        else:
            self._dropped.add(load.block)

    def note_running(self, num_tokens: int, end_s: float) -> None:
        """Start now to move the blocks of the first ``num_tokens`` tokens, layer by layer while the
        prefilling instance's current step computes them.

        They arrive after that step's end ``end_s`` at the earliest: the last layer moves only then.
        """
        self._move(num_tokens, end_s)

    def note_progress(self) -> None:
        """Start to move the blocks that the prefilling instance has computed and that do not move
        yet.
        """
        prefill = self._source.scheduler.find_prefill(self._source_id)
        if prefill is not None:
            done = prefill.prompt_len if prefill.is_finished else prefill.num_computed_tokens
            self._move(done, 0.0)

    def note_gone(self) -> None:
        """Fail all blocks whose transfer has not begun: the prefilling request, or the blocks held
        after its end, no longer exist.
        """
        todo, self._todo = self._todo, []
        if todo:
            self._reader.load_failed(self._request, [load.block for load in todo])
        self._finish()

    def _move(self, num_tokens: int, end_s: float) -> None:
        size = self._reader.scheduler.block_size
        prompt_len = self._request.prompt_len
        num_blocks = -(-num_tokens // size) if num_tokens >= prompt_len else num_tokens // size
        ready = [load for load in self._todo if load.position < num_blocks]
        if not ready:
            return
        self._todo = self._todo[len(ready) :]
        size_bytes = len(ready) * self._reader.block_bytes
        self._num_moving += 1
        self._links.start(
            (self._source.egress, self._reader.ingress),
            size_bytes,
            lambda: self._arrive(ready, size_bytes, end_s),
        )

    def _arrive(self, loads: list[BlockLoad], size_bytes: int, end_s: float) -> None:
        if end_s > self._events.now_s:
            # The transfer went along with the step, layer by layer: the last layer moves only after
            # the step that computes it has ended.
            layer_bytes = size_bytes / self._reader.num_layers
            last_s = end_s + layer_bytes / self._reader.ingress.bytes_per_s
            self._events.call_at(last_s, self._take, loads)
        else:
            self._take(loads)

    def _take(self, loads: list[BlockLoad]) -> None:
        self._num_moving -= 1
        wanted = [load.block for load in loads if load.block not in self._dropped]
        if wanted:
            self._reader.load_done(self._request, wanted)
        if len(wanted) < len(loads):
            dropped = [load.block for load in loads if load.block in self._dropped]
            self._reader.load_failed(self._request, dropped)
        self._finish()

    def _finish(self) -> None:
        if not self._todo and not self._num_moving:
            self._source.readers.pop(self._source_id, None)
            self._reader.end_reading(self._request.request_id)
