"""The load of an instance, also between its reports. Pure; used on one event loop.

An instance sends its load to the server along with its outputs, or in a message of its own if there
are no outputs. Requests that a server sends are numbered. A report names the highest number that it
includes, and those up to it that it does not include yet. ``LoadCount`` adds the requests that the
latest report does not include. So each request counts exactly once, in whatever order reports and
replies arrive.

Reports also carry the instance's steps and changes of its blocks, which are passed to a listener.
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
    """The amounts that one sent request adds to an instance's load."""

    num_tokens: int
    """Number of tokens of the request that are known when it is sent: its prompt, and output tokens
    that another instance generated before.
    """
    num_queued: int
    """Number of those known tokens that the instance has to compute, because it has no KV for them.
    """
    queued_context: float
    """Sum over the queued tokens of the context length that each attends to."""
    full_tokens: int
    """Largest length in tokens that the request's prompt and output may reach together."""
    is_decoded: bool


class LoadListener(Protocol):
    """A listener to the reports of an instance during one run of its process."""

    def note_load(self) -> None:
        """Note that the instance's load has changed."""
        ...

    def note_steps(self, steps: Sequence[StepRecord]) -> None:
        """Note that the instance has computed these steps."""
        ...

    def note_blocks(self, blocks: BlockChanges) -> None:
        """Note that blocks have entered or left the instance's cache."""
        ...


class LoadCount:
    """The load of an instance during one run of its process: its last report and the requests sent
    since.
    """

    def __init__(self) -> None:
        self.listener: LoadListener | None = None
        """Listener that is told the instance's reports; None until the instance's process is known
        to serve. No report comes before the first request is sent.
        """
        self._told = InstanceLoad()
        self._sent: dict[int, _Sent] = {}
        self._num_numbered = 0

    @property
    def num_unanswered(self) -> int:
        """Number of sent requests that the instance's latest report does not count yet."""
        return len(self._sent)

    def note_sent(self, request: AddRequest) -> AddRequest:
        """Count a request that is about to be sent; return it with its ``number`` filled in, by
        which reports say how far requests have arrived.
        """
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
        """Stop counting the sent request with this number, which was refused or has ended, also if
        a later report does not include it.
        """
        if self._sent.pop(number, None) is not None:
            self._tell()

    def take(self, load: InstanceLoad) -> None:
        """Replace the reported load by a newer report; an older one is ignored."""
        if load.version <= self._told.version:
            return
        self._told = load
        # Requests are sent in ascending order of their numbers, so this list is sorted.
        arrived = [number for number in self._sent if number <= load.num_received]
        for number in arrived:
            if number not in load.pending:
                del self._sent[number]
        self._tell()

    def take_steps(self, steps: Sequence[StepRecord]) -> None:
        """Pass the computed steps in a report to the listener."""
        if steps and self.listener is not None:
            self.listener.note_steps(steps)

    def take_blocks(self, blocks: BlockChanges | None) -> None:
        """Pass the changes of blocks in a report to the listener."""
        if blocks is not None and self.listener is not None:
            self.listener.note_blocks(blocks)

    def _tell(self) -> None:
        if self.listener is not None:
            self.listener.note_load()

    def estimate(self, info: InstanceInfo) -> InstanceLoad:
        """Return the reported load plus the requests sent since.

        O(requests sent since the latest report).
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
