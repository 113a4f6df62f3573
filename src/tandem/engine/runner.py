"""What executes a step: the face. ``torch_runner`` runs a model, the simulator computes times.

A runner gets the scheduler's plan and returns the sampled tokens. It owns the memory of the KV
cache; the scheduler decides which request a block belongs to.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from tandem.core.errors import TandemError
from tandem.core.wire import TokenLogprob
from tandem.engine.sampler_state import SampledToken, SamplerState
from tandem.engine.scheduling.scheduler import StepPlan

__all__ = ["BlockTransfers", "PrefillListener", "Runner", "SequenceResult"]


@dataclass(slots=True)
class SequenceResult:
    """What a step gave one request."""

    sampled: SampledToken | None = None
    """None while its prefill is not complete."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    """Of the prompt's tokens that this step predicted, if the request asked for them."""
    failure: TandemError | None = None
    """Why the request ends; the other fields say nothing then."""


class Runner(Protocol):
    """Executes plans, one at a time."""

    def run(
        self,
        plan: StepPlan,
        states: Mapping[str, SamplerState],
        on_layer: Callable[[int], None] | None = None,
    ) -> dict[str, SequenceResult]:
        """Copy the plan's blocks, compute its tokens, sample where it says so.

        Args:
            plan: not modified; its blocks are reserved until the scheduler completes it.
            states: sampling state by request id.
            on_layer: called with each layer's index, in order, as soon as that layer's KV of this
                step is in the blocks and while the step goes on, so that it can be announced or
                sent. On the thread that runs the step, which waits for it. What it raises ends the
                step and leaves ``run``.
        Returns: a result for every sequence of the plan.
        """
        ...


class BlockTransfers(Protocol):
    """Moves blocks between the device and the lower tiers, beside the steps."""

    @property
    def can_read_instances(self) -> bool:
        """Whether loads whose source is a prefill instance are taken too."""
        ...

    def begin(self, plan: StepPlan) -> None:
        """Execute a plan's requests to the lower tiers; see ``StepPlan`` for the order.

        Called for every plan, one without sequences too, before its step writes. Returns soon and
        does not raise. The end of each load is reported to ``Engine.load_done`` or
        ``load_failed``, within a time that is bounded, from any thread.
        """
        ...


class PrefillListener(Protocol):
    """Reports the progress of prefills to other instances."""

    def note_progress(self) -> None:
        """Take in that prefills may be further, or have ended; ask ``Engine.find_prefill``.

        On any thread, often on the one that runs the step, which waits; without the engine's lock.
        Returns soon and does not raise.
        """
        ...
