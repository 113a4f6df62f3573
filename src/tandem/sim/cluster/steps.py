"""Models of the time of a step, which alone decide the speed of a simulated instance.

``PlannedSteps`` uses the planner's cost model, for machines that are not available. ``LearntSteps``
uses costs that a live instance has learnt from its steps.
"""

import math
from typing import Annotated, NamedTuple, Protocol

import msgspec
from msgspec import Meta

from tandem.placement.costs import Efficiencies, Placement, chunk_time, decode_time
from tandem.placement.hardware import HardwareSpec
from tandem.placement.shape import ModelShape

__all__ = ["Calibration", "LearntSteps", "PlannedSteps", "StepModel", "StepWork"]

KNOTS = (0, *(1 << number for number in range(1, 32)))
"""Contexts in tokens at which step times are computed; between two of them they are
interpolated."""


class StepWork(NamedTuple):
    """The work of one step: the numbers from which its time is predicted."""

    prefill_tokens: int
    prefill_context: float
    """Sum over prefilled tokens of the number of tokens that each attends to."""
    num_decodes: int
    decode_tokens: int
    """KV tokens that the decodes read."""


class StepModel(Protocol):
    """A model that predicts the time of a step from its work."""

    def predict_s(self, work: StepWork) -> float:
        """Return the seconds that a step with this work takes."""
        ...


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Costs in seconds per unit of a step's work, learnt by a live instance."""

    step_s: Annotated[float, Meta(ge=0)]
    """Seconds per step, whatever its work."""
    prefill_token_s: Annotated[float, Meta(ge=0)]
    prefill_context_s: Annotated[float, Meta(ge=0)]
    """Seconds per token that a prefilled token attends to."""
    decode_s: Annotated[float, Meta(ge=0)]
    decode_token_s: Annotated[float, Meta(ge=0)]
    """Seconds per KV token that a decode reads."""
    gap_s: Annotated[float, Meta(ge=0)] = 0.0
    """Seconds between the end of a step and the beginning of the next."""
    machine: str = ""
    model: str = ""
    error: float = 0.0
    """Mean relative error on the steps that the costs were learnt from."""


class LearntSteps:
    """A model of step times whose costs a live instance has learnt."""

    def __init__(self, costs: Calibration) -> None:
        self._costs = costs

    def predict_s(self, work: StepWork) -> float:
        """Return the seconds of a step, a sum of its work times its costs."""
        costs = self._costs
        return (
            costs.step_s
            + costs.gap_s
            + costs.prefill_token_s * work.prefill_tokens
            + costs.prefill_context_s * work.prefill_context
            + costs.decode_s * work.num_decodes
            + costs.decode_token_s * work.decode_tokens
        )


class PlannedSteps:
    """Step times from the planner's cost model.

    The model is evaluated at contexts that are powers of two, once for each number of tokens or
    users, and interpolated linearly between. In a mixed step the decodes add tokens to the
    prefill's matrix products, and their attention is added to the time.

    Args:
       spec: the machine.
       shape: the model.
       place: placement of the model's parts.
       eff: shares of the peak rates that are reached.
       overhead_s: seconds per step in addition to the device's work, for example of a scheduler.
       decode_overhead_s: seconds that each decode adds to that, for example of a sampler.
    """

    def __init__(
        self,
        spec: HardwareSpec,
        shape: ModelShape,
        place: Placement,
        eff: Efficiencies,
        *,
        overhead_s: float = 0.0,
        decode_overhead_s: float = 0.0,
    ) -> None:
        self._spec, self._shape, self._place, self._eff = spec, shape, place, eff
        self._overhead_s, self._decode_overhead_s = overhead_s, decode_overhead_s
        self._decodes: dict[int, list[float | None]] = {}
        self._chunks: dict[int, list[float | None]] = {}

    def predict_s(self, work: StepWork) -> float:
        """Return the seconds of a step: overhead, prefill and decodes."""
        seconds = self._overhead_s + self._decode_overhead_s * work.num_decodes
        if work.prefill_tokens:
            context = work.prefill_context / work.prefill_tokens
            seconds += self._interpolate(
                self._chunks, work.prefill_tokens + work.num_decodes, context
            )
        if work.num_decodes:
            context = work.decode_tokens / work.num_decodes
            seconds += self._interpolate(self._decodes, work.num_decodes, context)
            if work.prefill_tokens:
                seconds -= self._interpolate(self._decodes, work.num_decodes, 0.0)
        return seconds

    def _interpolate(
        self, known: dict[int, list[float | None]], count: int, context: float
    ) -> float:
        values = known.get(count)
        if values is None:
            values = known[count] = [None] * len(KNOTS)
        low = max(math.frexp(context)[1] - 1, 0)
        first, last = KNOTS[low], KNOTS[low + 1]
        start, end = values[low], values[low + 1]
        if start is None:
            start = values[low] = self._evaluate(known, count, first)
        if end is None:
            end = values[low + 1] = self._evaluate(known, count, last)
        return start + (end - start) * (context - first) / (last - first)

    def _evaluate(self, known: object, count: int, context: int) -> float:
        arguments = (self._spec, self._shape, self._place, self._eff)
        if known is self._decodes:
            return decode_time(*arguments, users=count, context=context).seconds
        return chunk_time(*arguments, tokens=count, context=context).seconds
