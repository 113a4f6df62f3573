"""A journal of all calls of a conductor, with their arguments and results, as lines of JSON.

A conductor is pure, so replaying its journal into a new one gives the same decisions, in the
simulator or elsewhere. A replay with another policy shows where that policy would have sent each
request. The journal has names, lengths, loads and truncated hashes, but no tokens.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import msgspec

from tandem.conductor.admission import Admission, AdmissionMode
from tandem.conductor.conductor import Conductor, Decision
from tandem.conductor.fleet import InstanceFacts, Load
from tandem.conductor.policies.policy import Policy, Question
from tandem.conductor.policies.table import make_policy
from tandem.conductor.routes import Alone, InstanceRef, NoRoute, Pair, Place
from tandem.core.errors import ConfigError, CorruptionError
from tandem.core.instance_status import InstanceRole
from tandem.core.wire import StepRecord

__all__ = [
    "JournalHeader",
    "JournalingConductor",
    "Outcome",
    "ReplayedDecision",
    "describe_outcome",
    "replay_journal",
]

_Keys = list[int]


class _Ended(msgspec.Struct, frozen=True, array_like=True):
    """The arguments of ``note_end``; journals of version 3 lack the last one."""

    request_id: str
    num_tokens: int
    now_s: float
    is_whole: bool = True


_CALLS: dict[str, Any] = {
    "join": tuple[str, InstanceRole],
    "leave": tuple[str],
    "serve": tuple[InstanceRef, InstanceFacts],
    "stop": tuple[str],
    "set_role": tuple[str, InstanceRole],
    "set_draining": tuple[str, bool],
    "set_sources": tuple[str, list[str]],
    "set_load": tuple[str, Load],
    "note_steps": tuple[str, list[StepRecord]],
    "set_load_speed": tuple[str, float],
    "note_blocks": tuple[str, _Keys, _Keys],
    "note_group": tuple[str, _Keys, _Keys],
    "note_flushed": tuple[str],
    "note_in_store": tuple[_Keys, _Keys],
    "note_first_token": tuple[str, float],
    "note_end": _Ended,
    "place": tuple[Place, Question, float, bool],
}
"""Argument types of each method of a conductor that is recorded, by name."""


class JournalHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first line of a journal (the record of all calls of a conductor, for a replay)."""

    version: Literal[3, 4] = 4
    policy: str
    admission: AdmissionMode


class Outcome(NamedTuple):
    """A decision about a request, in the short form that the journal records."""

    kind: str
    """Kind of the decision: pair, late_pair, decode, alone, none, wait or rejected."""
    prefill: str = ""
    decode: str = ""
    """Name of the instance that decodes, or that serves the request alone."""
    ttft_s: float | None = None
    """Predicted time to first token on the instance that computes the prompt, seconds."""


class _Line(msgspec.Struct, frozen=True, array_like=True):
    call: str
    arguments: msgspec.Raw
    outcome: Outcome | None = None


class ReplayedDecision(NamedTuple):
    """A decision that a journal has recorded, and the one that a replay takes for the same
    request.
    """

    request_id: str
    then: Outcome
    now: Outcome


def describe_outcome(decision: Decision) -> Outcome:
    """Return a conductor's decision in the short form that the journal records."""
    chosen = decision.chosen
    ttft_s = None if chosen is None else chosen.ttft_s
    if decision.rejection is not None:
        return Outcome(f"rejected: {decision.rejection.reason}")
    match decision.route:
        case Pair(prefill=None, decode=InstanceRef(name=decode)):
            return Outcome("decode", "", decode)
        case Pair(prefill=InstanceRef(name=prefill), decode=None):
            return Outcome("late_pair", prefill, "", ttft_s)
        case Pair(prefill=InstanceRef(name=prefill), decode=InstanceRef(name=decode)):
            return Outcome("pair", prefill, decode, ttft_s)
        case Alone(instance=instance):
            return Outcome("alone", "", instance.name, ttft_s)
        case NoRoute():
            return Outcome("none")
        case _:
            return Outcome("wait")


