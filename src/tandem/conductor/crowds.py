"""The accepted requests of each instance that have not ended, as columns of numbers. Pure.

An instance computes prompts in the order in which they were sent to it. Each accepted request is
charged with the prompts that its instance was sent after it: ``_Crowd.work_s`` is the sum of the
times of all prompts, and what came after a request is the difference between the sum now and then.
A prompt that will not be computed after all is taken out of the sum, and of the values of those
that came after it. State exists for requests that have not ended, and for nothing else.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tandem.conductor.answer_lengths import MAX_LENGTH, AnswerLengths
from tandem.conductor.fleet import FloatColumn
from tandem.conductor.prediction import Delays

__all__ = ["Crowds", "Effect"]

FIRST_ROWS = 16
WORK, LIMIT = 0, 1
"""Columns of both tables: ``_Crowd.work_s`` when the request had been accepted, and the objective;
both in seconds."""
TTFT, FULL, ACCEPTED = 2, 3, 4
"""Columns of the requests that wait for their first token: predicted time to it, the longest time
by which later prompts delay it, and the time of acceptance; seconds."""
GAPS, FIRST, CLIENT = 2, 3, 4
"""Columns of the requests with an objective for the time between tokens: the largest number of
gaps between tokens; the time of the first token, infinite while there is none; and the place of the
client's distribution of lengths."""
RESERVE = 0.97
"""Share of an objective for the time between tokens that is given away; the times of steps to come
are known no better."""
TINY_S = 1e-9


class Effect(NamedTuple):
    """The effect of a new prompt on the request whose promise it endangers most."""

    load: float = 0.0
    """Predicted time as a share of the objective."""
    time_s: float = 0.0
    limit_s: float = math.inf


NO_EFFECT = Effect()


class _Table:
    """Rows of numbers, one for each of some requests.

    Args:
        num_columns: number of values of a row.
    """

    def __init__(self, num_columns: int) -> None:
        self._cells: FloatColumn = np.zeros((num_columns, FIRST_ROWS))
        self._ids: list[str] = []
        self._rows: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._rows

    @property
    def columns(self) -> FloatColumn:
        """The columns; a view, valid until a row is added."""
        return self._cells[:, : len(self._ids)]

    def put(self, request_id: str, values: Sequence[float]) -> None:
        """Add the row of a request, or replace it."""
        row = self._rows.get(request_id)
        if row is None:
            row = self._rows[request_id] = len(self._ids)
            self._ids.append(request_id)
            if row == self._cells.shape[1]:
                self._cells = np.pad(self._cells, ((0, 0), (0, row)))
        self._cells[:, row] = values

    def set(self, request_id: str, column: int, value: float) -> None:
        """Set one value of a request that is in the table."""
        self._cells[column, self._rows[request_id]] = value

    def get(self, request_id: str, column: int) -> float:
        """Return one value of a request that is in the table."""
        return float(self._cells[column, self._rows[request_id]])

    def drop(self, request_id: str) -> None:
        """Remove the row of a request, if there is one."""
        row = self._rows.pop(request_id, None)
        if row is None:
            return
        last = self._ids.pop()
        if row < len(self._ids):
            self._cells[:, row] = self._cells[:, len(self._ids)]
            self._ids[row] = last
            self._rows[last] = row


class _Crowd:
    """The accepted requests of one instance that have not ended."""

    def __init__(self) -> None:
        self.work_s = 0.0
        """Sum of the times to compute the prompts that the instance was sent, in seconds."""
        self.waiting = _Table(5)
        """Requests whose first token is to come from this instance."""
        self.promised = _Table(5)
        """Requests with an objective for the time between tokens that this instance decodes, or
        will. ``WORK`` is infinite if it does not compute their prompts.
        """


