"""A process that predicts the memory of a fine-tuning run, or measures it in the run itself.

Argument: the recipe's file. The peak is the largest resident memory from the second step on, when
the optimizer has its moments, without pages of files: the kernel counts it, so no moment is missed.
"""

import sys
import threading
import time
from pathlib import Path

from peer_loop import answer_calls

POLL_S = 0.005


def read_status(key: str) -> int:
    """Return bytes that /proc/self/status tells."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) << 10


class Peer:
    """One recipe in one process, so that its memory is its own."""

    def __init__(self) -> None:
        from tandem.finetune.recipes.recipe import read_recipe

        self.recipe = read_recipe(sys.argv[1])

    def predict(self) -> dict[str, int]:
        """Return the bytes of each part."""
        from tandem.finetune.forecast.prediction import predict_run

        return {part.name: part.size_bytes for part in predict_run(self.recipe).parts}

    def run(self) -> int:
        """Train, and return the peak of anonymous memory in steps after the first."""
        from tandem.finetune.training.trainer import finetune

        log = Path(self.recipe.output.output_dir) / "trainer_log.jsonl"
        ended = threading.Event()

        def forget_loading() -> None:
            while not ended.is_set() and not (log.exists() and log.stat().st_size):
                time.sleep(POLL_S)
            # From here on VmHWM is the peak of what follows.
            Path("/proc/self/clear_refs").write_text("5")

        watcher = threading.Thread(target=forget_loading)
        watcher.start()
        try:
            finetune(self.recipe)
        finally:
            ended.set()
            watcher.join()
        return read_status("VmHWM") - read_status("RssFile") - read_status("RssShmem")


answer_calls(Peer)
