"""The conductor: it records events of the instances, and decides where a request goes.

A policy only compares instances. This class decides, for all policies alike, which instances may be
compared, if a request gets a prefill and a decode instance or one for both, and when KV may be read
before the prefill has ended. All state is columns and maps that events keep current, so the cost of
a decision does not depend on the number of queued requests. Pure and single-threaded.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tandem.conductor.admission import Admission, Forecast, Rejection
from tandem.conductor.directory import (
    Chain,
    ExpectedBlocks,
    PrefixDirectory,
    cut_to_group,
    make_finder,
    match_chain,
)
from tandem.conductor.estimator import COST_NAMES, StepEstimator
from tandem.conductor.fleet import (
    DECODE,
    PREFILL,
    ROLES,
    UNIFIED,
    Fleet,
    FloatColumn,
    InstanceFacts,
    IntColumn,
    Load,
    Mask,
)
from tandem.conductor.policies.policy import Policy, Question
from tandem.conductor.prediction import (
    TtftParts,
    predict_delays,
    predict_row_tpot,
    predict_ttft,
)
from tandem.conductor.role_balance import RoleBalance, RoleChange
from tandem.conductor.routes import Alone, InstanceRef, NoRoute, Pair, Place, Route
from tandem.core.instance_status import InstanceRole, StepCosts
from tandem.core.wire import GROWTH_BLOCKS, StepRecord

__all__ = ["Candidate", "Conductor", "Decision"]

MAX_CANDIDATES = 8
"""Largest number of instances that a placement decision lists, best first."""
MAX_EXPECTED = 1 << 18
"""Largest number of block keys remembered as expected: KV blocks that instances were asked to
compute but have not reported yet.
"""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An instance that was considered for a prompt, and the times predicted for it."""

    instance: str
    prefix_len: int
    """Number of prompt tokens whose KV the instance has or can load, so that it need not compute
    them."""
    transfer_s: float
    queue_s: float
    prefill_s: float

    @property
    def ttft_s(self) -> float:
        """Predicted time to first token, seconds."""
        return self.transfer_s + self.queue_s + self.prefill_s


class Decision:
    """The answer to a question where to run a request.

    Args:
        route: the instances; None: wait until another instance serves.
        names: names of the instances compared for the prompt, the chosen one first.
        parts: their predicted times to first token.
        tpot_s: predicted time between tokens on the decode instance, seconds; None: not known yet.
        decode: the instance that is to decode, even if the route does not name it yet.
        rejection: reason why the request is rejected; there is no route then.
    """

    __slots__ = ("_names", "_parts", "decode", "rejection", "route", "tpot_s")

    def __init__(
        self,
        route: Route | None,
        names: Sequence[str] = (),
        parts: TtftParts | None = None,
        tpot_s: float | None = None,
        decode: str = "",
        rejection: Rejection | None = None,
    ) -> None:
        self.route, self.tpot_s, self.rejection = route, tpot_s, rejection
        self.decode = decode
        self._names, self._parts = names, parts

    @property
    def chosen(self) -> Candidate | None:
        """The instance chosen to compute the prompt, with its predicted times; None if none was
        compared.
        """
        return self._describe(0) if self._names else None

    @property
    def considered(self) -> list[Candidate]:
        """The instances that were compared for the prompt: the chosen one first, then the others by
        predicted time.
        """
        return [self._describe(at) for at in range(len(self._names))]

    def _describe(self, at: int) -> Candidate:
        parts = self._parts
        assert parts is not None
        return Candidate(
            self._names[at],
            int(parts.prefix_len[at]),
            float(parts.transfer_s[at]),
            float(parts.queue_s[at]),
            float(parts.prefill_s[at]),
        )


@dataclass(slots=True)
class _Choice:
    """The instances chosen for a request."""

    route: Alone | Pair
    row: int | None
    """Row of the instance that computes the prompt; None if it is computed."""
    rows: IntColumn
    """Rows that were compared."""
    decode: int
    """Row of the instance that is to decode, even if the route does not name it yet."""
    is_makeshift: bool = False
    """True if one instance serves the whole request because no pair of instances is usable."""


