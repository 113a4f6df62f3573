"""The states of a request that a cluster serves: owners, deadlines and exits, as one table.

``tandem.engine.cluster.request_states`` runs from ``TABLE``;
``docs/design/engine/disaggregation_states.md`` is generated from it. A test checks for each exit
that every resource held in a state is still held, released or ended in the next one, so that no
exit leaks. Pure data.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

__all__ = [
    "EFFECTS",
    "ENDS",
    "EVENTS",
    "TABLE",
    "Deadline",
    "Effect",
    "Event",
    "Exit",
    "Held",
    "Row",
    "State",
]  # fmt: skip


class State(StrEnum):
    """The state of a client's request in the server: which instances work on it, and what it waits
    for.
    """

    PLACING = "placing"
    PREFILLING = "prefilling"
    PREFILLING_ALONE = "prefilling_alone"
    HELD = "held"
    CONTINUING = "continuing"
    LOADING = "loading"
    DECODING = "decoding"
    REJOINING = "rejoining"
    SERVING = "serving"
    ENDED = "ended"
    FAILED = "failed"


class Event(StrEnum):
    """An event that makes a request leave its state, such as an output of an instance or the end of
    a lease.
    """

    PAIR = "pair"
    LATE_PAIR = "late_pair"
    REJOIN = "rejoin"
    ALONE = "alone"
    DECODE = "decode"
    NO_ROUTE = "no_route"
    PREFILLED = "prefilled"
    PREFILL_ENDED = "prefill_ended"
    PREFILL_LOST = "prefill_lost"
    CONTINUED = "continued"
    NOT_CONTINUED = "not_continued"
    OUTPUT = "output"
    OUTPUT_ENDED = "output_ended"
    DECODE_LOST = "decode_lost"
    LEASE_ENDED = "lease_ended"
    RECOVERY_ENDED = "recovery_ended"
    TIMEOUT = "timeout"
    CANCEL = "cancel"
    REFUSED = "refused"


class Effect(StrEnum):
    """An action executed when a request leaves a state. If there are several, they are executed in
    the order in which the table lists them.
    """

    PLACE = "place"
    PLACE_DECODE = "place_decode"
    SUBMIT_PREFILL = "submit_prefill"
    SUBMIT_WAITING = "submit_waiting"
    SUBMIT_DECODE = "submit_decode"
    SUBMIT_REJOINING = "submit_rejoining"
    SUBMIT_ALONE = "submit_alone"
    SEND_CONTINUATION = "send_continuation"
    DELIVER = "deliver"
    KEEP = "keep"
    TAKE_KEPT = "take_kept"
    DISCARD_KEPT = "discard_kept"
    DROP_PREFILL = "drop_prefill"
    DROP_DECODE = "drop_decode"
    RELEASE = "release"
    COUNT = "count"
    END_TIMEOUT = "end_timeout"
    END_CANCELLED = "end_cancelled"
    FAIL = "fail"


class Held(StrEnum):
    """A resource that a request has at an instance, and that must be released when it is not
    needed.
    """

    PREFILL = "prefill"
    """A running request at the prefill instance."""
    HOLD = "hold"
    """Blocks that the prefill instance holds under a lease."""
    DECODE = "decode"
    """A request at the instance that sends the tokens to the client."""


class Deadline(StrEnum):
    """The kind of time limit that a state has; when it has passed, the request leaves the state.

    The values describe the kinds in the generated document.
    """

    REQUEST = "the time limit of the request; its instance ends it, and 2 s later the server"
    RECOVERY = "cluster.recovery_s, or the time limit of the request"
    LEASE = "the lease of the held blocks, or the time limit of the request"
    NONE = "none: the end"


@dataclass(frozen=True)
class Exit:
    """An exit of a state: the next state, and the effects (actions) executed on the way."""

    to: State
    effects: tuple[Effect, ...] = ()


@dataclass(frozen=True)
class Row:
    """One state.

    Attributes:
        meaning: meaning of the state, one sentence.
        owner: the party that must act next.
        deadline: time limit of the state.
        held: resources that the request has at instances in this state.
        exits: exit for each event; events without an exit cannot occur in this state.
    """

    meaning: str
    owner: str
    deadline: Deadline
    held: frozenset[Held]
    exits: Mapping[Event, Exit]


EVENTS: Mapping[Event, str] = MappingProxyType({
    Event.PAIR: "A prefill and a decode instance were chosen; the decode instance has room for the "
    "blocks already.",
    Event.LATE_PAIR: "The same, but the decode instance has no room yet.",
    Event.REJOIN: "The same, for a request that has sent tokens to its client.",
    Event.ALONE: "One instance was chosen to serve the request alone.",
    Event.DECODE: "A decode instance was chosen for blocks that are held.",
    Event.NO_ROUTE: "No decode instance can take the held blocks.",
    Event.PREFILLED: "The prefill instance sent the first token and holds the blocks.",
    Event.PREFILL_ENDED: "The request ended at the prefill instance: its first token was its last, "
    "or an error that would be the same elsewhere.",
    Event.PREFILL_LOST: "The prefill instance refused the request, died, or did not answer within "
    "its lease.",
    Event.CONTINUED: "The decode instance took the continuation.",
    Event.NOT_CONTINUED: "It did not: its wait had ended and it computes by itself.",
    Event.OUTPUT: "The instance that decodes sent tokens.",
    Event.OUTPUT_ENDED: "It sent its last output.",
    Event.DECODE_LOST: "It refused the request, died, or did not answer within its lease.",
    Event.LEASE_ENDED: "The lease of the held blocks ended.",
    Event.RECOVERY_ENDED: "No instance that may serve the request came back in time.",
    Event.TIMEOUT: "The time limit of the request passed.",
    Event.CANCEL: "The client left, or the request was aborted.",
    Event.REFUSED: "Every instance that runs refused the request, or has another model than the "
    "tokens that were sent; or it failed more than cluster.max_attempts times; or none has run for "
    "longer than cluster.recovery_s. An accepted request waits instead while one is starting.",
})  # fmt: skip
"""Description in words of each event, for the generated page."""

EFFECTS: Mapping[Effect, str] = MappingProxyType({
    Effect.PLACE: "ask the policy for instances",
    Effect.PLACE_DECODE: "ask the policy for a decode instance",
    Effect.SUBMIT_PREFILL: "send the request to the prefill instance, prefill only",
    Effect.SUBMIT_WAITING: "send it to the decode instance, which reads blocks as they are "
    "computed and waits for the continuation",
    Effect.SUBMIT_DECODE: "send it to the decode instance with the handle of the blocks and "
    "the tokens so far",
    Effect.SUBMIT_REJOINING: "send it to the decode instance with the tokens so far; blocks are "
    "read as they are computed",
    Effect.SUBMIT_ALONE: "send it to one instance with the tokens so far",
    Effect.SEND_CONTINUATION: "send first token and seed to the decode instance",
    Effect.DELIVER: "pass the output on to the client",
    Effect.KEEP: "keep the output until it is known which token it starts with",
    Effect.TAKE_KEPT: "take kept outputs as if they came now",
    Effect.DISCARD_KEPT: "discard kept outputs",
    Effect.DROP_PREFILL: "cancel at the prefill instance, and release its hold in case it just "
    "ended",
    Effect.DROP_DECODE: "cancel at the instance that decodes",
    Effect.RELEASE: "release the held blocks",
    Effect.COUNT: "count a fallback by reason",
    Effect.END_TIMEOUT: "end with finish reason `deadline`",
    Effect.END_CANCELLED: "end with finish reason `cancelled`",
    Effect.FAIL: "end with the error",
})  # fmt: skip
"""Description in words of each effect, for the generated page."""

ENDS: Mapping[Event, Held] = MappingProxyType({
    Event.PREFILLED: Held.PREFILL,
    Event.PREFILL_ENDED: Held.PREFILL,
    Event.PREFILL_LOST: Held.PREFILL,
    Event.OUTPUT_ENDED: Held.DECODE,
    Event.DECODE_LOST: Held.DECODE,
    Event.LEASE_ENDED: Held.HOLD,
})  # fmt: skip
"""Resources (a running request, held blocks) that an event ends by itself, so that no effect need
end them. ``PREFILLED`` ends the prefill and begins a hold on its blocks.
"""

_RETRY = (Effect.COUNT, Effect.PLACE)
_DROP_BOTH = (Effect.DROP_PREFILL, Effect.DROP_DECODE)
_HOLD_DECODE = (Effect.RELEASE, Effect.DROP_DECODE)


def _last_exits(*give_back: Effect) -> dict[Event, Exit]:
    """Return the exits that every state has, for cancellation and for the request's time limit,
    with the effects that give back what it holds.
    """
    return {
        Event.TIMEOUT: Exit(State.ENDED, (*give_back, Effect.END_TIMEOUT)),
        Event.CANCEL: Exit(State.ENDED, (*give_back, Effect.END_CANCELLED)),
    }


def _row(
    meaning: str, owner: str, deadline: Deadline, held: set[Held], exits: dict[Event, Exit]
) -> Row:
    return Row(meaning, owner, deadline, frozenset(held), MappingProxyType(exits))


TABLE: Mapping[State, Row] = MappingProxyType({
    State.PLACING: _row(
        "No instance works on the request; the policy is asked, and again when one comes back.",
        "server",
        Deadline.RECOVERY,
        set(),
        {
            Event.PAIR: Exit(State.PREFILLING, (Effect.SUBMIT_WAITING, Effect.SUBMIT_PREFILL)),
            Event.LATE_PAIR: Exit(State.PREFILLING_ALONE, (Effect.SUBMIT_PREFILL,)),
            Event.REJOIN: Exit(State.REJOINING, (Effect.SUBMIT_REJOINING, Effect.SUBMIT_PREFILL)),
            Event.ALONE: Exit(State.SERVING, (Effect.SUBMIT_ALONE,)),
            Event.REFUSED: Exit(State.FAILED, (Effect.FAIL,)),
            Event.RECOVERY_ENDED: Exit(State.FAILED, (Effect.FAIL,)),
            **_last_exits(),
        },
    ),
    State.PREFILLING: _row(
        "The prefill instance computes the prompt; the decode instance reads the blocks as they "
        "are computed.",
        "prefill instance",
        Deadline.REQUEST,
        {Held.PREFILL, Held.DECODE},
        {
            Event.PREFILLED: Exit(State.CONTINUING, (Effect.DELIVER, Effect.SEND_CONTINUATION)),
            Event.PREFILL_ENDED: Exit(State.ENDED, (Effect.DROP_DECODE, Effect.DELIVER)),
            Event.PREFILL_LOST: Exit(State.PLACING, (Effect.DROP_DECODE, *_RETRY)),
            # The decode instance gave up waiting before the prefill ended and computes the same
            # tokens itself.
            Event.OUTPUT: Exit(State.SERVING, (Effect.COUNT, Effect.DROP_PREFILL, Effect.DELIVER)),
            Event.OUTPUT_ENDED: Exit(State.ENDED, (Effect.DROP_PREFILL, Effect.DELIVER)),
            Event.DECODE_LOST: Exit(State.PREFILLING_ALONE, (Effect.COUNT,)),
            **_last_exits(*_DROP_BOTH),
        },
    ),
    State.PREFILLING_ALONE: _row(
        "The prefill instance computes the prompt; no decode instance is chosen yet.",
        "prefill instance",
        Deadline.REQUEST,
        {Held.PREFILL},
        {
            Event.PREFILLED: Exit(State.HELD, (Effect.DELIVER, Effect.PLACE_DECODE)),
            Event.PREFILL_ENDED: Exit(State.ENDED, (Effect.DELIVER,)),
            Event.PREFILL_LOST: Exit(State.PLACING, _RETRY),
            **_last_exits(Effect.DROP_PREFILL),
        },
    ),
    State.HELD: _row(
        "The prefill instance holds the blocks; a decode instance is being chosen.",
        "server",
        Deadline.LEASE,
        {Held.HOLD},
        {
            Event.DECODE: Exit(State.LOADING, (Effect.SUBMIT_DECODE,)),
            Event.NO_ROUTE: Exit(State.PLACING, (Effect.RELEASE, *_RETRY)),
            Event.LEASE_ENDED: Exit(State.PLACING, _RETRY),
            **_last_exits(Effect.RELEASE),
        },
    ),
    State.CONTINUING: _row(
        "The decode instance has been sent the first token and has not answered.",
        "decode instance",
        Deadline.REQUEST,
        {Held.HOLD, Held.DECODE},
        {
            Event.CONTINUED: Exit(State.LOADING, (Effect.TAKE_KEPT,)),
            Event.NOT_CONTINUED: Exit(
                State.HELD,
                (Effect.DISCARD_KEPT, Effect.DROP_DECODE, Effect.COUNT, Effect.PLACE_DECODE),
            ),
            # Keep the output until the reply has come: the reply tells if the decode instance
            # starts with the first or the second token.
            Event.OUTPUT: Exit(State.CONTINUING, (Effect.KEEP,)),
            Event.DECODE_LOST: Exit(
                State.HELD, (Effect.DISCARD_KEPT, Effect.COUNT, Effect.PLACE_DECODE)
            ),
            **_last_exits(*_HOLD_DECODE),
        },
    ),
    State.LOADING: _row(
        "The decode instance reads what it lacks of the held blocks, or waits for room; after the "
        "lease it computes.",
        "decode instance",
        Deadline.REQUEST,
        {Held.HOLD, Held.DECODE},
        {
            Event.OUTPUT: Exit(State.DECODING, (Effect.RELEASE, Effect.DELIVER)),
            Event.OUTPUT_ENDED: Exit(State.ENDED, (Effect.RELEASE, Effect.DELIVER)),
            Event.DECODE_LOST: Exit(State.HELD, (Effect.COUNT, Effect.PLACE_DECODE)),
            **_last_exits(*_HOLD_DECODE),
        },
    ),
    State.DECODING: _row(
        "The decode instance sends tokens.",
        "decode instance",
        Deadline.REQUEST,
        {Held.DECODE},
        {
            Event.OUTPUT: Exit(State.DECODING, (Effect.DELIVER,)),
            Event.OUTPUT_ENDED: Exit(State.ENDED, (Effect.DELIVER,)),
            Event.DECODE_LOST: Exit(State.PLACING, _RETRY),
            **_last_exits(Effect.DROP_DECODE),
        },
    ),
    State.REJOINING: _row(
        "After a failure in mid-decode: a pair repeats the prefill, of which the prefix cache "
        "usually has most; the decode instance knows the tokens so far.",
        "prefill instance",
        Deadline.REQUEST,
        {Held.PREFILL, Held.DECODE},
        {
            Event.PREFILLED: Exit(State.LOADING),
            # Cancel the request at the decode instance: it would otherwise wait for this prefill's
            # blocks until the lease ends.
            Event.PREFILL_ENDED: Exit(State.PLACING, (Effect.DROP_DECODE, *_RETRY)),
            Event.PREFILL_LOST: Exit(State.PLACING, (Effect.DROP_DECODE, *_RETRY)),
            Event.OUTPUT: Exit(State.DECODING, (Effect.DROP_PREFILL, Effect.DELIVER)),
            Event.OUTPUT_ENDED: Exit(State.ENDED, (Effect.DROP_PREFILL, Effect.DELIVER)),
            Event.DECODE_LOST: Exit(State.PLACING, (Effect.DROP_PREFILL, *_RETRY)),
            **_last_exits(*_DROP_BOTH),
        },
    ),
    State.SERVING: _row(
        "One instance prefills and decodes.",
        "that instance",
        Deadline.REQUEST,
        {Held.DECODE},
        {
            Event.OUTPUT: Exit(State.SERVING, (Effect.DELIVER,)),
            Event.OUTPUT_ENDED: Exit(State.ENDED, (Effect.DELIVER,)),
            Event.DECODE_LOST: Exit(State.PLACING, _RETRY),
            **_last_exits(Effect.DROP_DECODE),
        },
    ),
    State.ENDED: _row("The last output has been sent.", "nobody", Deadline.NONE, set(), {}),
    State.FAILED: _row("A terminal error has been sent.", "nobody", Deadline.NONE, set(), {}),
})  # fmt: skip
"""All states, each with its row."""
