"""A process that predicts the memory of fine-tuning runs, and measures it in the runs themselves.

Each prediction and each run is done in a child forked after all imports, so that its memory is
counted alone. The peak is the largest anonymous memory (without pages of files) from the second
step on, when the optimizer has its moments. The kernel keeps this maximum, so no short peak is
missed.
"""

import json
import multiprocessing
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rival_loop import answer_calls

POLL_S = 0.005


def read_status(key: str) -> int:
    """Return the bytes that /proc/self/status gives for ``key``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) << 10


class Rival:
    """Predicts and runs in forked children. Has imported all that a run needs, and started no
    thread.
    """

    def __init__(self) -> None:
        from tandem.finetune.forecast.prediction import predict_run
        from tandem.finetune.recipes.recipe import read_recipe
        from tandem.finetune.training.trainer import finetune

        self._predict, self._read, self._finetune = predict_run, read_recipe, finetune

    def predict(self, recipe: str) -> dict[str, int]:
        """Return the bytes that each part of a fine-tuning run's memory is predicted to take;
        ``recipe`` is the path of its settings.
        """

        def work() -> dict[str, int]:
            parts = self._predict(self._read(recipe)).parts
            return {part.name: part.size_bytes for part in parts}

        return _run_in_child(work)

    def run(self, recipe: str) -> list[int]:
        """Train; return the anonymous memory before training and its peak in the steps after the
        first, in bytes.
        """
        return _run_in_child(lambda: self._train(recipe))

    def _train(self, path: str) -> list[int]:
        begin = read_status("RssAnon")
        recipe = self._read(path)
        log = Path(recipe.output.output_dir) / "trainer_log.jsonl"
        ended = threading.Event()

        def forget_loading() -> None:
            while not ended.is_set() and not (log.exists() and log.stat().st_size):
                time.sleep(POLL_S)
            # Writing 5 to clear_refs resets VmHWM: from here on it is the peak memory of training,
            # without loading.
            Path("/proc/self/clear_refs").write_text("5")

        watcher = threading.Thread(target=forget_loading)
        watcher.start()
        try:
            self._finetune(recipe)
        finally:
            ended.set()
            watcher.join()
        return [begin, read_status("VmHWM") - read_status("RssFile") - read_status("RssShmem")]


def _run_in_child(work: Callable[[], Any]) -> Any:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=lambda: theirs.send_bytes(json.dumps(work()).encode()))
    child.start()
    theirs.close()
    try:
        return json.loads(ours.recv_bytes())
    finally:
        child.join()
        ours.close()


answer_calls(Rival)
