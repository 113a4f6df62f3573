"""A whole model of random blocks in a GGUF file, here and in rivals: ``tools/whole_model.py``.

The file has all 48 layers of Qwen3-30B-A3B's shape as Q4_K_M, about 18.5 GB. Each program runs it
in a process of its own, one after the other: ours twice, as a first and as a second start, with no
setting but the model, then llama.cpp and its fork where they can be installed. Printed is a JSON
object a run: seconds until it is loaded, milliseconds of a decode step at 1 and 4 sequences and of
a prefill, and the most memory that our process had, beside packed size and stored size. The peak is
of anonymous and shared memory: mapped pages of the file are the system's to take back. A file that
is there is used again.

With ``--run forecast`` the speeds that `tandem plan` predicts of the file, or of any that ``--out``
names, are printed beside measured ones. Each round measures the machine as the plan does once, and
then times the engine, so that other load on the machine slows both sides: the quotients say how
good the cost model is, not how busy the machine is.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from tandem import _native
from tandem.bench.children import start_child
from tandem.bench.rivals.llama_rivals import PEERS, LlamaCpp, install_llama
from tandem.bench.serving.driver import EngineDriver, Phase
from tandem.bench.serving.stored import SHAPE, write_random_gguf
from tandem.core.errors import UnsupportedError
from tandem.kernels.calibration import Calibrator
from tandem.models.loading.loader import make_kv_layout
from tandem.models.planning.planner import plan_model
from tandem.placement.costs import decode_time, prefill_time
from tandem.placement.served import fit_formats, place_served, read_served

WHOLE = SHAPE | {"num_hidden_layers": 48, "vocab_size": 151_936}
CONTEXT, PREFILL, SPARE = 128, 1000, 64
BATCHES = (1, 4)
FORECASTS: tuple[tuple[Phase, int], ...] = (("decode", 128), ("prefill", 512))
"""Predicted phases: a step after so many tokens, and a prompt of so many."""
BLOCK_TOKENS = 64
RUN_TIMEOUT_S = 3600.0
SAMPLE_S = 0.05
"""Seconds between two looks at the memory in use."""


def draw_prompts(count: int, length: int) -> list[list[int]]:
    """Return random prompts, the same in every process."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, WHOLE["vocab_size"], (count, length), generator=generator).tolist()


def measure(side: Any) -> dict[str, float]:
    """Return milliseconds by what is measured; of a prefill the second one."""
    found = {f"decode_{n}_ms": side.measure("decode", draw_prompts(n, CONTEXT)) for n in BATCHES}
    side.measure("prefill", draw_prompts(1, PREFILL))
    return found | {"prefill_ms": side.measure("prefill", draw_prompts(1, PREFILL))}


class MemoryWatch:
    """The most anonymous and shared memory that this process had; a thread looks every 50 ms."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            status = Path("/proc/self/status").read_text()
            sizes = re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB", status, re.MULTILINE)
            self.peak_bytes = max(self.peak_bytes, sum(int(size) << 10 for size in sizes))
            time.sleep(SAMPLE_S)


def run_ours(path: Path) -> dict[str, Any]:
    """Load the file as serving does and measure it."""
    watch = MemoryWatch()
    plan = plan_model(path)
    begin = time.perf_counter()
    driver = EngineDriver(path, "bfloat16", packed_cache="auto")
    load_s = time.perf_counter() - begin
    found = {"run": "ours", "load_s": load_s, **measure(driver)}
    return found | {
        "peak_bytes": watch.peak_bytes,
        "packed_bytes": plan.weight_bytes,
        "stored_bytes": path.stat().st_size,
    }


def run_peer(path: Path, peer: str) -> dict[str, Any]:
    """Load the file in a rival and measure it, with memory for as many sequences as ours has."""
    threads = _native.recommend_threads(_native.read_topology()).threads
    install_llama(peer)
    begin = time.perf_counter()
    model = LlamaCpp(path, peer, threads, PREFILL + SPARE, max(BATCHES))
    load_s = time.perf_counter() - begin
    try:
        return {"run": model.name, "load_s": load_s, **measure(model)}
    finally:
        model.close()


def run_forecast(path: Path, rounds: int) -> dict[str, Any]:
    """Predict and measure a decode step and a prompt; return milliseconds, medians, and the
    quartiles of predicted over measured.
    """
    plan = plan_model(path)
    kv = make_kv_layout(plan.spec, BLOCK_TOKENS, "auto")
    shape = read_served(plan, kv_bytes=kv.bytes_per_token)
    driver, calibrator = EngineDriver(path, "auto", packed_cache="auto"), Calibrator()
    generator = torch.Generator().manual_seed(1)
    pairs: dict[str, list[tuple[float, float]]] = {phase: [] for phase, _ in FORECASTS}
    for number in range(rounds + 1):
        for phase, tokens in FORECASTS:
            calibrator.forget()
            calibrator.measure()
            now = calibrator.sum_up()
            spec, eff = now.hardware, fit_formats(plan, now.efficiencies)
            place = place_served(plan, chunk_tokens=tokens)
            if phase == "decode":
                step = decode_time(spec, shape, place, eff, users=1, context=tokens)
            else:
                step = prefill_time(spec, shape, place, eff, tokens=tokens)
            prompt = torch.randint(3, plan.spec.vocab_size, (1, tokens), generator=generator)
            measured_ms = driver.measure(phase, prompt.tolist())
            if number:  # The first round is the first use of everything.
                pairs[phase].append((step.seconds * 1e3, measured_ms))
    found: dict[str, Any] = {"run": "forecast", "file": path.name, "load": os.getloadavg()[0]}
    for phase, both in pairs.items():
        predicted, measured = (statistics.median(side) for side in zip(*both, strict=True))
        quotients = statistics.quantiles([p / m for p, m in both], n=4)
        found |= {f"{phase}_predicted_ms": predicted, f"{phase}_ms": measured}
        found[f"{phase}_quotients"] = quotients
    return found


def run_alone(path: Path, run: str) -> None:
    """Measure in a process of its own and print what it found."""
    command = [sys.executable, __file__, "--out", str(path), "--run", run]
    with start_child(command, stdout=subprocess.PIPE) as child:
        out, _ = child.communicate(timeout=RUN_TIMEOUT_S)
    sys.stdout.write(out.decode())
    sys.stdout.flush()


def main() -> None:
    """Write the file if it is not there, then run it in each program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("whole.gguf"), help="the file")
    parser.add_argument("--kind", default="q4_k_m", help="a mixture, or a type of all matrices")
    parser.add_argument("--layers", type=int, default=WHOLE["num_hidden_layers"])
    parser.add_argument(
        "--run", default="", help="one run alone, in this process: ours, forecast or a rival"
    )
    parser.add_argument("--rounds", type=int, default=9, help="of a forecast")
    arguments = parser.parse_args()
    path: Path = arguments.out
    if not path.exists():
        draft = path.with_suffix(".partial")
        write_random_gguf(draft, WHOLE | {"num_hidden_layers": arguments.layers}, arguments.kind)
        draft.rename(path)
    if arguments.run:
        try:
            if arguments.run == "forecast":
                found = run_forecast(path, arguments.rounds)
            else:
                found = run_ours(path) if arguments.run == "ours" else run_peer(path, arguments.run)
        except UnsupportedError as error:
            found = {"run": arguments.run, "skipped": error.what}
        sys.stdout.write(json.dumps(found) + "\n")
        return
    for run in ("ours", "ours", *PEERS):
        run_alone(path, run)


if __name__ == "__main__":
    main()
