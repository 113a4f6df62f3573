"""`tandem bench load`: from a GGUF file to the first token, against llama.cpp.

Six layers of Qwen3-30B-A3B with random weights, quantized by the ``gguf`` package. Ours and
llama.cpp load the same file, in every round in a new process, and answer a prompt; the clock starts
when the process has imported its libraries. ``pages=kept``: the file is in the page cache.
``pages=dropped``: neither the file nor our packed weights are in the page cache when a side starts.
``start=cold`` packs the file's weights; ``start=cached`` maps weights packed by an earlier start.
Checked before a time counts: our logits are near llama.cpp's, and our anonymous memory is at most
the packed model and one layer.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from tandem import _native
from tandem.bench.harness import BenchCase
from tandem.bench.rivals.llama_rivals import install_llama
from tandem.bench.rivals.processes import RivalProcess
from tandem.bench.serving.model import QUICK_SHAPE, SHAPE, write_random_model
from tandem.core.errors import UnsupportedError

__all__ = ["make_cases"]

TYPES = {"q8_0": 0.1, "q4_0": 0.25}
"""Largest allowed norm of the difference from llama.cpp's logits, by type of the file: both sides
quantise activations, each differently, and a token near a tie may choose other experts.
"""
PROMPT_TOKENS = 32
SLACK_BYTES = 256 << 20
"""Bytes allowed for the allocator and for a step, in addition to the weights."""
TIMEOUT_S = 1800.0


def drop_pages(root: Path) -> None:
    """Evict a file, or all files of a folder, from the page cache, after writing them to disk."""
    for path in [root] if root.is_file() else filter(Path.is_file, root.rglob("*")):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class _Bench:
    """The GGUF files of one model shape, and both ways to load them: our engine and llama.cpp."""

    def __init__(self, folder: Path, shape: dict[str, int]) -> None:
        self._folder = folder
        self._shape = shape
        generator = torch.Generator().manual_seed(0)
        self.prompt = torch.randint(
            0, shape["vocab_size"], (PROMPT_TOKENS,), generator=generator
        ).tolist()

    @cached_property
    def python(self) -> Path:
        return install_llama("llama.cpp")

    @cached_property
    def checkpoint(self) -> Path:
        folder = self._folder / "checkpoint"
        write_random_model(folder, self._shape)
        return folder

    def file(self, kind: str) -> Path:
        """Return the GGUF file with weights of a type; the first call writes it."""
        path = self._folder / f"{kind}.gguf"
        if not path.exists():
            with RivalProcess(self.python, "llama_cpp_rival.py", "llama.cpp") as peer:
                peer.call(
                    "write_gguf",
                    timeout_s=TIMEOUT_S,
                    folder=str(self.checkpoint),
                    path=str(path),
                    kind=kind,
                )
        return path

    def drop(self, kind: str) -> None:
        """Evict the GGUF file of a type, and all weights that our engine has packed, from the page
        cache.
        """
        drop_pages(self.file(kind))
        drop_pages(self._folder / "packed")

    def ours(self, kind: str, *, is_cached: bool) -> dict[str, Any]:
        """Load the file of a type with our engine in a new process; return that process's
        report.
        """
        cache = str(self._folder / "packed") if is_cached else "off"
        prompt = ",".join(map(str, self.prompt))
        command = [
            sys.executable,
            "-m",
            "tandem.bench.serving.load_child",
            str(self.file(kind)),
            cache,
        ]
        done = subprocess.run(
            [*command, prompt], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        if done.returncode != 0:
            raise UnsupportedError("bench.load", done.stderr[-1000:])
        return json.loads(done.stdout.splitlines()[-1])

    def theirs(self, kind: str) -> tuple[float, list[float]]:
        """Load with llama.cpp; return the seconds, measured in its process as ours are in ours, and
        the logits.
        """
        threads = _native.recommend_threads(_native.read_topology()).threads
        with RivalProcess(self.python, "llama_cpp_rival.py", "llama.cpp") as peer:
            seconds, logits = peer.call(
                "first_token", path=str(self.file(kind)), threads=threads, prompt=self.prompt
            )
        return seconds, logits

    def check(self, kind: str, *, is_cached: bool) -> str:
        """Load the file of a type on both sides; return ``ok``, or the error found in our logits or
        memory.
        """
        if is_cached:
            self.ours(kind, is_cached=True)  # Fills the cache of packed weights.
        ours = self.ours(kind, is_cached=is_cached)
        want = torch.tensor(self.theirs(kind)[1])
        distance = ((torch.tensor(ours["logits"]) - want).norm() / want.norm()).item()
        if distance > TYPES[kind]:
            return f"logits are {distance:.3f} from llama.cpp's, more than {TYPES[kind]}"
        bound = ours["packed_bytes"] + ours["layer_bytes"] + SLACK_BYTES
        if ours["peak_bytes"] > bound:
            return f"{ours['peak_bytes'] >> 20} MiB of memory, more than {bound >> 20}"
        return "ok" if ours["num_progress_calls"] > 1 else "no progress was told"


def make_cases(*, quick: bool, with_peers: bool = False) -> Iterator[BenchCase]:
    """Yield the cases.

    Args:
       quick: a tiny model.
       with_peers: must be true: llama.cpp is the only baseline.
    """
    if not with_peers:
        raise UnsupportedError("bench.load", "the rival is llama.cpp: give --with-peers")
    disable_progress_bar()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bench = _Bench(scratch, QUICK_SHAPE if quick else SHAPE)
        for kind in TYPES:
            for is_cached, is_dropped in product((False, True), (False, True)):
                start, pages = (
                    "cached" if is_cached else "cold",
                    "dropped" if is_dropped else "kept",
                )
                yield BenchCase(
                    name=f"type={kind} start={start} pages={pages}",
                    unit="ms",
                    ours=partial(
                        _time_ours, bench, kind, is_cached=is_cached, is_dropped=is_dropped
                    ),
                    check=partial(bench.check, kind, is_cached=is_cached),
                    baseline=partial(_time_theirs, bench, kind, is_dropped=is_dropped),
                    baseline_name="llama.cpp",
                )


def _time_ours(bench: _Bench, kind: str, *, is_cached: bool, is_dropped: bool) -> float:
    if is_dropped:
        bench.drop(kind)
    outcome = bench.ours(kind, is_cached=is_cached)
    phases = " ".join(f"{name} {value:.2f}" for name, value in outcome["phases_s"].items())
    sys.stderr.write(f"  ours: {phases} s, {outcome['major_faults']} major faults\n")
    return outcome["seconds"] * 1e3


def _time_theirs(bench: _Bench, kind: str, *, is_dropped: bool) -> float:
    if is_dropped:
        bench.drop(kind)
    return bench.theirs(kind)[0] * 1e3
