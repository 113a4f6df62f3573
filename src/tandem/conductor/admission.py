"""Admission: it rejects requests whose latency objectives are predicted to be missed. Pure.

Mode ``early`` compares the predicted time to first token, and the present time between tokens, with
the request's objectives. This mode sees the load of decoding as it is before the request's own
prefill: while prompts are computed, decode instances look idle, so that too many requests are
accepted, and then all are rejected. Mode ``predicted`` uses the number of decodes at the time of
the request's own first token: those whose first token is predicted before that, minus those that
will have decoded for the mean decoding time (Mooncake, arXiv 2407.00079v3, section 7).

An accepted request is a promise, also against prompts that come later. An instance computes its
prompts in the order of arrival, so a later one does not delay the first tokens of those before it,
except by filling up the step in which they end; but all of it is computed between the tokens of
their answers. So each accepted request is charged with the prompts that its instance was sent
after it, and a new one is rejected if its prompt would break a promise to one of them. Predictions
are multiplied by a margin, by which real times have lately exceeded them. Under scarcity, clients
that have had less than their fair share come first. Time is an argument.

An instance with nothing to do takes a request whatever is predicted. Costs are learned from what it
computes, so one that refused everybody by costs that are wrong would refuse them for ever.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from tandem.conductor.answer_lengths import AnswerLengths
from tandem.conductor.crowds import Crowds
from tandem.conductor.fleet import DECODE, PREFILL, Fleet, FloatColumn
from tandem.conductor.margin import Margin
from tandem.conductor.policies.policy import Question
from tandem.conductor.prediction import Delays
from tandem.core.wire import Slo

__all__ = ["Admission", "AdmissionMode", "Rejection"]

AdmissionMode = Literal["none", "early", "predicted"]

SOFT_LIMIT = 0.7
"""Largest predicted share of an objective for requests of low priority, and for clients that have
had more than their share; of what the objective leaves beyond the time on an idle instance."""
SHARE_MEMORY_S = 60.0
"""Half-life of the work counted for a client, in seconds."""
MAX_RETRY_S = 60
SAFE_TPOT = 0.9
"""Share of its objective up to which a time between tokens is harmless, even if it is many times
the predicted one, as it can be when prompts are computed between the tokens."""
SAFE_TTFT = 0.5
"""Share of its objective up to which a predicted and a real time to first token say nothing about
the margin: the error of a short time is small, however many times the predicted time it is."""
FIRST_DECODE_S = 10.0
DECODE_MEMORY = 0.95
"""Weight of the old mean when an ended request updates the mean decoding time."""
BUCKET_S = 0.1
NUM_BUCKETS = 4096
"""Number of tenths of a second in the ring that counts starts of decodes, about seven minutes."""


class Forecast(NamedTuple):
    """The predicted times of a request that is not accepted yet."""

    ttft_s: float
    """Predicted time to first token, seconds; 0: unknown, as the instance is idle and has computed
    nothing yet."""
    tpot_s: float
    """Predicted time between its tokens, seconds; 0: unknown."""
    decode: str = ""
    """Name of the instance that is to decode it."""
    prefill: str = ""
    """Name of the instance that is to compute its prompt; empty if the prompt is computed."""
    delays: Delays = Delays()
    """Times on those two instances by which requests delay each other."""
    idle_ttft_s: float = 0.0
    """Predicted time to first token if no other prompt were queued, seconds."""
    idle_tpot_s: float = 0.0
    """Predicted time between its tokens if nothing else were decoded, seconds."""
    is_prefill_idle: bool = False
    """True if the instance that is to compute its prompt has no other request."""
    is_decode_idle: bool = False
    """True if the instance that is to decode it has no other request."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """The reason why a request is rejected.

    Attributes:
        what: the reason in words, with figures.
        reason: ``ttft``, ``tpot`` or ``share``.
        retry_after_s: whole seconds after which it may be accepted.
        crowded: instance where it would break a promise to a request accepted before, so that
            another one may take it; empty if its own objectives are the reason.
    """

    what: str
    reason: str
    retry_after_s: int
    crowded: str = ""


@dataclass(slots=True)
class _Accepted:
    """The memory of an accepted request that has not ended: its predicted times and
    objectives.
    """

    bucket: int
    tpot_s: float
    """Predicted time between tokens, seconds."""
    decode: str
    """Name of the instance that is to decode it."""
    prefill: str
    """Name of the instance that computes its prompt."""
    accepted_s: float
    question: Question
    prompt_s: float
    """Time that its prompt takes, seconds."""
    full_s: float
    """Longest time by which later prompts delay its first token: a full step of them, seconds."""
    first_s: float | None = None
    is_moved: bool = False
    """True if another instance took over after its first token."""


class _Shares:
    """The recent work done for each client, in sums that decay with time."""

    def __init__(self) -> None:
        self._work: OrderedDict[str, tuple[float, float, float]] = OrderedDict()
        """For each client: its decayed work, the time of that value in seconds, and the client's
        weight. Those with the newest times come last."""

    def __len__(self) -> int:
        return len(self._work)

    def add(self, client: str, weight: float, work: float, now_s: float) -> None:
        """Add work done for a client (tokens of its requests) to its recent work."""
        self._work[client] = (max(self._read(client, now_s) + work, 0.0), now_s, weight)
        self._work.move_to_end(client)
        # Forget clients that have had nothing lately, or as many would be kept as ever asked.
        while self._read(oldest := next(iter(self._work)), now_s) < 1.0:
            del self._work[oldest]
            if not self._work:
                break

    def correct(self, client: str, work: float, added_s: float, now_s: float) -> None:
        """Take back work that was added at time ``added_s`` and was not done."""
        if client in self._work:
            _, _, weight = self._work[client]
            self.add(client, weight, -work * _decay(now_s - added_s), now_s)

    def has_excess(self, client: str, weight: float, now_s: float) -> bool:
        """Return True if a client has had more than its fair share of all clients' recent work."""
        parts = {name: self._read(name, now_s) for name in self._work}
        own = parts.pop(client, 0.0)
        others = {name: part for name, part in parts.items() if part >= 1.0}
        # A client alone has no excess, whatever the rounding.
        weights = sum(self._work[name][2] for name in others)
        return bool(others) and own * weights > sum(others.values()) * weight

    def _read(self, client: str, now_s: float) -> float:
        work, at_s, _ = self._work.get(client, (0.0, now_s, 1.0))
        return work * _decay(now_s - at_s)


