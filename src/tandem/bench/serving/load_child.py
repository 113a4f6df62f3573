"""Loads one model in a new process, computes its first token, and reports the time and memory.

``python -m tandem.bench.serving.load_child MODEL CACHE TOKENS``: MODEL as for ``tandem serve``,
CACHE a folder or ``off``, TOKENS of a prompt, separated by commas. Prints one JSON object. The
clock starts when all imports are done, as it does for the rival (llama.cpp). ``phases_s`` divides
the time into phases.
"""

import json
import resource
import sys
import time
from pathlib import Path

import torch

from tandem._native import AlignedBuffer, ThreadPool, read_topology, recommend_threads
from tandem.kernels.paged import PagedBatch, SequenceChunk
from tandem.models.loading.loader import load_model
from tandem.models.planning.planner import plan_model

__all__ = ["main"]


PAGE_BYTES = 4096
WRITE_TIMEOUT_S = 900.0
"""Longest wait in seconds for the packed weights to be on disk, after the clock has stopped."""


def read_memory() -> int:
    """Return the bytes of anonymous memory of this process, without pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))


def touch_memory(size_bytes: int) -> None:
    """Touch as much memory as a model takes, and free it.

    The host of a virtual machine supplies a page at its first touch since the machine started, ten
    times slower than clearing a page. A rival that maps its file needs no such pages, ours does:
    without this call the first rounds would measure the host of the machine.
    """
    memory = AlignedBuffer(size_bytes, hugepages=True).array()
    memory[::PAGE_BYTES] = 1


def main(model: str, cache: str, prompt: list[int]) -> dict[str, object]:
    """Load the model and run a prefill; return seconds, bytes, the first token and its logits."""
    pool = ThreadPool(recommend_threads(read_topology()).threads)
    before, peak, calls = read_memory(), 0, 0

    def note(*_: object) -> None:
        nonlocal peak, calls
        peak, calls = max(peak, read_memory()), calls + 1

    # The model is planned once before the clock starts, since the first planning imports the
    # model's classes.
    planned = plan_model(model, dtype="bfloat16", packed_cache=cache)
    touch_memory(planned.weight_bytes)
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    before_use = resource.getrusage(resource.RUSAGE_SELF)
    plan = plan_model(model, dtype="bfloat16", packed_cache=cache)
    planned_s = time.perf_counter()
    loaded = load_model(plan, pool, note, is_written_behind=True)
    loaded_s = time.perf_counter()
    block_size = 64
    num_blocks = -(-len(prompt) // block_size)
    kv = loaded.allocate_kv(num_blocks, block_size=block_size)
    chunk = SequenceChunk(prompt, 0, list(range(num_blocks)), "last")
    logits = loaded.forward(PagedBatch.build([chunk], block_size), kv)[-1]
    token = int(logits.argmax())
    end_s = time.perf_counter()
    seconds, cpu_seconds = end_s - begin_s, time.process_time() - begin_cpu_s
    use = resource.getrusage(resource.RUSAGE_SELF)
    note()
    if loaded.packed_writer is not None:
        loaded.packed_writer.start()
        loaded.packed_writer.wait(WRITE_TIMEOUT_S)
    layers: dict[str, int] = {}
    for matrix in plan.matrices:
        layer = ".".join(matrix.module.split(".")[:3])
        layers[layer] = layers.get(layer, 0) + matrix.plain_bytes
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "phases_s": {
            "plan": planned_s - begin_s,
            "load": loaded_s - planned_s,
            "step": end_s - loaded_s,
            "user": use.ru_utime - before_use.ru_utime,
            "system": use.ru_stime - before_use.ru_stime,
        },
        "major_faults": use.ru_majflt - before_use.ru_majflt,
        "token": token,
        "logits": logits.tolist(),
        "peak_bytes": peak - before,
        "packed_bytes": plan.weight_bytes,
        "layer_bytes": max(layers.values()),
        "num_progress_calls": calls,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    outcome = main(sys.argv[1], sys.argv[2], [int(text) for text in sys.argv[3].split(",")])
    sys.stdout.write(json.dumps(outcome) + "\n")
