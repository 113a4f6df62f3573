"""Admission: whether the times that a request was promised can be kept. Pure; time is an argument.

``early`` compares the predicted time to first token and the present time between tokens with the
request's objectives. Its answer on decoding is one prefill too old: while prompts are computed,
decode instances look idle, all come in, and then all are refused. ``predicted`` looks at the
decodes that there will be when the request's own first token comes: those whose first token is
predicted before that, without those that will have decoded for the mean time (Mooncake, arXiv
2407.00079v3, section 7).

An accepted request is a promise, so a prediction is multiplied by how far predictions have lately
been exceeded. What is scarce goes to whoever has had less than a fair share.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from tandem.conductor.fleet import DECODE, PREFILL, Fleet, FloatColumn
from tandem.conductor.policies.policy import Question

__all__ = ["Admission", "AdmissionMode", "Rejection"]

AdmissionMode = Literal["none", "early", "predicted"]

SOFT_LIMIT = 0.7
"""Largest predicted share of an objective for requests of low priority, and for clients that have
had more than their share."""
SHARE_MEMORY_S = 60.0
"""Half-life of the work counted for a client, in seconds."""
MAX_RETRY_S = 60
FIRST_DECODE_S = 10.0
DECODE_MEMORY = 0.95
"""Weight of the old mean when an ended request updates the mean decoding time."""
SAFE_SHARE = 0.98
"""The share of requests whose time to first token the margin is to cover."""
MARGIN_STEP = 0.1
MAX_MARGIN = 4.0
BUCKET_S = 0.1
NUM_BUCKETS = 4096
"""Buckets of a tenth of a second in the ring that counts begins of decodes, some seven minutes."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """The reason why a request is not accepted.

    Attributes:
        what: in words, with the figures.
        reason: ``ttft``, ``tpot`` or ``share``.
        retry_after_s: whole seconds after which it may be.
    """

    what: str
    reason: str
    retry_after_s: int


@dataclass(slots=True)
class _Accepted:
    """An accepted request that has not ended."""

    bucket: int
    predicted_s: float
    """Predicted time to first token, seconds."""
    accepted_s: float
    first_s: float | None = None


class _Shares:
    """The work that each client was given lately."""

    def __init__(self) -> None:
        self._work: dict[str, tuple[float, float, float]] = {}
        """For each client: its decayed work, the time of that value in seconds, and the client's
        weight."""

    def add(self, client: str, weight: float, work: float, now_s: float) -> None:
        """Count work of a client."""
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


class Admission:
    """Policy that accepts or rejects requests and learns from their outcomes.

    Args:
        mode: none accepts all.
    """

    def __init__(self, mode: AdmissionMode = "none") -> None:
        self.mode = mode
        self.margin = 1.0
        """Factor on predicted times to first token that covers ``SAFE_SHARE`` of them."""
        self.ttft_error = 0.0
        """Mean of |predicted - real| / real of the times to first token."""
        self.rejected: dict[str, int] = {}
        """Rejected requests since start, by reason."""
        self._shares = _Shares()
        self._live: OrderedDict[str, _Accepted] = OrderedDict()
        self._begun: npt.NDArray[np.int64] = np.zeros(NUM_BUCKETS, np.int64)
        """Ring of counts: decodes by the tenth of a second in which they begin."""
        self._newest = 0
        self._mean_decode_s = FIRST_DECODE_S

    def check(
        self, question: Question, fleet: Fleet, ttft_s: float, tpot_s: float, now_s: float
    ) -> Rejection | None:
        """Return the reason to reject a request, or None to accept it.

        Args:
            question: the request.
            fleet: borrowed.
            ttft_s: predicted for it.
            tpot_s: predicted where it will decode, if it began now.
            now_s: monotonic.
        """
        slo = question.slo
        if self.mode == "none" or (slo.ttft_s is None and slo.tpot_s is None):
            return None
        ttft_load = tpot_load = 0.0
        if slo.ttft_s is not None:
            ttft_load = ttft_s * self.margin / slo.ttft_s
        if slo.tpot_s is not None:
            if self.mode == "predicted":
                tpot_s = self._forecast_tpot(fleet, tpot_s, now_s + ttft_s)
            tpot_load = tpot_s / slo.tpot_s
        load = max(ttft_load, tpot_load)
        limit = 1.0
        if load > SOFT_LIMIT and question.priority >= 0:
            has_excess = self._shares.has_excess(question.client, question.weight, now_s)
            if question.priority > 0 or has_excess:
                limit = SOFT_LIMIT
        if load <= limit:
            return None
        return self._reject(question, ttft_s, tpot_s, ttft_load, tpot_load)

    def _reject(
        self,
        question: Question,
        ttft_s: float,
        tpot_s: float,
        ttft_load: float,
        tpot_load: float,
    ) -> Rejection:
        slo = question.slo
        if ttft_load >= tpot_load:
            assert slo.ttft_s is not None
            reason, wait_s = "ttft", ttft_s * self.margin - SOFT_LIMIT * slo.ttft_s
            what = f"the first token would take {ttft_s:.2f} s, the objective is {slo.ttft_s:.2f} s"
        else:
            assert slo.tpot_s is not None
            reason, wait_s = "tpot", self._mean_decode_s * (1 - 1 / max(tpot_load, 1.0))
            what = (
                f"a token would take {tpot_s * 1e3:.0f} ms, the objective is "
                f"{slo.tpot_s * 1e3:.0f} ms"
            )
        if max(ttft_load, tpot_load) <= 1.0:
            reason = "share"
            what += ", and its client has had its share"
        self.rejected[reason] = self.rejected.get(reason, 0) + 1
        retry_s = min(max(math.ceil(wait_s), 1), MAX_RETRY_S)
        return Rejection(f"{what}: try again in {retry_s} s", reason, retry_s)

    def note_accepted(self, question: Question, ttft_s: float, now_s: float) -> None:
        """Count an accepted request in the shares and in the forecast of decodes."""
        self._shares.add(
            question.client, question.weight, question.prompt_len + question.max_tokens, now_s
        )
        # Limit the start time: the ring of time buckets extends only half its length into the
        # future.
        begin_s = now_s + min(ttft_s, BUCKET_S * NUM_BUCKETS / 2)
        accepted = _Accepted(self._find_bucket(begin_s), ttft_s, now_s)
        self._live[question.request_id] = accepted
        self._count(accepted.bucket, 1, now_s)

    def note_first_token(self, request_id: str, now_s: float) -> None:
        """Update the forecast and the margin of predictions with the real time to first token."""
        accepted = self._live.get(request_id)
        if accepted is None or accepted.first_s is not None:
            return
        accepted.first_s = now_s
        self._count(accepted.bucket, -1, now_s)
        accepted.bucket = self._find_bucket(now_s)
        self._count(accepted.bucket, 1, now_s)
        real_s = now_s - accepted.accepted_s
        if real_s <= 0 or accepted.predicted_s <= 0:
            return
        error = abs(accepted.predicted_s - real_s) / real_s
        self.ttft_error += (error - self.ttft_error) * (1 - DECODE_MEMORY)
        # Adapt the margin so that it follows the quantile: raise it if the request took longer than
        # predicted, else lower it a little.
        is_over = real_s > accepted.predicted_s * self.margin
        step = SAFE_SHARE if is_over else SAFE_SHARE - 1.0
        self.margin = min(max(self.margin * math.exp(MARGIN_STEP * step), 1.0), MAX_MARGIN)

    def note_end(self, request_id: str, now_s: float) -> None:
        """Remove an ended request from the forecast of decodes."""
        accepted = self._live.pop(request_id, None)
        if accepted is None:
            return
        self._count(accepted.bucket, -1, now_s)
        if accepted.first_s is not None:
            decode_s = now_s - accepted.first_s
            self._mean_decode_s += (decode_s - self._mean_decode_s) * (1 - DECODE_MEMORY)

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
        """Move the ring forward, so that it reaches half its length into past and future."""
        if newest - self._newest >= NUM_BUCKETS:
            self._begun[:] = 0
        else:
            for bucket in range(self._newest + 1, newest + 1):
                self._begun[bucket % NUM_BUCKETS] = 0
        self._newest = max(newest, self._newest)

    def count_decodes(self, at_s: float) -> int:
        """Return how many accepted requests will decode at a moment, each for the mean time."""
        last = min(self._find_bucket(at_s), self._newest)
        first = last - min(int(self._mean_decode_s / BUCKET_S), NUM_BUCKETS // 2)
        oldest = max(first + 1, self._newest - NUM_BUCKETS + 1)
        if oldest > last:
            return 0
        buckets = np.arange(oldest, last + 1) % NUM_BUCKETS
        return int(np.sum(self._begun[buckets]))

    def _forecast_tpot(self, fleet: Fleet, tpot_s: float, at_s: float) -> float:
        """Predict the mean time between tokens of the decodes that will run at a moment."""
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
        ratio = (self.count_decodes(at_s) + 1) * per_own / present
        decodes = fleet.num_decoding[rows] * ratio
        tokens = fleet.decode_tokens[rows] * ratio
        costs = fleet.costs[:, rows]
        expected_s: FloatColumn = costs[0] + costs[3] * decodes + costs[4] * tokens
        return float(expected_s.mean())