def _decay(elapsed_s: float) -> float:
    """Return the share of a client's work that still counts after some seconds."""
    return 0.5 ** (max(elapsed_s, 0.0) / SHARE_MEMORY_S)


def _soften(idle_load: float) -> float:
    """Return the largest load (predicted time as a share of the objective) for requests of low
    priority, and for clients that have had their share, where an idle instance gives
    ``idle_load``. What a request takes by itself does not count, or it would never be accepted.
    """
    return SOFT_LIMIT + (1.0 - SOFT_LIMIT) * min(idle_load, 1.0)


class Admission:
    """The policy that accepts or rejects requests by their predicted times, and learns from their
    real times.

    Args:
        mode: ``none`` (accept all), ``early`` or ``predicted``.
    """

    def __init__(self, mode: AdmissionMode = "none") -> None:
        self.mode = mode
        self.ttft = Margin()
        """Margin (factor between predicted and real times that covers most requests) on predicted
        times to first token.
        """
        self.tpot = Margin()
        """Margin (factor between predicted and real times that covers most requests) on predicted
        times between tokens.
        """
        self.rejected: dict[str, int] = {}
        """Rejected requests since start, by reason."""
        self._shares = _Shares()
        self._crowds = Crowds()
        self._live: OrderedDict[str, _Accepted] = OrderedDict()
        self._begun: npt.NDArray[np.int64] = np.zeros(NUM_BUCKETS, np.int64)
        """Ring of counts: number of decodes that begin in each tenth of a second."""
        self._newest = 0
        self._mean_decode_s = FIRST_DECODE_S
        self._mean_tokens = 1.0
        self._lengths = AnswerLengths()

    def judges(self, slo: Slo) -> bool:
        """Return True if requests with these objectives may be rejected."""
        return self.mode != "none" and (slo.ttft_s is not None or slo.tpot_s is not None)

    def foresee(self, fleet: Fleet, forecast: Forecast, now_s: float) -> Forecast:
        """Return a forecast (predicted times of a request) with the time between tokens that the
        admission mode considers.

        Args:
            fleet: state of the instances; not modified.
            forecast: predicted times if the request began to decode now.
            now_s: monotonic seconds.
        """
        if self.mode != "predicted" or not forecast.tpot_s:
            return forecast
        begin_s = now_s + forecast.ttft_s
        return forecast._replace(tpot_s=self._forecast_tpot(fleet, forecast.tpot_s, begin_s, now_s))

    def check(self, question: Question, forecast: Forecast, now_s: float) -> Rejection | None:
        """Return the reason to reject a request, or None to accept it.

        Args:
            question: the request.
            forecast: its predicted times, from ``foresee``.
            now_s: monotonic seconds.
        """
        slo = question.slo
        if not self.judges(slo):
            return None
        ttft_factor, tpot_factor = self.ttft.get_factor(now_s), self.tpot.get_factor(now_s)
        delays = forecast.delays
        ttft_load = tpot_load = idle_ttft_load = idle_tpot_load = 0.0
        ttft_s, ttft_limit_s = forecast.ttft_s, slo.ttft_s
        tpot_s, tpot_limit_s = forecast.tpot_s, slo.tpot_s
        if ttft_limit_s is not None and not forecast.is_prefill_idle:
            if delays.queue_s > delays.full_s and ttft_s:
                # Later prompts may fill up its last step. One that begins at once is spared them
                # instead, as they would wait for it in any case.
                ttft_s += delays.full_s
            ttft_load = ttft_s * ttft_factor / ttft_limit_s
            idle_ttft_load = forecast.idle_ttft_s * ttft_factor / ttft_limit_s
        if tpot_limit_s is not None and question.max_tokens > 1 and not forecast.is_decode_idle:
            tpot_load = tpot_s * tpot_factor / tpot_limit_s
            idle_tpot_load = forecast.idle_tpot_s * tpot_factor / tpot_limit_s
        own_ttft_load, own_tpot_load = ttft_load, tpot_load
        first = self._crowds.find_ttft(forecast.prefill, delays.prompt_s, ttft_factor, now_s)
        if first.load > max(ttft_load, 1.0):
            ttft_load, ttft_s, ttft_limit_s = first
        if forecast.prefill != forecast.decode:
            delays = Delays(step_s=delays.step_s)  # No prompt is computed where it is decoded.
        between = self._crowds.find_tpot(forecast.decode, delays, tpot_factor, self._lengths, now_s)
        if between.load > tpot_load:
            tpot_load, tpot_s, tpot_limit_s = between
        ttft_bound = tpot_bound = 1.0
        if max(ttft_load, tpot_load) > SOFT_LIMIT and question.priority >= 0:
            has_excess = self._shares.has_excess(question.client, question.weight, now_s)
            if question.priority > 0 or has_excess:
                ttft_bound, tpot_bound = _soften(idle_ttft_load), _soften(idle_tpot_load)
        if ttft_load <= ttft_bound and tpot_load <= tpot_bound:
            return None
        is_ttft = ttft_load / ttft_bound >= tpot_load / tpot_bound
        crowded, whose = "", ""
        if own_ttft_load <= ttft_bound and own_tpot_load <= tpot_bound:
            crowded = forecast.prefill if is_ttft else forecast.decode
            whose = " of one accepted before"
        if is_ttft:
            assert ttft_limit_s is not None
            reason, wait_s = "ttft", (ttft_load - SOFT_LIMIT) * ttft_limit_s
            what = f"the first token{whose} would take {ttft_s:.2f} s, the objective is "
            what += f"{ttft_limit_s:.2f} s"
        else:
            assert tpot_limit_s is not None
            reason, wait_s = "tpot", self._mean_decode_s * (1 - 1 / max(tpot_load, 1.0))
            what = f"a token{whose} would take {tpot_s * 1e3:.0f} ms, the objective is "
            what += f"{tpot_limit_s * 1e3:.0f} ms"
        if max(ttft_load, tpot_load) <= 1.0:
            reason = "share"
            what += ", and its client has had its share"
        retry_s = max(math.ceil(min(wait_s, MAX_RETRY_S)), 1)
        return Rejection(f"{what}: try again in {retry_s} s", reason, retry_s, crowded)

    def note_rejected(self, rejection: Rejection) -> None:
        """Count a rejected request."""
        self.rejected[rejection.reason] = self.rejected.get(rejection.reason, 0) + 1

    def note_accepted(self, question: Question, forecast: Forecast, now_s: float) -> None:
        """Add an accepted request to its client's recent work, and remember its predicted times."""
        request_id = question.request_id
        if request_id in self._live:
            self._release(request_id, now_s)
        self._shares.add(
            question.client, question.weight, question.prompt_len + question.max_tokens, now_s
        )
        # Limit the start time: the ring of time buckets extends only half its length into the
        # future.
        begin_s = now_s + min(forecast.ttft_s, BUCKET_S * NUM_BUCKETS / 2)
        accepted = _Accepted(
            self._find_bucket(begin_s),
            forecast.tpot_s,
            forecast.decode,
            forecast.prefill,
            now_s,
            question,
            forecast.delays.prompt_s,
            forecast.delays.full_s,
        )
        self._live[request_id] = accepted
        self._count(accepted.bucket, 1, now_s)
        self._send(request_id, accepted, forecast.ttft_s)

    def _send(self, request_id: str, accepted: _Accepted, ttft_s: float) -> None:
        """Charge the prompt of a request to those before it, and add the request to those that
        later ones are charged to.
        """
        work_s = self._crowds.charge(accepted.prefill, accepted.prompt_s)
        if accepted.first_s is None:
            self._crowds.wait(
                request_id,
                accepted.prefill,
                work_s,
                accepted.question.slo.ttft_s,
                ttft_s,
                accepted.full_s,
                accepted.accepted_s,
            )
        self._promise(request_id, accepted, work_s)
        self._crowds.prune(accepted.prefill)

    def _promise(self, request_id: str, accepted: _Accepted, work_s: float) -> None:
        question = accepted.question
        if question.slo.tpot_s is not None and question.max_tokens > 1:
            is_alone = accepted.prefill == accepted.decode
            self._crowds.promise(
                request_id,
                accepted.decode,
                work_s if is_alone else math.inf,
                question.slo.tpot_s,
                question.max_tokens,
                accepted.first_s,
                self._lengths.find_place(question.client),
            )

    def _unsend(self, request_id: str, accepted: _Accepted, now_s: float) -> None:
        """Remove a request from its instances, and take back the charges for that part of its
        prompt which has not been computed.
        """
        crowds, prefill = self._crowds, accepted.prefill
        left_s, work_s = 0.0, crowds.find_work(request_id, prefill)
        if accepted.first_s is None and work_s is not None:
            # Instances do not tell how much of a prompt they have computed: assume that it began
            # when it was to begin.
            ttft_s = crowds.get_ttft_s(request_id, prefill)
            done_s = now_s - (accepted.accepted_s + ttft_s - accepted.prompt_s)
            left_s = accepted.prompt_s - min(max(done_s, 0.0), accepted.prompt_s)
        crowds.remove(request_id, prefill, accepted.decode)
        if left_s and work_s is not None:
            crowds.uncharge(prefill, left_s, work_s)

    def is_live(self, request_id: str) -> bool:
        """Return True if a request was accepted and has not ended."""
        return request_id in self._live

    def note_moved(self, request_id: str, forecast: Forecast, now_s: float) -> None:
        """Record that an accepted request goes on at other instances than before.

        Args:
            request_id: id of a request, accepted or not.
            forecast: the instances and predicted times. Without a name of an instance that computes
                its prompt, only that which decodes it has changed.
            now_s: monotonic seconds.
        """
        accepted = self._live.get(request_id)
        if accepted is None:
            return
        if not forecast.prefill:
            if forecast.decode != accepted.decode:
                work_s = self._crowds.find_work(request_id, accepted.prefill)
                self._crowds.drop_promise(request_id, accepted.decode)
                accepted.decode = forecast.decode
                self._promise(request_id, accepted, math.inf if work_s is None else work_s)
            return
        self._unsend(request_id, accepted, now_s)
        accepted.prefill, accepted.decode = forecast.prefill, forecast.decode
        accepted.prompt_s, accepted.full_s = forecast.delays.prompt_s, forecast.delays.full_s
        accepted.is_moved = accepted.first_s is not None
        self._send(request_id, accepted, now_s - accepted.accepted_s + forecast.ttft_s)

    def note_first_token(self, request_id: str, now_s: float) -> None:
        """Learn from a request's real time to first token: update the forecast of running decodes
        and the margin on predicted times.
        """
        accepted = self._live.get(request_id)
        if accepted is None or accepted.first_s is not None:
            return
        accepted.first_s = now_s
        self._count(accepted.bucket, -1, now_s)
        accepted.bucket = self._find_bucket(now_s)
        self._count(accepted.bucket, 1, now_s)
        crowds, prefill = self._crowds, accepted.prefill
        ttft_s = crowds.get_ttft_s(request_id, prefill)
        later_s = crowds.get_later_s(request_id, prefill, prefill)
        predicted_s = ttft_s + min(later_s, accepted.full_s) if ttft_s else 0.0
        real_s = now_s - accepted.accepted_s
        objective_s = accepted.question.slo.ttft_s
        is_long = objective_s is not None and max(predicted_s, real_s) > SAFE_TTFT * objective_s
        self.ttft.note(predicted_s, real_s, now_s, weight=1.0 if is_long else 0.0)
        crowds.begin(request_id, prefill, accepted.decode, now_s)

    def note_end(
        self, request_id: str, num_tokens: int, now_s: float, *, is_whole: bool = True
    ) -> None:
        """Remove an ended request from the forecast of running decodes, and learn from its time
        between tokens.

        Args:
            request_id: id of a request, accepted or not.
            num_tokens: number of tokens that its client got.
            now_s: monotonic seconds.
            is_whole: False if the answer would have gone on: it was cancelled, or has failed.
        """
        accepted = self._live.get(request_id)
        if accepted is None:
            return
        question = accepted.question
        later_s = self._crowds.get_later_s(request_id, accepted.prefill, accepted.decode)
        self._release(request_id, now_s)
        self._shares.correct(
            question.client, question.max_tokens - num_tokens, accepted.accepted_s, now_s
        )
        if accepted.first_s is None:
            return
        decode_s = now_s - accepted.first_s
        self._mean_decode_s += (decode_s - self._mean_decode_s) * (1 - DECODE_MEMORY)
        objective_s = question.slo.tpot_s
        if num_tokens > 1 and objective_s is not None and not accepted.is_moved:
            # A short answer counts less: one long gap, as at a hand-over to another instance, is a
            # large part of its mean, and no margin on the duration of steps covers that.
            num_gaps = num_tokens - 1
            if is_whole:
                self._lengths.note_promise(is_kept=decode_s <= objective_s * num_gaps)
            self.tpot.note(
                accepted.tpot_s + later_s / num_gaps if accepted.tpot_s else 0.0,
                decode_s / num_gaps,
                now_s,
                safe_s=SAFE_TPOT * objective_s,
                weight=min(num_tokens / self._mean_tokens, 1.0),
            )
        if is_whole:
            change = num_tokens - self._mean_tokens
            self._mean_tokens = max(self._mean_tokens + change * (1 - DECODE_MEMORY), 1.0)
        if self.mode != "none":  # Else nothing is promised, so nobody asks for lengths.
            is_natural = is_whole and num_tokens < question.max_tokens
            self._lengths.note_end(question.client, num_tokens, is_natural=is_natural)

    def _release(self, request_id: str, now_s: float) -> None:
        """Forget an accepted request, and the charges for what is not computed of its prompt."""
        accepted = self._live.pop(request_id)
        self._count(accepted.bucket, -1, now_s)
        self._unsend(request_id, accepted, now_s)

    # ---------------------------------------------------------------- the forecast

    def _find_bucket(self, at_s: float) -> int:
        return int(at_s / BUCKET_S)

    def _count(self, bucket: int, change: int, now_s: float) -> None:
        self._advance(self._find_bucket(now_s) + NUM_BUCKETS // 2 + 1)
        # Skip a request older than the ring of buckets: its decode lies before the time that the
        # forecast covers.
        if bucket > self._newest - NUM_BUCKETS:
            self._begun[bucket % NUM_BUCKETS] += change

    def _advance(self, newest: int) -> None:
        """Move the ring of time buckets, which count the decodes that begin in each, forward to the
        bucket ``newest``; those that leave it are forgotten.
        """
        if newest - self._newest >= NUM_BUCKETS:
            self._begun[:] = 0
        else:
            for bucket in range(self._newest + 1, newest + 1):
                self._begun[bucket % NUM_BUCKETS] = 0
        self._newest = max(newest, self._newest)

    def count_decodes(self, at_s: float, now_s: float) -> float:
        """Return how many accepted requests will decode at time ``at_s``, if each decodes for the
        mean time.

        Requests that have decoded for longer already, as is common if answers differ in length,
        count with a share that falls with time.
        """
        expected = self._count_begun(at_s, at_s)
        num_overdue = len(self._live) - self._count_begun(now_s, math.inf)
        return expected + num_overdue * math.exp(
            (now_s - at_s) / max(self._mean_decode_s, BUCKET_S)
        )

    def _count_begun(self, at_s: float, end_s: float) -> int:
        """Return how many decodes begin before ``end_s`` and not earlier than one mean decoding
        time before ``at_s``.
        """
        at = self._find_bucket(at_s)
        first = at - min(int(self._mean_decode_s / BUCKET_S), NUM_BUCKETS // 2)
        oldest = max(first + 1, self._newest - NUM_BUCKETS + 1)
        last = self._newest if math.isinf(end_s) else min(self._find_bucket(end_s), self._newest)
        if oldest > last:
            return 0
        buckets = np.arange(oldest, last + 1) % NUM_BUCKETS
        return int(np.sum(self._begun[buckets]))

    def _forecast_tpot(self, fleet: Fleet, tpot_s: float, at_s: float, now_s: float) -> float:
        """Predict the mean time between tokens at time ``at_s``, from the forecast of how many
        requests will decode then.
        """
        rows = fleet.is_serving & (fleet.role == DECODE)
        if not rows.any():
            rows = fleet.is_serving & (fleet.role != PREFILL)
        count = int(np.sum(rows))
        present = float(fleet.num_decoding[rows].sum())
        if not count or present <= 0:
            return tpot_s
        # The instances also report requests that other servers sent, and prompts that still wait.
        # Scale our own forecast of decodes by the ratio of all requests to ours, and assume that
        # context lengths stay as they are.
        per_own = max(present / max(len(self._live), 1), 1.0)
        ratio = (self.count_decodes(at_s, now_s) + 1) * per_own / present
        decodes = fleet.num_decoding[rows] * ratio
        tokens = fleet.decode_tokens[rows] * ratio
        costs = fleet.costs[:, rows]
        expected_s: FloatColumn = costs[0] + costs[3] * decodes + costs[4] * tokens
        return float(expected_s.mean())
