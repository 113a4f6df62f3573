"""Callbacks of transformers' Trainer that write and restore checkpoints, the log, and a progress
bar.
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
from tandem.finetune.training.epochs import EpochTrainer

__all__ = ["BarCallback", "CheckpointCallback", "LogCallback"]

LOG_NAME = "trainer_log.jsonl"
STATE_NAME = "trainer_state.json"


class CheckpointCallback(TrainerCallback):
    """Writes a checkpoint after every ``save_steps`` steps, and restores a run from one.

    transformers would write the optimizer as a pickle, so its own saving is off. A checkpoint is
    written when the next step or the end of training begins, so after the step has been logged and
    evaluated.

    Args:
        folder: output folder of the run, in which ``checkpoint-N`` is written.
        save_steps: steps between two checkpoints.
        trainer: the trainer that calls it, whose sum of losses is kept.
        limit: most checkpoints to keep; None: all.
        has_run_state: True to write the optimizer's and the random state too, without which a run
            cannot resume from the checkpoint.
        resume_from: the checkpoint to resume from; None: the run begins anew.
    """

    def __init__(
        self,
        folder: Path,
        save_steps: int,
        *,
        trainer: EpochTrainer,
        limit: int | None = None,
        has_run_state: bool = True,
        resume_from: Path | None = None,
    ) -> None:
        self._folder = folder
        self._save_steps = save_steps
        self._trainer = trainer
        self._limit = limit
        self._has_run_state = has_run_state
        self._resume_from = resume_from
        self._is_random_due = resume_from is not None
        self._is_due = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Remove unfinished checkpoints, and restore optimizer and schedule of a resumed run.
        transformers itself restores the adapter and its own state.
        """
        del args, control
        for path in self._folder.glob(".checkpoint-*.partial"):
            shutil.rmtree(path)
        if self._resume_from is not None:
            optimizer, scheduler = kwargs["optimizer"], kwargs["lr_scheduler"]
            loss_sum = load_run_state(self._resume_from, optimizer, scheduler)
            self._trainer.loss_sum = _sum_logged(state) if loss_sum is None else loss_sum

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore the random state of a resumed run at its first step, after the batches that it
        skips; write the checkpoint of the step before, if it is due.
        """
        del args, control
        if self._is_random_due and self._resume_from is not None:
            restore_random_state(self._resume_from)
            self._is_random_due = False
        self._save_if_due(state, kwargs)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Note whether ``save_steps`` asks for a checkpoint after this step; it is written later
        (see the class).
        """
        del args, control, kwargs
        self._is_due = state.global_step % self._save_steps == 0

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write the checkpoint after the last step, if ``save_steps`` asks for one there."""
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
                    optimizer, scheduler = kwargs["optimizer"], kwargs["lr_scheduler"]
                    save_run_state(partial, optimizer, scheduler, self._trainer.loss_sum)
                publish_folder(partial, self._folder / name)
        except Exception:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        if self._limit is not None:
            for old in list_checkpoints(self._folder)[: -self._limit]:
                shutil.rmtree(old)


def _sum_logged(state: TrainerState) -> float:
    """Return the sum of all steps' losses by the log, whose lines have the mean since the last one;
    steps after its last line count with their mean.
    """
    total, last = 0.0, 0
    for line in state.log_history:
        if "loss" in line:
            total, last = total + line["loss"] * (line["step"] - last), int(line["step"])
    return total * state.global_step / last if last else 0.0


class LogCallback(TrainerCallback):
    """Writes the progress of a run to ``trainer_log.jsonl``, with LLaMA-Factory's fields."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOG_NAME
        self._begin_s = time.monotonic()
        self._begin_step = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Remove the lines of steps that a resumed run repeats; a new run begins with an empty
        file.
        """
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
        """Append a line with the loss of a step or of an evaluation; other logs are ignored."""
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
    """transformers' progress bar, with the last logged loss and the tokens/s beside it.

    Args:
        count_tokens: returns the number of tokens trained on so far, without padding.
    """

    def __init__(self, count_tokens: Callable[[], int]) -> None:
        super().__init__()
        self._count_tokens = count_tokens
        self._last = (time.monotonic(), count_tokens())

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Show the bar, and begin to count the tokens per second."""
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
        """Show the loss, and the tokens/s since the last log, beside the bar. transformers would
        print a line.
        """
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