class JournalingConductor(Conductor):
    """A conductor that records its calls in a journal, from which they can be replayed.

    Args:
        policy: name of the policy, which is written to the journal.
        admission: mode of admission.
        write: called with each line, newline included.
        made: policy object to use, if it is not a default one of that name.
    """

    def __init__(
        self,
        policy: str,
        admission: AdmissionMode,
        write: Callable[[bytes], None],
        made: Policy | None = None,
    ) -> None:
        super().__init__(make_policy(policy) if made is None else made, Admission(admission))
        self._write = write
        self._encode = msgspec.json.Encoder().encode
        self._put_line(JournalHeader(policy=policy, admission=admission))

    def _put_line(self, value: object) -> None:
        self._write(self._encode(value) + b"\n")

    def _put(self, call: str, *arguments: object) -> None:
        self._put_line((call, arguments))

    def join(self, name: str, role: InstanceRole) -> None:
        """Record the call in the journal and add the instance."""
        self._put("join", name, role)
        super().join(name, role)

    def leave(self, name: str) -> None:
        """Record the call in the journal and remove the instance."""
        self._put("leave", name)
        super().leave(name)

    def serve(self, ref: InstanceRef, facts: InstanceFacts) -> None:
        """Record the call in the journal and mark the instance as serving."""
        self._put("serve", ref, facts)
        super().serve(ref, facts)

    def stop(self, name: str) -> None:
        """Record the call in the journal and mark the instance as not serving."""
        self._put("stop", name)
        super().stop(name)

    def set_role(self, name: str, role: InstanceRole) -> None:
        """Record the call in the journal and set the instance's role."""
        self._put("set_role", name, role)
        super().set_role(name, role)

    def set_draining(self, name: str, *, is_draining: bool) -> None:
        """Record the call in the journal and set whether the instance is draining (gets no new
        requests).
        """
        self._put("set_draining", name, is_draining)
        super().set_draining(name, is_draining=is_draining)

    def set_sources(self, name: str, sources: Collection[str]) -> None:
        """Record the call in the journal and set the instances whose blocks this one can read."""
        self._put("set_sources", name, sorted(sources))
        super().set_sources(name, sources)

    def set_load(self, name: str, load: Load) -> None:
        """Record the call in the journal and set the instance's load."""
        self._put("set_load", name, load)
        super().set_load(name, load)

    def note_steps(self, name: str, steps: Iterable[StepRecord]) -> None:
        """Record the call in the journal and learn from the instance's steps."""
        kept = list(steps)
        self._put("note_steps", name, kept)
        super().note_steps(name, kept)

    def set_load_speed(self, name: str, tokens_per_s: float) -> None:
        """Record the call in the journal and set the instance's speed of loading KV."""
        self._put("set_load_speed", name, tokens_per_s)
        super().set_load_speed(name, tokens_per_s)

    def note_blocks(
        self, name: str, stored: Iterable[int] = (), removed: Collection[int] = ()
    ) -> None:
        """Record the call in the journal and update the instance's blocks."""
        kept, gone = list(stored), list(removed)
        if kept or gone:
            self._put("note_blocks", name, kept, gone)
        super().note_blocks(name, kept, gone)

    def note_group(
        self, name: str, stored: Iterable[int] = (), removed: Collection[int] = ()
    ) -> None:
        """Record the call in the journal and update the blocks at whose end the instance has the
        window or a state.
        """
        kept, gone = list(stored), list(removed)
        if kept or gone:
            self._put("note_group", name, kept, gone)
        super().note_group(name, kept, gone)

    def note_flushed(self, name: str) -> None:
        """Record the call in the journal and forget the instance's blocks."""
        self._put("note_flushed", name)
        super().note_flushed(name)

    def note_in_store(self, stored: Iterable[int] = (), removed: Iterable[int] = ()) -> None:
        """Record the call in the journal and update the store's blocks."""
        kept, gone = list(stored), list(removed)
        if kept or gone:
            self._put("note_in_store", kept, gone)
        super().note_in_store(kept, gone)

    def note_first_token(self, request_id: str, now_s: float) -> None:
        """Record the call in the journal and note the request's first token."""
        self._put("note_first_token", request_id, now_s)
        super().note_first_token(request_id, now_s)

    def note_end(
        self, request_id: str, num_tokens: int, now_s: float, *, is_whole: bool = True
    ) -> None:
        """Record the call in the journal and note the request's end."""
        self._put("note_end", request_id, num_tokens, now_s, is_whole)
        super().note_end(request_id, num_tokens, now_s, is_whole=is_whole)

    def place(
        self, place: Place, question: Question, now_s: float = 0.0, *, is_new: bool = False
    ) -> Decision:
        """Place a request, and record the call and its outcome in the journal."""
        decision = super().place(place, question, now_s, is_new=is_new)
        outcome = describe_outcome(decision)
        self._put_line(("place", (place, question, now_s, is_new), outcome))
        return decision


def replay_journal(
    lines: Iterable[bytes], policy: str | None = None, admission: AdmissionMode | None = None
) -> Iterator[ReplayedDecision]:
    """Replay a journal; yield each recorded decision with the one taken now.

    Args:
        lines: lines of the journal; the last one may be incomplete.
        policy: policy to use instead of the journal's. Loads and blocks stay those of the
            recording.
        admission: mode of admission to use instead of the journal's.

    Raises: CorruptionError (a line is not of a journal); ConfigError (no such policy).
    """
    source = iter(lines)
    try:
        header = msgspec.json.decode(next(source, b""), type=JournalHeader)
    except msgspec.DecodeError as error:
        raise CorruptionError("conductor.replay", f"no journal begins so: {error}") from error
    try:
        made = make_policy(header.policy if policy is None else policy)
    except KeyError as error:
        raise ConfigError("conductor.replay", f"no policy {error}", field="policy") from error
    mode = header.admission if admission is None else admission
    conductor = Conductor(made, Admission(mode))
    decode_line = msgspec.json.Decoder(_Line).decode
    decoders = {name: msgspec.json.Decoder(kind).decode for name, kind in _CALLS.items()}
    for number, line in enumerate(source, 2):
        if not line.endswith(b"\n"):
            return  # The last line is incomplete: the server was killed while writing it.
        try:
            told = decode_line(line)
            arguments = decoders[told.call](told.arguments)
        except (msgspec.DecodeError, KeyError) as error:
            what = f"line {number} is none of a journal: {error}"
            raise CorruptionError("conductor.replay", what) from error
        if told.call == "place":
            place, question, now_s, is_new = arguments
            decision = conductor.place(place, question, now_s, is_new=is_new)
            then = Outcome("wait") if told.outcome is None else told.outcome
            yield ReplayedDecision(question.request_id, then, describe_outcome(decision))
        elif told.call == "set_draining":
            name, is_draining = arguments
            conductor.set_draining(name, is_draining=is_draining)
        elif told.call == "note_end":
            conductor.note_end(
                arguments.request_id,
                arguments.num_tokens,
                arguments.now_s,
                is_whole=arguments.is_whole,
            )
        else:
            getattr(conductor, told.call)(*arguments)
