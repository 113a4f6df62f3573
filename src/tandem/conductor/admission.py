"""Admission: it rejects requests whose latency objectives are predicted to be missed. Pure.

Mode ``early`` compares the predicted time to first token, and the present time between tokens, with
the request's objectives. This mode sees the load of decoding as it is before the request's own
prefill: while prompts are computed, decode instances look idle, so that too many requests are
accepted, and then all are rejected. Mode ``predicted`` uses the number of decodes at the time of
the request's own first token: those whose first token is predicted before that, minus those that
will have decoded for the mean decoding time (Mooncake, arXiv 2407.00079v3, section 7).

An accepted request is a promise, so predictions are multiplied by a margin, by which real times
have lately exceeded them. A request is also rejected if requests accepted before it would miss
their time between tokens. Under scarcity, clients that have had less than their fair share come
first. Time is an argument.
"""

import math
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from tandem.conductor.fleet import DECODE, PREFILL, Fleet, FloatColumn
from tandem.conductor.margin import Margin
from tandem.conductor.policies.policy import Question
from tandem.core.wire import Slo

__all__ = ["Admission", "AdmissionMode", "Rejection"]

AdmissionMode = Literal["none", "early", "predicted"]

SOFT_LIMIT = 0.7
"""Largest predicted share of an objective for requests of low priority, and for clients that have
had more than their share."""
SHARE_MEMORY_S = 60.0
"""Half-life of the work counted for a client, in seconds."""
MAX_RETRY_S = 60
SAFE_TPOT = 0.9
"""Share of its objective up to which a time between tokens is harmless, even if it is many times
the predicted one, as it can be when prompts are computed between the tokens."""
FIRST_DECODE_S = 10.0
DECODE_MEMORY = 0.95
"""Weight of the old mean when an ended request updates the mean decoding time."""
BUCKET_S = 0.1
NUM_BUCKETS = 4096
"""Number of tenths of a second in the ring that counts starts of decodes, about seven minutes."""


class Forecast(NamedTuple):
    """The predicted times of a request that is not accepted yet."""

    ttft_s: float
    """Predicted time to first token, seconds."""
    tpot_s: float
    """Predicted time between its tokens, seconds."""
    decode: str = ""
    """Name of the instance that is to decode it."""
    crowd_tpot_s: float = 0.0
    """Predicted time between tokens of the requests that already decode on the instance ``decode``,
    seconds, including the computation of this request's prompt if it is done there."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """The reason why a request is rejected.

    Attributes:
        what: the reason in words, with figures.
        reason: ``ttft``, ``tpot`` or ``share``.
        retry_after_s: whole seconds after which it may be accepted.
    """

    what: str
    reason: str
    retry_after_s: int


@dataclass(slots=True)
class _Accepted:
    """The memory of an accepted request that has not ended: its predicted times and
    objectives.
    """

    bucket: int
    ttft_s: float
    """Predicted time to first token, seconds."""
    tpot_s: float
    """Predicted time between tokens, seconds."""
    decode: str
    """Name of the instance that is to decode it."""
    accepted_s: float
    slo: Slo
    first_s: float | None = None


class _Shares:
    """The recent work done for each client, in sums that decay with time."""

    def __init__(self) -> None:
        self._work: dict[str, tuple[float, float, float]] = {}
        """For each client: its decayed work, the time of that value in seconds, and the client's
        weight."""

    def add(self, client: str, weight: float, work: float, now_s: float) -> None:
        """Add work done for a client (tokens of its requests) to its recent work."""
        self._work[client] = (self._read(client, now_s) + work, now_s, weight)

    def has_excess(self, client: str, weight: float, now_s: float) -> bool:
        """Return True if a client has had more than its fair share of all clients' recent work."""
        parts = {name: self._read(name, now_s) for name in self._work}
        for name in [name for name, work in parts.items() if work < 1.0]:
            del self._work[name], parts[name]
        total = sum(parts.values())
        weights = sum(self._work[name][2] for name in parts if name != client) + weight
        return parts.get(client, 0.0) > total * weight / weights

    def _read(self, client: str, now_s: float) -> float:
        work, at_s, _ = self._work.get(client, (0.0, now_s, 1.0))
        return work * 0.5 ** ((now_s - at_s) / SHARE_MEMORY_S)


