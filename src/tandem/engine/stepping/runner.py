"""The interface of a runner, which executes steps. ``torch_runner`` runs a model; the simulator
computes durations instead.

A runner gets a ``StepInput`` and returns a ``StepResult``. It owns the memory of the KV cache and
the sampling state of sequences; the scheduler decides which request a block belongs to.
"""

from collections.abc import Callable
from typing import Protocol

from tandem.core.errors import CorruptionError
from tandem.engine.stepping.messages import StepInput, StepResult

__all__ = ["LostBlocksError", "PrefillListener", "Runner", "StepHandle"]


class LostBlocksError(CorruptionError):
    """Ends a step that needs blocks whose content could not be read; over a wire it is a
    ``CorruptionError``.

    Args:
        what: as of ``TandemError``.
        block_ids: blocks that no request should take up again.
    """

    def __init__(self, what: str, block_ids: frozenset[int]) -> None:
        super().__init__("engine.run_step", what)
        self.block_ids = block_ids


class StepHandle(Protocol):
    """A step that a ``Runner`` has begun; calling it gives the step's result."""

    def __call__(self) -> StepResult:
        """Wait for the step and return its result, or raise its error. Call it once."""
        ...


class Runner(Protocol):
    """The executor of steps, one at a time."""

    def begin(self, step: StepInput, on_layer: Callable[[int], None] | None = None) -> StepHandle:
        """Begin a step: copy its blocks, compute its tokens, and sample where it says so.

        Does not raise. The step may run beside the caller, or only inside ``finish``. No other step
        may begin before ``finish`` has returned.

        Args:
            step: not modified; its blocks are not reused before the scheduler completes the plan.
            on_layer: called with each layer's index, in order, as soon as that layer's KV of this
                step is in the blocks, so that it can be announced or sent while the step goes on.
                Called on the thread that runs the step, which waits for it. An exception from it
                ends the step and is raised by ``finish``.

        Returns: a handle for ``finish``.
        """
        ...

    def finish(self, handle: StepHandle) -> StepResult:
        """Wait for a step; return a result for each of its sequences, in their order.

        Raises: the error that ended the step; LostBlocksError (blocks could not be read).
        """
        ...


class PrefillListener(Protocol):
    """The receiver of notices that prefills have progressed, which answers other instances'
    questions about them.
    """

    def note_progress(self) -> None:
        """Take note that prefills may have progressed or ended; ``Engine.find_prefill`` returns how
        far.

        Called on any thread, often on the one that runs the step and waits for the return, and
        without the engine's lock. Must return soon and not raise.
        """
        ...
