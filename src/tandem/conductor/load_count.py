"""The load of an instance between the moments at which it tells it. Pure; one event loop.

An instance pushes its load with its outputs, and by itself when there are none. Requests are sent
meanwhile: they are numbered, and each push says up to which number it contains them, but for those
that are still being taken in. What is added here is what the latest push does not contain, so each
request counts once, whether a push overtakes the answer to it or comes after a later one.

With the load an instance tells its steps and its blocks; they go on to the listener as they come.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

from tandem.core.wire import (
    GROWTH_BLOCKS,
    AddRequest,
    BlockChanges,
    InstanceInfo,
    InstanceLoad,
    PrefillKv,
    StepRecord,
)

__all__ = ["LoadCount", "LoadListener"]


class _Sent(NamedTuple):
    """The numbers of a request that count."""

    num_tokens: int
    """Known tokens: prompt, and output of another instance."""
    num_queued: int
    """Those of them that are to be computed."""
    queued_context: float
    """Sum of the lengths that those attend to."""
    full_tokens: int
    """Most tokens of prompt and output."""
    is_decoded: bool


class LoadListener(Protocol):
    """Learns what one run of an instance tells."""

    def note_load(self) -> None:
        """Note that the load has changed."""
        ...

    def note_steps(self, steps: Sequence[StepRecord]) -> None:
        """Note that steps have been computed."""
        ...

    def note_blocks(self, blocks: BlockChanges) -> None:
        """Blocks have come into its cache, or have left it."""
        ...


class LoadCount:
    """The load of one run of an instance: what it told last, and what it was sent since."""

    def __init__(self) -> None:
        self.listener: LoadListener | None = None
        """None until the run is known to serve; it tells nothing before its first request."""
        self._told = InstanceLoad()
        self._sent: dict[int, _Sent] = {}
        self._num_numbered = 0

    @property
    def num_unanswered(self) -> int:
        """Requests that the latest push does not contain."""
        return len(self._sent)

    def note_sent(self, request: AddRequest) -> AddRequest:
        """Count a request from now on; return it with the number that it is to be sent with."""
        self._num_numbered += 1
        num_tokens = prompt_len = len(request.prompt_ids)
        if request.continuation is not None:
            num_tokens += len(request.continuation.token_ids)
        known = request.expected_len
        if isinstance(request.kv_source, PrefillKv):
            known = num_tokens
        num_queued = max(num_tokens - known, 0)
        self._sent[self._num_numbered] = _Sent(
            num_tokens,
            num_queued,
            num_queued * (num_tokens - 0.5 * num_queued),
            prompt_len + request.sampling.max_tokens,
            request.prefill_lease_s is None,
        )
        self._tell()
        return msgspec.structs.replace(request, number=self._num_numbered)

    def note_over(self, number: int) -> None:
        """Stop to count a request that was refused or has ended, whatever the pushes say of it."""
        if self._sent.pop(number, None) is not None:
            self._tell()

    def take(self, load: InstanceLoad) -> None:
        """Take in what the instance told; something older than the latest changes nothing."""
        if load.version <= self._told.version:
            return
        self._told = load
        # Requests are sent in the order of their numbers, so this list is sorted by number.
        arrived = [number for number in self._sent if number <= load.num_received]
        for number in arrived:
            if number not in load.pending:
                del self._sent[number]
        self._tell()

    def take_steps(self, steps: Sequence[StepRecord]) -> None:
        """Pass on the steps that the instance told."""
        if steps and self.listener is not None:
            self.listener.note_steps(steps)

    def take_blocks(self, blocks: BlockChanges | None) -> None:
        """Pass on which blocks came and went."""
        if blocks is not None and self.listener is not None:
            self.listener.note_blocks(blocks)

    def _tell(self) -> None:
        if self.listener is not None:
            self.listener.note_load()

    def estimate(self, info: InstanceInfo) -> InstanceLoad:
        """Return the load with all that was sent; before the first push, that alone.

        O(requests sent since the latest push).
        """
        told, size = self._told, info.block_size
        queued_tokens, num_decoding = told.queued_tokens, told.num_decoding
        queued_context, decode_tokens = told.queued_context, told.decode_tokens
        free_blocks = told.free_blocks if told.version else info.num_blocks
        largest_blocks = told.largest_blocks
        for sent in self._sent.values():
            queued_tokens += sent.num_queued
            queued_context += sent.queued_context
            free_blocks -= -(-sent.num_tokens // size)
            if sent.is_decoded:
                num_decoding += 1
                decode_tokens += sent.num_tokens
                free_blocks -= GROWTH_BLOCKS
                full_blocks = -(-min(sent.full_tokens, info.max_model_len) // size)
                largest_blocks = max(largest_blocks, full_blocks)
        return InstanceLoad(
            queued_tokens=queued_tokens,
            num_decoding=num_decoding,
            free_blocks=free_blocks,
            largest_blocks=largest_blocks,
            queued_context=queued_context,
            decode_tokens=decode_tokens,
            num_requests=told.num_requests + len(self._sent),
            load_tokens_per_s=told.load_tokens_per_s,
        )
