"""The timeline of one request: the data that ``tandem explain`` shows.

An instance reports its part (``InstanceTimeline``) when asked for a request; the server adds its
own and answers with a ``RequestTimeline``. All times are seconds on a monotonic clock, from the
request's arrival at the process that reports them. It contains no token of a prompt or an answer.
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
    """The reason why the KV of a prompt's next tokens was computed and not reused."""

    DISABLED = "disabled"
    NEEDS_LOGITS = "needs_logits"
    DIFFERS = "differs"
    NOT_STORED = "not_stored"
    EVICTED = "evicted"
    FLUSHED = "flushed"
    LOST = "lost"
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
    MissReason.LOST: "the block at token {position} was cached and could not be read from its disk",
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
    """The position at which the reuse of a prompt's KV ended, and the reason."""

    reason: MissReason
    position: int
    """Index in the prompt of the first token that was computed. With ``DIFFERS`` it is the first
    that differs from another prompt, whose token is not shown, because it may be another user's."""
    detail: str = ""


def describe_miss(miss: PrefixMiss) -> str:
    """Return in words why the reuse of a prompt's KV ended where it did."""
    return _WORDS[miss.reason].format(position=miss.position, detail=miss.detail or "?")


class StoreLookup(msgspec.Struct, frozen=True, kw_only=True):
    """The lookup in the store when a request arrived."""

    asked_blocks: int
    """Number of full blocks of the prompt that the device lacked."""
    found_blocks: int
    seconds: float
    is_answered: bool
    """False if the store did not answer in time, or none was connected."""


class KvLoadRecord(msgspec.Struct, kw_only=True):
    """One load of blocks for a request."""

    source: str
    """``store``, or name of the prefill instance."""
    begin_s: float
    end_s: float | None = None
    """Time at which the load ended; None while it is in progress."""
    asked_blocks: int
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    failures: dict[str, int] = {}
    """Number of blocks that did not arrive, by reason: an error's code, ``too_late``,
    ``after_gap``, ``given_up``, or a reason of the tier."""


class ConsideredInstance(msgspec.Struct, frozen=True, kw_only=True):
    """An instance that was compared with others for a prompt, and the times predicted for it."""

    instance: str
    prefix_tokens: int
    """Number of prompt tokens that this instance need not compute."""
    transfer_s: float
    queue_s: float
    prefill_s: float
    ttft_s: float
    """Predicted time to first token: the sum of ``transfer_s``, ``queue_s`` and ``prefill_s``."""


class InstanceTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """The course of a request at one instance."""

    request_id: str
    """Id of the request at the instance."""
    instance: str = ""
    role: str = "unified"
    sent_s: float = 0.0
    """Time at which the server sent the request to this instance, counted from when the server
    accepted the generation; all other times count from the request's arrival at the instance.
    """
    considered: list[ConsideredInstance] = []
    """Instances compared for the prompt: the chosen one, then the others by predicted time. Only in
    the first entry of a generation."""
    real_ttft_s: float | None = None
    """Real seconds from the placement decision to the first token. Only in the first entry of a
    generation."""
    state: str
    """``waiting``, ``loading``, ``running``, ``preempted`` or ``finished``."""
    age_s: float
    """Age of the request, in seconds since its arrival at the instance: at the time of this report,
    or at its end.
    """
    prompt_tokens: int
    output_tokens: int
    lookup: StoreLookup | None = None
    admitted_s: float | None = None
    """Time at which the first step began that computed some of it, which ended its wait in the
    queue."""
    deferred_steps: int = 0
    """Number of steps for which the request waited because another request was computing a prefix
    that both share.
    """
    loads: list[KvLoadRecord] = []
    device_tokens: int = 0
    """Number of prompt tokens reused from the device's blocks."""
    loaded_tokens: int = 0
    """Number of prompt tokens reused from blocks that were loaded."""
    computed_tokens: int = 0
    """Number of prompt tokens that were computed or will be; 0 before admission."""
    miss: PrefixMiss | None = None
    """Position and reason of the end of reuse; None if everything possible was reused, or before
    admission."""
    num_preemptions: int = 0
    preempted_s: list[float] = []
    """Times of the first few preemptions."""
    num_prefill_steps: int = 0
    prefill_s: float = 0.0
    """Seconds of the steps that computed its prompt; other requests share these steps."""
    num_decode_steps: int = 0
    decode_s: float = 0.0
    first_token_s: float | None = None
    end_s: float | None = None
    finish_reason: str | None = None


class ChoiceTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """The course of one generation of a request at the server."""

    index: int
    submitted_s: float
    """Time at which the generation was sent to an instance."""
    first_token_s: float | None = None
    end_s: float | None = None
    finish_reason: str | None = None
    prompt_tokens: int
    output_tokens: int
    instances: list[InstanceTimeline] = []
    """Its course at each instance; empty if the instance has forgotten it or does not answer."""


class RequestTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to ``GET /requests/{id}/timeline``."""

    id: str
    """Id of the answer that the client got."""
    request_id: str
    """Value of the header ``x-request-id``."""
    path: str
    arrived_at: float
    """Time of arrival in Unix seconds."""
    age_s: float
    """Age of the request, in seconds since its arrival at the server: at the time of this report,
    or at its end.
    """
    tokenized_s: float
    """Time at which the request's prompts had been converted to token ids."""
    is_ended: bool
    choices: list[ChoiceTimeline]


class TimelineQuery(msgspec.Struct, frozen=True, kw_only=True):
    """A request to an instance for the timelines of requests; unknown ones are left out of the
    reply.
    """

    request_ids: list[str]