class _Promises:
    """The objectives for the time between tokens of all accepted requests, by decode instance."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[float]] = {}
        """For each instance: the number of its decoding requests by their objective for the time
        between tokens, in seconds.
        """

    def add(self, instance: str, slo: Slo) -> None:
        """Count the time-between-tokens objective of an accepted request at the instance that is to
        decode it.
        """
        if slo.tpot_s is not None:
            self._counts.setdefault(instance, Counter())[slo.tpot_s] += 1

    def remove(self, instance: str, slo: Slo) -> None:
        """Stop counting the objective of a request that ``add`` counted at an instance."""
        if slo.tpot_s is not None:
            counts = self._counts[instance]
            counts[slo.tpot_s] -= 1
            if not counts[slo.tpot_s]:
                del counts[slo.tpot_s]
            if not counts:
                del self._counts[instance]

    def find_strictest(self, instance: str) -> float:
        """Return the strictest time between tokens that a request on an instance was promised, in
        seconds; infinite if there is none.
        """
        return min(self._counts.get(instance, ()), default=math.inf)


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
        self._promises = _Promises()
        self._live: OrderedDict[str, _Accepted] = OrderedDict()
        self._begun: npt.NDArray[np.int64] = np.zeros(NUM_BUCKETS, np.int64)
        """Ring of counts: number of decodes that begin in each tenth of a second."""
        self._newest = 0
        self._mean_decode_s = FIRST_DECODE_S
        self._mean_tokens = 1.0

    def foresee(self, fleet: Fleet, forecast: Forecast, now_s: float) -> Forecast:
        """Return a forecast (predicted times of a request) with the time between tokens that the
        admission mode considers.

        Args:
            fleet: state of the instances; not modified.
            forecast: predicted times if the request began to decode now.
            now_s: monotonic seconds.
        """
        if self.mode != "predicted":
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
        if self.mode == "none" or (slo.ttft_s is None and slo.tpot_s is None):
            return None
        ttft_load = tpot_load = 0.0
        if slo.ttft_s is not None:
            ttft_load = forecast.ttft_s * self.ttft.get_factor(now_s) / slo.ttft_s
        tpot_factor = self.tpot.get_factor(now_s)
        tpot_s, limit_s, whose = forecast.tpot_s, slo.tpot_s, ""
        if limit_s is not None:
            tpot_load = tpot_s * tpot_factor / limit_s
        promised_s = self._promises.find_strictest(forecast.decode)
        crowd_load = forecast.crowd_tpot_s * tpot_factor / promised_s
        if crowd_load > tpot_load:
            tpot_load = crowd_load
            tpot_s, limit_s, whose = forecast.crowd_tpot_s, promised_s, " of those accepted before"
        load = max(ttft_load, tpot_load)
        limit = 1.0
        if load > SOFT_LIMIT and question.priority >= 0:
            has_excess = self._shares.has_excess(question.client, question.weight, now_s)
            if question.priority > 0 or has_excess:
                limit = SOFT_LIMIT
        if load <= limit:
            return None
        if ttft_load >= tpot_load:
            assert slo.ttft_s is not None
            reason, wait_s = "ttft", (ttft_load - SOFT_LIMIT) * slo.ttft_s
            what = f"the first token would take {forecast.ttft_s:.2f} s, the objective is "
            what += f"{slo.ttft_s:.2f} s"
        else:
            assert limit_s is not None
            reason, wait_s = "tpot", self._mean_decode_s * (1 - 1 / max(tpot_load, 1.0))
            what = f"a token{whose} would take {tpot_s * 1e3:.0f} ms, the objective is "
            what += f"{limit_s * 1e3:.0f} ms"
        if load <= 1.0:
            reason = "share"
            what += ", and its client has had its share"
        self.rejected[reason] = self.rejected.get(reason, 0) + 1
        retry_s = min(max(math.ceil(wait_s), 1), MAX_RETRY_S)
        return Rejection(f"{what}: try again in {retry_s} s", reason, retry_s)

    def note_accepted(self, question: Question, forecast: Forecast, now_s: float) -> None:
        """Add an accepted request to its client's recent work, and remember its predicted times."""
        self._shares.add(
            question.client, question.weight, question.prompt_len + question.max_tokens, now_s
        )
        # Limit the start time: the ring of time buckets extends only half its length into the
        # future.
        begin_s = now_s + min(forecast.ttft_s, BUCKET_S * NUM_BUCKETS / 2)
        accepted = _Accepted(
            self._find_bucket(begin_s),
            forecast.ttft_s,
            forecast.tpot_s,
            forecast.decode,
            now_s,
            question.slo,
        )
        self._live[question.request_id] = accepted
        self._promises.add(forecast.decode, question.slo)
        self._count(accepted.bucket, 1, now_s)

    def note_moved(self, request_id: str, decode: str) -> None:
        """Record that an accepted request is decoded by another instance than was planned."""
        accepted = self._live.get(request_id)
        if accepted is not None and decode != accepted.decode:
            self._promises.remove(accepted.decode, accepted.slo)
            self._promises.add(decode, accepted.slo)
            accepted.decode = decode

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
        self.ttft.note(accepted.ttft_s, now_s - accepted.accepted_s, now_s)

    def note_end(self, request_id: str, num_tokens: int, now_s: float) -> None:
        """Remove an ended request from the forecast of running decodes, and learn from its time
        between tokens.

        Args:
            request_id: id of a request, accepted or not.
            num_tokens: number of tokens that its client got.
            now_s: monotonic seconds.
        """
        accepted = self._live.pop(request_id, None)
        if accepted is None:
            return
        self._count(accepted.bucket, -1, now_s)
        self._promises.remove(accepted.decode, accepted.slo)
        if accepted.first_s is not None:
            decode_s = now_s - accepted.first_s
            self._mean_decode_s += (decode_s - self._mean_decode_s) * (1 - DECODE_MEMORY)
            objective_s = accepted.slo.tpot_s
            if num_tokens > 1 and objective_s is not None:
                # A short answer counts less: one long gap, as at a hand-over to another instance,
                # is a large part of its mean, and no margin on the duration of steps covers that.
                self.tpot.note(
                    accepted.tpot_s,
                    decode_s / (num_tokens - 1),
                    now_s,
                    safe_s=SAFE_TPOT * objective_s,
                    weight=min(num_tokens / self._mean_tokens, 1.0),
                )
            change = num_tokens - self._mean_tokens
            self._mean_tokens = max(self._mean_tokens + change * (1 - DECODE_MEMORY), 1.0)

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
