"""The last requests of the server, by owner and name, for ``tandem explain``.

No prompt and no answer is kept, only digests, counts and times. One ring holds all requests,
limited by the number of their generations.
"""

import hashlib
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from tandem.core.timeline import ChoiceTimeline, InstanceTimeline, RequestTimeline
from tandem.server.telemetry.metrics import RequestTimer

__all__ = [
    "ChoiceRecord",
    "Origin",
    "RequestRecord",
    "SharingIdentity",
    "TimelineRing",
    "digest_head",
    "digest_text",
]

_DIGEST_BYTES = 16


class Origin(NamedTuple):
    """The origin of a request: digest of its key, time of arrival, headers."""

    arrived_s: float
    arrived_at: float
    """Time of arrival in Unix seconds."""
    owner: bytes
    """Digest of the API key; empty if the server needs no keys."""
    request_id: str
    path: str
    traceparent: str
    """Header ``traceparent``, unchecked; empty if there is none."""
    headers: Mapping[str, str] = MappingProxyType({})
    """All headers; the request's latency objectives are read from them."""


class SharingIdentity(NamedTuple):
    """The facts, beside equal tokens, that must be equal for two requests to share KV."""

    cache_salt: bytes
    model: str
    """System fingerprint of the model."""
    process: int
    """Process id of the instance, because KV that is not stored is lost with the process."""


@dataclass(slots=True, eq=False)
class ChoiceRecord:
    """The server's record of one generation of a request."""

    request_id: str
    """Id of the generation at the engine."""
    timer: RequestTimer
    prompt_tokens: int
    head: bytes
    """Digest of the first KV block of the prompt, by which prompts with equal beginnings are found;
    empty if the prompt is shorter.
    """

    def describe(self, index: int, submitted_s: float) -> ChoiceTimeline:
        """Return the server's part of the generation's timeline."""
        timer = self.timer
        return ChoiceTimeline(
            index=index,
            submitted_s=submitted_s,
            first_token_s=timer.first_token_s,
            end_s=timer.end_s,
            finish_reason=timer.reason,
            prompt_tokens=self.prompt_tokens,
            output_tokens=timer.num_tokens,
        )


@dataclass(slots=True, eq=False)
class RequestRecord:
    """The server's record of one HTTP request and its generations."""

    name: str
    """Id of the answer that the client got."""
    origin: Origin
    identity: SharingIdentity
    submitted_s: float
    """Seconds from the request's arrival until its prompts were encoded and sent to an instance."""
    choices: list[ChoiceRecord]

    def refuse(self, reason: str, now_s: float) -> None:
        """Record that the engine refused the request, ``now_s`` seconds after its arrival."""
        for choice in self.choices:
            if choice.timer.end_s is None:
                choice.timer.end_s, choice.timer.reason = now_s, reason

    @property
    def is_ended(self) -> bool:
        """True if none of the request's generations still runs."""
        return all(choice.timer.end_s is not None for choice in self.choices)

    def describe(
        self, instances: dict[str, list[InstanceTimeline]], now_s: float
    ) -> RequestTimeline:
        """Return the request's timeline.

        Args:
            instances: the instances' timelines by id at the engine.
            now_s: seconds since arrival.
        """
        choices = [
            _join(choice.describe(index, self.submitted_s), instances.get(choice.request_id, []))
            for index, choice in enumerate(self.choices)
        ]
        ends_s = [choice.end_s for choice in choices if choice.end_s is not None]
        return RequestTimeline(
            id=self.name,
            request_id=self.origin.request_id,
            path=self.origin.path,
            arrived_at=self.origin.arrived_at,
            age_s=max(ends_s) if self.is_ended else now_s,
            tokenized_s=self.submitted_s,
            is_ended=self.is_ended,
            choices=choices,
        )


def _join(choice: ChoiceTimeline, instances: list[InstanceTimeline]) -> ChoiceTimeline:
    output_tokens = choice.output_tokens
    # While the generation runs, take the number of output tokens from the instances; at its end the
    # server has counted them.
    if choice.end_s is None:
        output_tokens = max((each.output_tokens for each in instances), default=0)
    return ChoiceTimeline(
        index=choice.index,
        submitted_s=choice.submitted_s,
        first_token_s=choice.first_token_s,
        end_s=choice.end_s,
        finish_reason=choice.finish_reason,
        prompt_tokens=choice.prompt_tokens,
        output_tokens=output_tokens,
        instances=instances,
    )


class TimelineRing:
    """The records of the last requests, of which timelines are made.

    Args:
        capacity: number of generations in all; the oldest requests are dropped first, running ones
            too.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._num_choices = 0
        self._records: deque[RequestRecord] = deque()
        self._by_name: dict[tuple[bytes, str], RequestRecord] = {}

    def __len__(self) -> int:
        return self._num_choices

    def add(self, record: RequestRecord) -> None:
        """Add a request under both of its names, the answer's id and ``x-request-id``; of several
        with one name, ``find`` returns the latest.
        """
        self._records.append(record)
        self._num_choices += len(record.choices)
        for key in _list_keys(record):
            self._by_name[key] = record
        while self._num_choices > self._capacity:
            oldest = self._records.popleft()
            self._num_choices -= len(oldest.choices)
            for key in _list_keys(oldest):
                if self._by_name.get(key) is oldest:
                    del self._by_name[key]

    def find(self, owner: bytes, name: str) -> RequestRecord | None:
        """Return the latest request of an owner with this answer id or ``x-request-id``, or
        None.
        """
        return self._by_name.get((owner, name))

    def find_other_identity(self, record: RequestRecord, head: bytes) -> str | None:
        """Return the fact (such as the adapter) that kept a prompt from sharing KV with an earlier
        one that begins alike.

        Only requests of the same owner are considered. None if no earlier prompt begins alike, or
        one with the same identity does, so that the reason is another.
        """
        found: str | None = None
        for other in self._records:
            if other is record:
                break
            if other.origin.owner != record.origin.owner:
                continue
            if not any(head and choice.head == head for choice in other.choices):
                continue
            differing = _name_difference(other.identity, record.identity)
            if differing is None:
                return None
            found = differing
        return found


def _list_keys(record: RequestRecord) -> list[tuple[bytes, str]]:
    owner = record.origin.owner
    return [(owner, record.name), (owner, record.origin.request_id)]


def _name_difference(a: SharingIdentity, b: SharingIdentity) -> str | None:
    if a.model != b.model:
        return "model or weights"
    if a.cache_salt != b.cache_salt:
        return "cache_salt"
    return "process of the instance" if a.process != b.process else None


def digest_head(prompt_ids: Sequence[int], block_size: int) -> bytes:
    """Return a digest of the first block of a prompt; empty if the prompt is shorter."""
    if len(prompt_ids) < block_size:
        return b""
    packed = struct.pack(f"<{block_size}i", *prompt_ids[:block_size])
    return hashlib.sha256(packed).digest()[:_DIGEST_BYTES]


def digest_text(text: str) -> bytes:
    """Return the first bytes of the SHA-256 of a text that a client sent."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:_DIGEST_BYTES]