class Crowds:
    """The accepted requests by instance, and the prompts that came after each."""

    def __init__(self) -> None:
        self._crowds: dict[str, _Crowd] = {}

    def __len__(self) -> int:
        return len(self._crowds)

    def charge(self, instance: str, prompt_s: float) -> float:
        """Charge a prompt to the requests before it; return the sum of the times of all prompts
        that the instance was sent, in seconds.
        """
        crowd = self._crowds.setdefault(instance, _Crowd())
        crowd.work_s += prompt_s
        return crowd.work_s

    def uncharge(self, instance: str, prompt_s: float, work_s: float) -> None:
        """Take a prompt that will not be computed out of the charges to the requests before it.

        Args:
            instance: name of the instance that it was sent to.
            prompt_s: time that it would take, seconds.
            work_s: return value of ``charge`` for it.
        """
        crowd = self._crowds.get(instance)
        if crowd is None or prompt_s <= 0:
            return
        crowd.work_s -= prompt_s
        waiting, promised = crowd.waiting.columns, crowd.promised.columns
        is_later = waiting[WORK] >= work_s
        waiting[WORK, is_later] -= prompt_s
        # Those that came after it need not wait for it any more.
        waiting[TTFT, is_later] = np.maximum(waiting[TTFT, is_later] - prompt_s, 0.0)
        promised[WORK, promised[WORK] >= work_s] -= prompt_s

    def wait(
        self,
        request_id: str,
        instance: str,
        work_s: float,
        limit_s: float | None,
        ttft_s: float,
        full_s: float,
        accepted_s: float,
    ) -> None:
        """Add a request whose first token is to come from an instance.

        Args:
            request_id: its id.
            instance: name of the instance.
            work_s: return value of ``charge`` for its prompt.
            limit_s: its objective for the time to first token; None: it has none.
            ttft_s: predicted time to its first token.
            full_s: longest time by which later prompts delay that.
            accepted_s: time of acceptance.
        """
        crowd = self._crowds.setdefault(instance, _Crowd())
        limit_s = math.inf if limit_s is None else limit_s
        crowd.waiting.put(request_id, (work_s, limit_s, ttft_s, full_s, accepted_s))

    def promise(
        self,
        request_id: str,
        instance: str,
        work_s: float,
        limit_s: float,
        max_tokens: int,
        first_s: float | None,
        client_place: int,
    ) -> None:
        """Add a request with an objective for the time between tokens.

        Args:
            request_id: its id.
            instance: name of the instance that decodes it, or will.
            work_s: return value of ``charge`` for its prompt; infinite if another instance computes
                that.
            limit_s: the objective, seconds.
            max_tokens: largest number of tokens that it may generate.
            first_s: time of its first token; None: it has not come.
            client_place: place of its client's distribution of lengths.
        """
        crowd = self._crowds.setdefault(instance, _Crowd())
        first_s = math.inf if first_s is None else first_s
        num_gaps = min(max_tokens, MAX_LENGTH) - 1
        crowd.promised.put(request_id, (work_s, limit_s, num_gaps, first_s, client_place))

    def begin(self, request_id: str, prefill: str, decode: str, now_s: float) -> None:
        """Record that the first token of a request has come."""
        crowd = self._crowds.get(decode)
        if crowd is not None and request_id in crowd.promised:
            crowd.promised.set(request_id, FIRST, now_s)
        self._drop(request_id, prefill, is_decode=False)

    def remove(self, request_id: str, prefill: str, decode: str) -> None:
        """Remove a request from the instances that it was sent to."""
        self._drop(request_id, prefill, is_decode=False)
        self._drop(request_id, decode, is_decode=True)

    def drop_promise(self, request_id: str, decode: str) -> None:
        """Remove a request from those that an instance decodes, or will."""
        self._drop(request_id, decode, is_decode=True)

    def _drop(self, request_id: str, instance: str, *, is_decode: bool) -> None:
        crowd = self._crowds.get(instance)
        if crowd is not None:
            (crowd.promised if is_decode else crowd.waiting).drop(request_id)
            self.prune(instance)

    def prune(self, instance: str) -> None:
        """Forget the sum of an instance's prompts if there is nobody to charge them to."""
        crowd = self._crowds[instance]
        if not len(crowd.waiting) and not len(crowd.promised):
            del self._crowds[instance]

    def find_work(self, request_id: str, prefill: str) -> float | None:
        """Return the sum of the times of the prompts that an instance had been sent when it was
        sent this request's, in seconds; None if the request is no longer charged there.
        """
        crowd = self._crowds.get(prefill)
        if crowd is None:
            return None
        for table in (crowd.waiting, crowd.promised):
            if request_id in table:
                return table.get(request_id, WORK)
        return None

    def get_ttft_s(self, request_id: str, prefill: str) -> float:
        """Return the predicted time to first token of a request that waits for it, in seconds."""
        return self._crowds[prefill].waiting.get(request_id, TTFT)

    def get_later_s(self, request_id: str, prefill: str, instance: str) -> float:
        """Return the time, in seconds, to compute the prompts that an instance was sent after an
        accepted request; 0 if it does not compute that request's own.
        """
        work_s = self.find_work(request_id, prefill) if prefill == instance else None
        return 0.0 if work_s is None else max(self._crowds[instance].work_s - work_s, 0.0)

    def find_ttft(self, instance: str, prompt_s: float, factor: float, now_s: float) -> Effect:
        """Return the effect of a new prompt on the times to first token of those that wait.

        Args:
            instance: name of the instance that is to compute it.
            prompt_s: time that it takes, seconds.
            factor: margin on predicted times.
            now_s: monotonic seconds.
        """
        crowd = self._crowds.get(instance)
        if crowd is None or not prompt_s or not len(crowd.waiting):
            return NO_EFFECT
        work_s, limit_s, ttft_s, full_s, accepted_s = crowd.waiting.columns
        later_s = crowd.work_s - work_s
        # Prompts that come after a full step of others cannot delay a first token any more, and a
        # promise that is broken cannot be broken again.
        is_open = later_s < full_s
        is_open &= ttft_s + later_s <= limit_s
        is_open &= now_s - accepted_s <= limit_s
        time_s = ttft_s + np.minimum(later_s + prompt_s, full_s)
        load = np.where(is_open, time_s * (factor / limit_s), 0.0)
        row = int(load.argmax())
        if not load[row]:
            return NO_EFFECT
        return Effect(float(load[row]), float(time_s[row]), float(limit_s[row]))

    def find_tpot(
        self,
        instance: str,
        delays: Delays,
        factor: float,
        lengths: AnswerLengths,
        now_s: float,
    ) -> Effect:
        """Return the effect of a new request on the times between tokens of those that decode, or
        will.

        Args:
            instance: name of the instance that is to decode it.
            delays: predicted times on that instance.
            factor: margin on predicted times.
            lengths: distributions of the lengths of answers.
            now_s: monotonic seconds.
        """
        crowd = self._crowds.get(instance)
        if crowd is None or not len(crowd.promised):
            return NO_EFFECT
        work_s, limit_s, most, first_s, client = crowd.promised.columns
        queue_s, step_s = delays.queue_s, max(delays.step_s * factor, TINY_S)
        full_s = max(delays.full_s * factor, TINY_S)
        later_s = np.maximum(crowd.work_s - work_s, 0.0)
        passed_s = np.maximum(now_s - first_s, 0.0)
        # Of the prompts that came after it, those that are not queued any more have been computed;
        # prompts of other servers are known by the queue alone.
        done_s = np.minimum(np.maximum(later_s - queue_s, 0.0), passed_s)
        pending_s = later_s - done_s
        if queue_s:
            np.maximum(pending_s, (first_s <= now_s) * queue_s, out=pending_s)
        # Gaps between tokens that are past, and those to come if it ends early and late.
        past = np.minimum((passed_s - done_s) / step_s, most - 1.0)
        num_tokens = past + 1.0
        coming = lengths.find_limits(client, num_tokens)
        coming -= num_tokens
        np.maximum(coming, 1.0, out=coming)
        np.minimum(coming, most - past, out=coming)
        few, many = coming
        # Steps with prompts cost the most time a token, and after them an answer makes up for it.
        # So the worst end is when the last of them is computed, if it ends between few and many.
        queued_s = (pending_s + delays.prompt_s) * factor
        coming[0] = np.minimum(np.maximum(queued_s / full_s, few), many)
        time_s = passed_s + coming * step_s
        time_s += np.minimum(queued_s, coming * full_s)
        time_s /= past + coming
        load = np.maximum(time_s[0], time_s[1]) / (RESERVE * limit_s)
        # Prompts of less than a step say nothing; then the duration of steps alone decides.
        small_s = step_s + (later_s + delays.prompt_s) * (factor / most)
        np.copyto(load, small_s / limit_s, where=queued_s < step_s)
        row = int(load.argmax())
        if load[row] > 1.0:
            # A promise that even a long answer will not keep cannot be broken by this prompt.
            best_s = passed_s + many * step_s + np.minimum(pending_s * factor, many * full_s)
            is_open = best_s <= (past + many) * limit_s
            is_open |= step_s > limit_s
            is_open &= passed_s <= most * limit_s
            load = np.where(is_open, load, 0.0)
            row = int(load.argmax())
            if not load[row]:
                return NO_EFFECT
        return Effect(float(load[row]), float(time_s[:, row].max()), float(limit_s[row]))
