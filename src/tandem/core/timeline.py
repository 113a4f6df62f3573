"""The timeline of one request: the record that ``tandem explain`` shows.

An instance tells its part (``InstanceTimeline``) when it is asked for a request; the server adds
its own and answers with a ``RequestTimeline``. All times are seconds on a monotonic clock, relative
to the arrival at the process that reports them. No token of a prompt or an answer is part of it.
"""

from enum import StrEnum

import msgspec

__all__ = [
    "ChoiceTimeline",
    "ConsideredInstance",
    "InstanceTimeline",
    "KvLoadRecord",
    "MissReason",
    "PrefixMiss",
    "RequestTimeline",
    "StoreLookup",
    "TimelineQuery",
    "describe_miss",
]


class MissReason(StrEnum):
    """Why the KV of a prompt's next tokens was computed instead of reused."""

    DISABLED = "disabled"
    NEEDS_LOGITS = "needs_logits"
    DIFFERS = "differs"
    NOT_STORED = "not_stored"
    EVICTED = "evicted"
    FLUSHED = "flushed"
    OTHER_IDENTITY = "other_identity"
    TOO_LATE = "too_late"
    LOAD_FAILED = "load_failed"
    NOT_LOADED = "not_loaded"
    NO_ANSWER = "no_answer"
    NO_STATE = "no_state"
    NO_WINDOW = "no_window"


_WORDS = {
    MissReason.DISABLED: "the prefix cache is off (engine.prefix_cache)",
    MissReason.NEEDS_LOGITS: "log-probabilities of the prompt were asked for, so all of it was "
    "computed",
    MissReason.DIFFERS: "token {position} is the first that differs from the nearest cached prefix",
    MissReason.NOT_STORED: "nothing that is cached goes on after token {position}",
    MissReason.EVICTED: "the block at token {position} was cached and has been evicted for want of "
    "memory",
    MissReason.FLUSHED: "the block at token {position} was cached when the cache was flushed",
    MissReason.OTHER_IDENTITY: "an earlier prompt began alike, but its KV may not be shared: "
    "another {detail}",
    MissReason.TOO_LATE: "KV from token {position} on was on its way, from the store or another "
    "request, and came too late",
    MissReason.LOAD_FAILED: "loading from token {position} on failed: {detail}",
    MissReason.NOT_LOADED: "the store has KV from token {position} on, but computing it was "
    "estimated to be faster, or no block was free for it",
    MissReason.NO_ANSWER: "the store did not answer the lookup in time",
    MissReason.NO_STATE: "KV is there up to token {detail}, but the layers with a state have none "
    "after token {position}",
    MissReason.NO_WINDOW: "KV of the layers that see all tokens is there up to token {detail}, but "
    "the layers with a window have kept none of the tokens that they see after token {position}",
}


class PrefixMiss(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The place at which the reuse of a prompt ended, and the reason."""

    reason: MissReason
    position: int
    """Index in the prompt of the first token that was computed; with ``DIFFERS`` also the first
    that differs. What the other prompt has there is not told: it may be another user's."""
    detail: str = ""


def describe_miss(miss: PrefixMiss) -> str:
    """Return the reason in words."""
    return _WORDS[miss.reason].format(position=miss.position, detail=miss.detail or "?")


class StoreLookup(msgspec.Struct, frozen=True, kw_only=True):
    """The lookup in the store when a request arrived."""

    asked_blocks: int
    """Full blocks of the prompt that the device lacked."""
    found_blocks: int
    seconds: float
    is_answered: bool
    """False: not in time, or no store was there."""


class KvLoadRecord(msgspec.Struct, kw_only=True):
    """One load of blocks for a request."""

    source: str
    """``store``, or the name of the prefill instance."""
    begin_s: float
    end_s: float | None = None
    """None while it goes on."""
    asked_blocks: int
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    failures: dict[str, int] = {}
    """Blocks that did not come, by reason: an error's code, ``too_late``, ``after_gap``,
    ``given_up`` or what the tier calls it."""


class ConsideredInstance(msgspec.Struct, frozen=True, kw_only=True):
    """An instance that was compared with others for a prompt, and the times predicted for it."""

    instance: str
    prefix_tokens: int
    """Tokens of the prompt that need not be computed there."""
    transfer_s: float
    queue_s: float
    prefill_s: float
    ttft_s: float
    """To the first token: the sum of the three."""


class InstanceTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """A request as one instance saw it."""

    request_id: str
    """Id of the engine."""
    instance: str = ""
    role: str = "unified"
    sent_s: float = 0.0
    """The moment at which the server sent it there, after it had accepted the generation; other
    times count from its arrival there."""
    considered: list[ConsideredInstance] = []
    """The instances that were compared for the prompt, the chosen one first, then the others with
    the least predicted times; in the first entry of a generation."""
    real_ttft_s: float | None = None
    """From the decision to the first token, for comparison; there too."""
    state: str
    """``waiting``, ``loading``, ``running``, ``preempted`` or ``finished``."""
    age_s: float
    """The moment at which this was written, or the request ended."""
    prompt_tokens: int
    output_tokens: int
    lookup: StoreLookup | None = None
    admitted_s: float | None = None
    """The start of the first step that computed some of it: the end of the queue."""
    deferred_steps: int = 0
    """Steps for which it waited because another request computed a prefix that it shares."""
    loads: list[KvLoadRecord] = []
    device_tokens: int = 0
    """Prompt tokens reused from the device's blocks."""
    loaded_tokens: int = 0
    """Prompt tokens reused from what loads had brought."""
    computed_tokens: int = 0
    """Prompt tokens that were, or are being, computed; 0 before admission."""
    miss: PrefixMiss | None = None
    """None: all that could be reused was, or it has not been admitted."""
    num_preemptions: int = 0
    preempted_s: list[float] = []
    """The first of them."""
    num_prefill_steps: int = 0
    prefill_s: float = 0.0
    """Time of the steps that computed its prompt; other requests share these steps."""
    num_decode_steps: int = 0
    decode_s: float = 0.0
    first_token_s: float | None = None
    end_s: float | None = None
    finish_reason: str | None = None


class ChoiceTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """One generation of a request as the server saw it."""

    index: int
    submitted_s: float
    """The moment at which it was sent to an instance, whose times count from there."""
    first_token_s: float | None = None
    end_s: float | None = None
    finish_reason: str | None = None
    prompt_tokens: int
    output_tokens: int
    instances: list[InstanceTimeline] = []
    """Empty if the instance has forgotten it, or is down."""


class RequestTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to ``GET /requests/{id}/timeline``."""

    id: str
    """Id of the answer."""
    request_id: str
    """``x-request-id``."""
    path: str
    arrived_at: float
    """Unix seconds."""
    age_s: float
    """The moment at which this was written, or the request ended."""
    tokenized_s: float
    """The moment at which the prompts were token ids."""
    is_ended: bool
    choices: list[ChoiceTimeline]


class TimelineQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Ask an instance for what it knows of requests; the reply leaves out what it does not know."""

    request_ids: list[str]
