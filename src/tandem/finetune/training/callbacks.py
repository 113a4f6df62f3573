"""The work of a run beside training: checkpoints, resuming, and its log, through the public
hooks.
"""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import (
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from tandem.finetune.artefacts import name_full_disk
from tandem.finetune.training.checkpoints import (
    list_checkpoints,
    load_run_state,
    publish_folder,
    restore_random_state,
    save_run_state,
)

__all__ = ["BarCallback", "CheckpointCallback", "LogCallback"]

LOG_NAME = "trainer_log.jsonl"
STATE_NAME = "trainer_state.json"


class CheckpointCallback(TrainerCallback):
    """Writes checkpoints every ``save_steps`` and restores a run from one.

    transformers would write the optimizer as a pickle, so its own saving is off. A checkpoint is
    written at the event after its step, when that step is logged and evaluated.

    Args:
        folder: of the run; gets ``checkpoint-N``.
        save_steps: steps between checkpoints.
        limit: how many are kept; None = all.
        has_run_state: whether a checkpoint can be resumed from.
        resume_from: the checkpoint that the run goes on from.
    """

    def __init__(
        self,
        folder: Path,
        save_steps: int,
        *,
        limit: int | None = None,
        has_run_state: bool = True,
        resume_from: Path | None = None,
    ) -> None:
        self._folder = folder
        self._save_steps = save_steps
        self._limit = limit
        self._has_run_state = has_run_state
        self._resume_from = resume_from
        self._is_random_due = resume_from is not None
        self._is_due = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore optimizer and schedule; transformers restored the adapter and its own state."""
        del args, state, control
        for path in self._folder.glob(".checkpoint-*.partial"):
            shutil.rmtree(path)
        if self._resume_from is not None:
            load_run_state(self._resume_from, kwargs["optimizer"], kwargs["lr_scheduler"])

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore the random streams at the first step, after the skipped ones."""
        del args, control
        if self._is_random_due and self._resume_from is not None:
            restore_random_state(self._resume_from)
            self._is_random_due = False
        self._save_if_due(state, kwargs)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Note that a checkpoint is due."""
        del args, control, kwargs
        self._is_due = state.global_step % self._save_steps == 0

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write the last checkpoint, if one is due."""
        del args, control
        self._save_if_due(state, kwargs)

    def _save_if_due(self, state: TrainerState, kwargs: dict[str, Any]) -> None:
        if not self._is_due:
            return
        self._is_due = False
        name = f"checkpoint-{state.global_step}"
        partial = self._folder / f".{name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        advice = "free space there, then go on with resume_from_checkpoint: true"
        try:
            with name_full_disk(self._folder, advice):
                kwargs["model"].save_pretrained(partial, save_embedding_layers=False)
                # PEFT writes an empty form of a model card into each checkpoint; the run writes its
                # own card at its end.
                (partial / "README.md").unlink(missing_ok=True)
                state.save_to_json(str(partial / STATE_NAME))
                if self._has_run_state:
                    save_run_state(partial, kwargs["optimizer"], kwargs["lr_scheduler"])
                publish_folder(partial, self._folder / name)
        except Exception:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        if self._limit is not None:
            for old in list_checkpoints(self._folder)[: -self._limit]:
                shutil.rmtree(old)


class LogCallback(TrainerCallback):
    """Appends to ``trainer_log.jsonl`` what LLaMA-Factory writes there."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOG_NAME
        self._begin_s = time.monotonic()
        self._begin_step = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Drop lines of steps that a resumed run computes again."""
        del args, control, kwargs
        self._begin_s, self._begin_step = time.monotonic(), state.global_step
        kept = []
        if self._path.exists() and state.global_step > 0:
            lines = self._path.read_text("utf-8").splitlines(keepends=True)
            kept = [x for x in lines if json.loads(x)["current_steps"] <= state.global_step]
        self._path.write_text("".join(kept), "utf-8")

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Append one line for a step's loss, or an evaluation's."""
        del args, control
        logs: dict[str, float] = kwargs.get("logs") or {}
        if "loss" not in logs and "eval_loss" not in logs:
            return
        elapsed_s = time.monotonic() - self._begin_s
        done, total = state.global_step, max(state.max_steps, 1)
        rate = (done - self._begin_step) / elapsed_s if elapsed_s > 0 else 0.0
        line = {
            "current_steps": done,
            "total_steps": total,
            "loss": logs.get("loss"),
            "eval_loss": logs.get("eval_loss"),
            # LLaMA-Factory logs trl's "rewards/accuracies" under the name "accuracy".
            "accuracy": logs.get("rewards/accuracies"),
            **{key: value for key, value in logs.items() if "rewards/" in key},
            "lr": logs.get("learning_rate"),
            "epoch": logs.get("epoch", state.epoch),
            "percentage": round(100 * done / total, 2),
            "elapsed_time": _clock(elapsed_s),
            "remaining_time": _clock((total - done) / rate if rate > 0 else 0.0),
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({k: v for k, v in line.items() if v is not None}) + "\n")


class BarCallback(ProgressCallback):
    """transformers' progress bar with the last logged loss and tokens/s beside it.

    Args:
        count_tokens: returns how many tokens, without padding, have been learned from.
    """

    def __init__(self, count_tokens: Callable[[], int]) -> None:
        super().__init__()
        self._count_tokens = count_tokens
        self._last = (time.monotonic(), count_tokens())

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Show the bar."""
        super().on_train_begin(args, state, control, **kwargs)
        self._last = (time.monotonic(), self._count_tokens())

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Show the loss and the speed since the log before, where transformers writes lines."""
        del args, state, control, kwargs
        if self.training_bar is None or logs is None or "loss" not in logs:
            return
        (since_s, before), now = self._last, (time.monotonic(), self._count_tokens())
        self._last = now
        speed = (now[1] - before) / max(now[0] - since_s, 1e-9)
        shown = {"loss": f"{float(logs['loss']):.4f}", "tok/s": f"{speed:.0f}"}
        self.training_bar.set_postfix(shown)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
