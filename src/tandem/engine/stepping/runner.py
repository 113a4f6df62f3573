"""The interface of what executes a step. ``torch_runner`` runs a model, the simulator computes
times.

A runner gets a ``StepInput`` and returns a ``StepResult``. It owns the memory of the KV cache and
the sampling state of sequences; the scheduler decides which request a block belongs to.
"""

from collections.abc import Callable
from typing import Protocol

from tandem.engine.stepping.messages import StepInput, StepResult

__all__ = ["PrefillListener", "Runner", "StepHandle"]


class StepHandle(Protocol):
    """A step that was begun."""

    def __call__(self) -> StepResult:
        """Wait for the step and return its result, or raise what ended it. Called once."""
        ...


class Runner(Protocol):
    """Executes steps, one at a time."""

    def begin(self, step: StepInput, on_layer: Callable[[int], None] | None = None) -> StepHandle:
        """Begin to copy the step's blocks, compute its tokens, and sample where it says so.

        Args:
            step: not modified; its blocks are reserved until the scheduler completes the plan.
            on_layer: called with each layer's index, in order, as soon as that layer's KV of this
                step is in the blocks and while the step goes on, so that it can be announced or
                sent. On the thread that runs the step, which waits for it. What it raises ends the
                step and is raised by ``finish``.
        Returns: a handle for ``finish``. The step may run beside the caller, or not before
            ``finish``; no other step is begun before that has returned. Does not raise.
        """
        ...

    def finish(self, handle: StepHandle) -> StepResult:
        """Wait for a step; return a result for every sequence of it, in its order.

        Raises: what ended the step.
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