_NO_ROWS: IntColumn = np.zeros(0, np.int64)
_NO_TIMES: FloatColumn = np.zeros(0)
_NO_PARTS = TtftParts(_NO_TIMES, _NO_TIMES, _NO_TIMES, _NO_TIMES, _NO_ROWS)


@dataclass(slots=True)
class _Seen:
    """Results of a request's lookups, which further tries use again."""

    is_done: bool = False
    hits: IntColumn = field(default_factory=lambda: _NO_ROWS)
    """Number of leading tokens of the prompt that each row is known to have the KV of."""
    parts: TtftParts = _NO_PARTS
    """Predicted times to first token of each row."""


class Conductor:
    """The chooser of the instances that serve a cluster's requests, from what it is told of them.

    Args:
        policy: compares instances.
        admission: decides which requests are accepted; None: all are.
    """

    def __init__(self, policy: Policy, admission: Admission | None = None) -> None:
        self.policy = policy
        self.admission = Admission() if admission is None else admission
        self.fleet = Fleet()
        self.roles = RoleBalance()
        """The balance of roles, which decides if an instance should change its role."""
        self.directory = PrefixDirectory()
        """Map from the keys of KV blocks to the instances that report having the block."""
        self.group = PrefixDirectory()
        """Map from the key of a KV block to the instances that have cached the sliding-window KV or
        the recurrent state at the block's end; models with such layers need it to reuse a prefix.
        """
        self.stored = PrefixDirectory()
        """Keys of the KV blocks that the shared store has; the store is recorded as if it were
        instance 0.
        """
        self._expected = ExpectedBlocks(MAX_EXPECTED)
        """KV blocks that instances were asked to compute or to read from others, and so will soon
        have.
        """
        self._expected_group = ExpectedBlocks(MAX_EXPECTED)
        """The last KV blocks of prompts that were sent to instances; the instances will cache the
        sliding-window KV or the recurrent state at the ends of these blocks.
        """
        self._estimators: dict[int, StepEstimator] = {}

    # ---------------------------------------------------------------- events

    def join(self, name: str, role: InstanceRole) -> None:
        """Add an instance to the cluster; it does not serve yet."""
        row = self.fleet.join(name, role)
        self._estimators[row] = StepEstimator(self.fleet.costs[:, row])

    def leave(self, name: str) -> None:
        """Remove an instance from the cluster."""
        row = self.fleet.leave(name)
        del self._estimators[row]
        self._forget(row)

    def serve(self, ref: InstanceRef, facts: InstanceFacts) -> None:
        """Record that a new run (process) of an instance serves; it has no blocks and no load."""
        self._forget(self.fleet.serve(ref, facts))

    def stop(self, name: str) -> None:
        """Record that an instance no longer serves, because its process is gone or restarts."""
        self.fleet.stop(name)

    def set_role(self, name: str, role: InstanceRole) -> None:
        """Set the role (prefill, decode or unified) of an instance."""
        self.fleet.set_role(name, role)

    def set_draining(self, name: str, *, is_draining: bool) -> None:
        """Set if an instance is draining, which means that it gets no new requests."""
        self.fleet.set_draining(name, is_draining=is_draining)

    def is_draining(self, name: str) -> bool:
        """Return True if an instance is draining, which means that it gets no new requests."""
        row = self.fleet.find(name)
        return row is not None and bool(self.fleet.is_draining[row])

    def set_sources(self, name: str, sources: Collection[str]) -> None:
        """Set the prefill instances whose blocks an instance can read."""
        self.fleet.set_sources(name, sources)

    def set_load(self, name: str, load: Load) -> None:
        """Set the load of an instance, as last reported and counted by the server."""
        row = self.fleet.find(name)
        # Columns with a NaN would make the instance the best of all.
        if row is not None and math.isfinite(math.fsum(load)):
            self.fleet.set_load(row, load)

    def note_steps(self, name: str, steps: Iterable[StepRecord]) -> None:
        """Update the estimated costs of an instance's steps from steps it has computed, in their
        order.
        """
        row = self.fleet.find(name)
        if row is None:
            return
        estimator = self._estimators[row]
        for step in steps:
            if not math.isfinite(step.seconds + step.prefill_context):
                continue
            self.fleet.add_work(row, step)
            if estimator.note_step(step):
                self.fleet.set_costs(row, estimator.costs)

    def set_load_speed(self, name: str, tokens_per_s: float) -> None:
        """Set the rate at which an instance loads KV from the store or others, in tokens a second;
        0: unknown.
        """
        row = self.fleet.find(name)
        if row is not None and tokens_per_s > 0:
            self.fleet.set_load_speed(row, tokens_per_s)

    def note_blocks(
        self, name: str, stored: Iterable[int] = (), removed: Collection[int] = ()
    ) -> None:
        """Record keys of blocks that an instance has added to its cache or removed from it."""
        row = self.fleet.find(name)
        if row is None:
            return
        self.directory.note_removed(row, removed)
        self._expected.note_removed(row, removed)
        self.directory.note_stored(row, stored)

    def note_group(
        self, name: str, stored: Iterable[int] = (), removed: Collection[int] = ()
    ) -> None:
        """Record, for a model with windows or states, keys of blocks at whose end an instance has
        cached the sliding window or the recurrent state, or no longer has it.
        """
        row = self.fleet.find(name)
        if row is None:
            return
        self.group.note_removed(row, removed)
        self._expected_group.note_removed(row, removed)
        self.group.note_stored(row, stored)

    def note_flushed(self, name: str) -> None:
        """Record that an instance has dropped all its cached blocks."""
        row = self.fleet.find(name)
        if row is not None:
            self._forget(row)

    def note_in_store(self, stored: Iterable[int] = (), removed: Iterable[int] = ()) -> None:
        """Record keys of blocks that the store has gained or lost."""
        self.stored.note_removed(0, removed)
        self.stored.note_stored(0, stored)

    def _forget(self, row: int) -> None:
        self.directory.note_cleared(row)
        self._expected.note_cleared(row)
        if self.fleet.group_depth[row]:
            self.group.note_cleared(row)
            self._expected_group.note_cleared(row)
        self.policy.forget(row)

    def get_step_error(self, name: str) -> float:
        """Return the mean relative error of the predicted durations of an instance's steps."""
        row = self.fleet.find(name)
        return 0.0 if row is None else self._estimators[row].error

    def get_step_costs(self, name: str) -> StepCosts | None:
        """Return the estimated costs of an instance's steps; None if they are not known."""
        row = self.fleet.find(name)
        if row is None:
            return None
        estimator = self._estimators[row]
        return StepCosts(
            **dict(zip(COST_NAMES, estimator.costs.tolist(), strict=True)),
            num_steps=estimator.num_steps,
        )

    def note_first_token(self, request_id: str, now_s: float) -> None:
        """Record that the first token of a request has come."""
        self.admission.note_first_token(request_id, now_s)

    def note_end(
        self, request_id: str, num_tokens: int, now_s: float, *, is_whole: bool = True
    ) -> None:
        """Record that a request has ended after ``num_tokens`` tokens of output.

        Args:
            request_id: its id.
            num_tokens: number of tokens that its client got.
            now_s: monotonic seconds.
            is_whole: False if its answer would have gone on: it was cancelled, or has failed.
        """
        self.admission.note_end(request_id, num_tokens, now_s, is_whole=is_whole)

    # ---------------------------------------------------------------- decisions

    def place(
        self, place: Place, question: Question, now_s: float = 0.0, *, is_new: bool = False
    ) -> Decision:
        """Choose the instances that serve a request.

        Args:
            place: kind of answer wanted, and runs of instances that must not be chosen again.
            question: the request.
            now_s: monotonic seconds.
            is_new: True if it has not been accepted yet, so that it may be rejected.
        """
        self.fleet.age(now_s)
        seen = _Seen()
        choice = self._choose(place, question, seen)
        if choice is None or isinstance(choice, NoRoute):
            return Decision(choice)
        if not is_new or choice.row is None:
            if self.admission.is_live(question.request_id):
                forecast = self._forecast(question, choice, seen)
                self.admission.note_moved(question.request_id, forecast, now_s)
            return self._note_placed(question, choice, seen)
        admitted = self._admit(place, question, choice, seen, now_s)
        if isinstance(admitted, Rejection):
            self.admission.note_rejected(admitted)
            return Decision(None, rejection=admitted)
        self.roles.note_request(question.slo)
        return self._note_placed(question, admitted, seen)

    def _admit(
        self, place: Place, question: Question, choice: "_Choice", seen: "_Seen", now_s: float
    ) -> "_Choice | Rejection":
        """Accept a new request; return the instances for it, or the reason to reject it.

        Where it would break a promise to a request accepted before, other instances are tried.
        """
        first = None
        for _ in range(MAX_CANDIDATES):
            forecast = self._forecast(question, choice, seen)
            forecast = self.admission.foresee(self.fleet, forecast, now_s)
            rejection = self.admission.check(question, forecast, now_s)
            if rejection is None:
                self.admission.note_accepted(question, forecast, now_s)
                return choice
            if first is None:
                first = rejection
            if not rejection.crowded:
                break
            row = self.fleet.find(rejection.crowded)
            assert row is not None
            place = replace(place, avoid=place.avoid | {self._ref(row)})
            other = self._choose(place, question, seen)
            # If pairs are crowded, a prefill or decode instance does not serve the whole request
            # instead, as it would if the others were gone.
            if not isinstance(other, _Choice) or other.is_makeshift > choice.is_makeshift:
                break
            choice = other
        assert first is not None
        return first

    def find_role_change(self, now_s: float) -> RoleChange | None:
        """Return the change of an instance's role that is due, or None. Call it once a second.

        Args:
            now_s: monotonic seconds.
        """
        return self.roles.look(self.fleet, now_s)

    def _note_placed(self, question: Question, choice: "_Choice", seen: "_Seen") -> Decision:
        """Record that the chosen instances will soon have the prompt's blocks; return the
        decision.
        """
        route = choice.route
        decision = self._decide(question, choice, seen)
        refs = (route.prefill, route.decode) if isinstance(route, Pair) else (route.instance,)
        rows = [self.fleet.find(ref.name) for ref in refs if ref is not None]
        known = [row for row in rows if row is not None]
        bits = 0
        for row in known:
            bits |= 1 << row
        depth = max((int(self.fleet.group_depth[row]) for row in known), default=0)
        for chain in question.chains:
            self._expected.note(bits, chain.keys)
            if depth:
                # Begin one block earlier than the depth asks for: the prompt's last message, at
                # whose end window KV and states are kept, may end in the block before the prompt's
                # last block.
                self._expected_group.note(bits, chain.keys[-depth - 1 :])
        if not isinstance(route, Pair) or route.prefill is not None:
            self.policy.note_placed(question, known[0])
        return decision

    def _choose(
        self, place: Place, question: Question, seen: "_Seen"
    ) -> "_Choice | NoRoute | None":
        """Return the instances for a request, or the answer that there are none."""
        fleet = self.fleet
        usable = fleet.find_usable(place.avoid, place.identity)
        if place.is_held:
            assert place.prefill is not None, "blocks are held by nobody"
            return self._place_held(place.prefill, question, usable)
        self._look(question, seen)
        prefills = usable & (fleet.role == UNIFIED)
        if place.needs_decode:
            prefills |= usable & (fleet.role == PREFILL) & (self._count_readers(place) > 0)
        else:
            prefills |= usable & (fleet.role == PREFILL)
        rows = np.flatnonzero(prefills)
        if not len(rows):
            return self._place_alone(place, question, usable, seen)
        row = self.policy.choose_prefill(question, fleet, rows, seen.hits, seen.parts)
        if fleet.role[row] == UNIFIED or not place.needs_decode:
            resumed = self._find_resumed(place, usable)
            row = row if resumed is None else resumed
            return self._make_alone(row, rows)
        decodes = np.flatnonzero(usable & (fleet.role == DECODE) & fleet.reads[:, row])
        assert len(decodes), f"{fleet.name_of(row)} has no reader"
        decode = self.policy.choose_decode(question, fleet, decodes, seen.hits)
        # A decode instance that reads blocks early reserves them before the prompt is computed.
        # Allow this only if it has room for all of them; otherwise requests on two instances could
        # wait for each other's blocks forever.
        is_early = place.is_resumed or self._has_room(decode, question)
        route = Pair(self._ref(row), self._ref(decode) if is_early else None)
        return _Choice(route, row, rows, decode)

    def _look(self, question: Question, seen: "_Seen") -> None:
        """Look up what the instances have of a prompt, and predict its times, unless that was done
        before.
        """
        if seen.is_done:
            return
        seen.is_done = True
        seen.hits = self.count_hits(question.chains)
        # An instance loads blocks that the store has, even if its routing policy ignores the store,
        # so the prediction counts them.
        threshold = 1.0 if math.isinf(self.policy.threshold) else self.policy.threshold
        stored_len = self.count_stored(question.chains)
        seen.parts = predict_ttft(self.fleet, question.prompt_len, seen.hits, stored_len, threshold)

    def count_hits(self, chains: Sequence[Chain]) -> IntColumn:
        """Return, for each row of the fleet, how many leading tokens of a prompt its instance is
        known to have the KV of.
        """
        fleet = self.fleet
        hits = np.zeros(fleet.num_rows, np.int64)
        find_block = make_finder(self.directory, self._expected)
        find_group = make_finder(self.group, self._expected_group)
        for chain in chains:
            if not fleet.group_depths:
                match_chain(chain, find_block, hits)
                continue
            found = np.zeros(fleet.num_rows, np.int64)
            match_chain(chain, find_block, found)
            for depth in fleet.group_depths:
                cut_to_group(chain, find_group, depth, found, fleet.group_depth == depth)
            np.maximum(hits, found, out=hits)
        return hits

    def count_stored(self, chains: Sequence[Chain]) -> int:
        """Return how many leading tokens of a prompt the store is known to have the KV of."""
        if not len(self.stored):
            return 0
        hits = np.zeros(1, np.int64)
        for chain in chains:
            self.stored.match(chain, hits)
        return int(hits[0])

    def _place_held(
        self, source: InstanceRef, question: Question, usable: Mask
    ) -> "_Choice | NoRoute":
        fleet = self.fleet
        row = fleet.find(source.name)
        if row is None:
            return NoRoute()
        readers = np.flatnonzero(usable & (fleet.role == DECODE) & fleet.reads[:, row])
        if not len(readers):
            return NoRoute()
        hits = self.count_hits(question.chains)
        decode = self.policy.choose_decode(question, fleet, readers, hits)
        return _Choice(Pair(None, self._ref(decode)), None, readers, decode)

    def _count_readers(self, place: Place) -> IntColumn:
        """Return, for each row of the fleet, how many decode instances can read the blocks of its
        instance, without those that must be avoided.
        """
        fleet = self.fleet
        count = fleet.num_readers
        for ref in place.avoid:
            row = fleet.find(ref.name)
            is_counted = row is not None and fleet.refs[row] == ref and fleet.is_reader(row)
            if is_counted:
                count = count - fleet.reads[row]
        return count

    def _place_alone(
        self, place: Place, question: Question, usable: Mask, seen: "_Seen"
    ) -> "_Choice | NoRoute | None":
        """Choose one instance of any role to serve the whole request, because no pair of a prefill
        and a decode instance is usable.
        """
        resumed = self._find_resumed(place, usable)
        if resumed is not None:
            return self._make_alone(resumed, np.array([resumed]), is_makeshift=True)
        for number in range(len(ROLES)):
            rows = np.flatnonzero(usable & (self.fleet.role == number))
            if len(rows):
                row = self.policy.choose_prefill(question, self.fleet, rows, seen.hits, seen.parts)
                return self._make_alone(row, rows, is_makeshift=True)
        # A draining instance will serve again or be replaced, so as long as one exists, the request
        # waits instead of failing with NoRoute.
        is_any = bool(np.any(self.fleet.is_serving & ~self.fleet.is_draining))
        return NoRoute() if is_any else None

    def _find_resumed(self, place: Place, usable: Mask) -> int | None:
        """Return the row of the instance that last computed the prompt of a request that goes on
        elsewhere; None if that instance is not usable.

        Its cache may still have the blocks.
        """
        if not place.is_resumed or place.prefill is None:
            return None
        row = self.fleet.find(place.prefill.name)
        is_there = row is not None and usable[row] and self.fleet.refs[row] == place.prefill
        return row if is_there else None

    def _make_alone(self, row: int, rows: IntColumn, *, is_makeshift: bool = False) -> "_Choice":
        return _Choice(Alone(self._ref(row)), row, rows, row, is_makeshift)

    def _decide(self, question: Question, choice: "_Choice", seen: "_Seen") -> Decision:
        """Return the decision for the chosen instances, with those that were compared."""
        fleet, row, rows, decode = self.fleet, choice.row, choice.rows, choice.decode
        tpot_s = self._predict_tpot(question, choice)
        if row is None:
            return Decision(choice.route, tpot_s=tpot_s, decode=fleet.name_of(decode))
        parts = seen.parts
        total_s = parts.total_s.take(rows)
        if len(rows) > MAX_CANDIDATES:
            best = total_s.argpartition(MAX_CANDIDATES - 1)[:MAX_CANDIDATES]
            rows, total_s = rows[best], total_s[best]
        ranked: list[int] = rows[total_s.argsort()].tolist()
        named = [row, *(each for each in ranked if each != row)][:MAX_CANDIDATES]
        names = [fleet.name_of(each) for each in named]
        return Decision(
            choice.route, names, parts.select(np.array(named)), tpot_s, fleet.name_of(decode)
        )

    def _forecast(self, question: Question, choice: "_Choice", seen: "_Seen") -> Forecast:
        """Return the predicted times of a request, and of the requests that already decode on the
        instance chosen to decode it.
        """
        fleet, row, decode = self.fleet, choice.row, choice.decode
        tpot_s, name = self._predict_tpot(question, choice), fleet.name_of(choice.decode)
        if row is None:
            return Forecast(0.0, tpot_s, name)
        parts = seen.parts
        delays = predict_delays(fleet, row, decode, question.prompt_len, int(parts.prefix_len[row]))
        step_cost, _, _, decode_cost, kv_cost = fleet.costs[:, decode].tolist()
        is_idle, is_decode_idle = fleet.is_idle(row), fleet.is_idle(decode)
        # Before an instance has computed anything its costs are a guess, which margins must not
        # learn from.
        is_known = not is_idle or self._estimators[row].num_steps > 0
        is_decode_known = not is_decode_idle or self._estimators[decode].num_steps > 0
        return Forecast(
            float(parts.total_s[row]) if is_known else 0.0,
            tpot_s if is_decode_known else 0.0,
            name,
            fleet.name_of(row),
            delays,
            float(parts.transfer_s[row] + parts.prefill_s[row]),
            step_cost + decode_cost + kv_cost * question.prompt_len,
            is_idle,
            is_decode_idle,
        )

    def _predict_tpot(self, question: Question, choice: "_Choice") -> float:
        # What is queued where its prompt is computed is computed before its first token.
        return predict_row_tpot(
            self.fleet,
            choice.decode,
            question.prompt_len,
            question.max_tokens,
            has_queue=choice.row != choice.decode,
        )

    def _has_room(self, row: int, question: Question) -> bool:
        """Return True if a decode instance has room for a prompt's blocks beside those in use.

        The estimate is on the safe side: shared blocks count once for each request, and the longest
        request must be able to reach its full length, as the scheduler demands before it loads.
        """
        fleet = self.fleet
        size = int(fleet.block_size[row])
        needed = -(-question.prompt_len // size) + GROWTH_BLOCKS
        total = min(question.prompt_len + question.max_tokens, int(fleet.max_model_len[row]))
        largest = max(int(fleet.largest_blocks[row]), -(-total // size))
        return int(fleet.used_blocks[row]) + needed + largest <= int(fleet.num_blocks[row])

    def _ref(self, row: int) -> InstanceRef:
        ref = self.fleet.refs[row]
        assert ref is not None, f"row {row} is free"
        return ref
