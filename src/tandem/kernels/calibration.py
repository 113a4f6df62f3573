"""Measurement of this machine for planning: bandwidth, peaks, and the share that our kernels reach.

``calibrate`` takes a few seconds; ``read_calibration`` stores the result by the machine's
fingerprint, under ``~/.cache/tandem``. The measurements are interleaved in rounds, so that other
load on the machine slows all of them alike: then the shares of the peaks are right even if the
peaks are not.
"""

import hashlib
import os
import statistics
import time
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from tandem import __version__
from tandem._native import (
    ExpertBank,
    TensorView,
    ThreadPool,
    count_expert_bytes,
    cpu_features,
    kernel_isas,
    read_topology,
    recommend_threads,
    rms_norm,
)
from tandem.kernels.cpu.tiny_step import TinyStep
from tandem.kernels.weights.formats import find_format
from tandem.placement.costs import Efficiencies, FormatShares
from tandem.placement.fitting import read_efficiencies
from tandem.placement.hardware import OPS_PER_CYCLE, HardwareSpec, Isa, Processor

__all__ = [
    "DEFAULT_ROOT",
    "Calibration",
    "Calibrator",
    "calibrate",
    "find_fingerprint",
    "find_kept",
    "read_calibration",
]

DEFAULT_ROOT = Path("~/.cache/tandem/hardware")
GIB = 1 << 30
HIDDEN, INNER, TOP_K = 2048, 768, 8
"""Sizes of an expert of Qwen3-30B-A3B: hidden size, intermediate size, experts per token."""
NUM_EXPERTS = 48
"""Experts in a bank: 230 MB in int8, 130 in int4, 450 in bf16; read in turn, they exceed
any cache.
"""
PREFILL_TOKENS = 128
NORM_ROWS = 256
"""Rows of a norm to be timed: 2 MB in and out, as much as a step's rows are."""
MACS = 2_000_000_000
TINY = 128
"""Sizes of experts that are so small that only the call takes time."""
CALLS = 50
"""Tiny layers, experts' calls and norms that are timed in a row, as a step has them: a single call
would be timed with threads that must wake up and code that is in no cache, and it is so short that
other processes would seldom interrupt it, while they do interrupt what is predicted by it.
"""
BUDGET_S = 6.0
"""Seconds for the measuring rounds; filling the banks comes before."""
ROUNDS = 9
DISTURBED = 0.5
"""Load of other processes, as a share of the cores, above which a calibration counts as
disturbed.
"""
FORMAT = "5"
"""Version of the stored calibration; another version is measured again."""
PEAKS = {"int8": "int8", "int4g32": "int8", "q4k": "int8", "q6k": "int8", "bf16": "bf16"}
"""Weight formats to measure, each with the format whose multiply-adds it uses."""
FILLER = 0x3F
"""Byte that fills the weights to be timed: as a code, or as part of an fp16 or bf16 scale, it is an
ordinary number.
"""


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured rates of this machine, and the shares of its peaks that our kernels reach."""

    fingerprint: str
    hardware: HardwareSpec
    efficiencies: Efficiencies
    rounds: int
    """Rounds of each measurement; results are medians."""
    load: float
    """Load of other processes during the measurement, in processors: the load average of the minute
    before.
    """

    @property
    def is_disturbed(self) -> bool:
        """True if other processes took so much of the machine that the rates are too low."""
        processor = self.hardware.processor
        return processor is not None and self.load > DISTURBED * processor.cores

    def describe(self) -> str:
        """Return a phrase for users that says in how many rounds the rates were measured, and under
        which load.
        """
        text = f"as this machine was measured in {self.rounds} rounds"
        if not self.is_disturbed:
            return text
        return f"{text} beside others (load {self.load:.1f}): `tandem plan --measure` does it again"


def find_fingerprint() -> str:
    """Return a hash of what determines the rates: CPU, cores, memory, instruction sets, version."""
    cpu, topology = cpu_features(), read_topology()
    parts = (
        cpu.vendor,
        cpu.brand,
        *kernel_isas(),
        str(recommend_threads(topology).threads),
        str(topology.allowed_cpus),
        str(len(topology.numa_nodes)),
        str(topology.memory_total_bytes),
        __version__,
        FORMAT,
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _name_file(root: Path | None, fingerprint: str) -> Path:
    return (root or DEFAULT_ROOT).expanduser() / f"{fingerprint}.json"


def find_kept(root: Path | None = None) -> Calibration | None:
    """Return the stored calibration of this machine; None: it was not measured yet.

    A calibration with another fingerprint is of another machine, or of this one before a change.

    Args:
        root: folder of calibrations; None: the user's cache.
    """
    fingerprint = find_fingerprint()
    try:
        kept = msgspec.json.decode(_name_file(root, fingerprint).read_bytes(), type=Calibration)
    except (OSError, msgspec.DecodeError):
        return None
    return kept if kept.fingerprint == fingerprint else None


def read_calibration(root: Path | None = None, *, is_new: bool = False) -> Calibration:
    """Return the calibration of this machine: the stored one, or a new one that is then stored.

    Args:
        root: folder of calibrations; None: the user's cache. If it cannot be written, nothing is
            stored.
        is_new: True to measure even if a calibration is stored.
    """
    kept = None if is_new else find_kept(root)
    if kept is not None:
        return kept
    measured = calibrate()
    file = _name_file(root, measured.fingerprint)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch = file.with_suffix(f".{os.getpid()}.tmp")
        scratch.write_bytes(msgspec.json.format(msgspec.json.encode(measured), indent=2))
        scratch.replace(file)
    except OSError:
        pass  # The next start measures again.
    return measured


class _Bank:
    """Packed experts of one weight format, filled with constant bytes, and the measurements on
    them.
    """

    def __init__(self, name: str, pool: ThreadPool, *, hidden: int, inner: int, num: int) -> None:
        fields = find_format(name).fields
        self.size_bytes = count_expert_bytes(
            **fields, num_experts=num, hidden_size=hidden, intermediate_size=inner
        )
        raw = np.empty(self.size_bytes + 64, np.uint8)
        offset = -raw.ctypes.data % 64
        storage = raw[offset : offset + self.size_bytes]
        storage.fill(FILLER)
        self._bank = ExpertBank(
            **fields,
            num_experts=num,
            hidden_size=hidden,
            intermediate_size=inner,
            storage=storage,
        )
        self._pool, self._hidden, self._num = pool, hidden, num
        self._random = np.random.default_rng(0)
        self._weights = 3 * hidden * inner
        self._num_calls = 0

    def time_reading(self) -> float:
        """Return the bytes per second at which the threads read all packed experts, without
        computing.
        """
        seconds = _time(lambda: self._bank.read_weights(self._pool, self._num))
        return self.size_bytes / seconds

    def time_peak(self) -> float:
        """Return the speed of multiply-adds in registers, in operations per second."""
        return 2 * MACS / _time(lambda: self._bank.multiply_registers(self._pool, MACS))

    def time_token(self) -> float:
        """Return the weight bytes per second at which one token's experts are computed."""
        first = self._num_calls * TOP_K % (self._num - TOP_K + 1)
        self._num_calls += 1
        ids = np.arange(first, first + TOP_K, dtype=np.int64)[None]
        return TOP_K * self._bank.expert_bytes / self.time_forward(ids)

    def time_prompt(self) -> float:
        """Return the operations per second at which a prompt's experts are computed."""
        ids = np.stack([self._random.permutation(self._num)[:TOP_K] for _ in range(PREFILL_TOKENS)])
        seconds = self.time_forward(ids.astype(np.int64))
        return 2 * PREFILL_TOKENS * TOP_K * self._weights / seconds

    def time_forward(self, ids: NDArray[np.int64]) -> float:
        """Return the seconds that one forward call with these expert ids takes."""
        return _time(self._prepare(ids))

    def time_calls(self, ids: NDArray[np.int64]) -> float:
        """Return the mean seconds of forward calls in a row with these expert ids."""
        return _time_each(self._prepare(ids))

    def _prepare(self, ids: NDArray[np.int64]) -> Callable[[], object]:
        x = self._random.standard_normal((len(ids), self._hidden)).astype(np.float32)
        weights = np.full(ids.shape, 1 / ids.shape[1], np.float32)
        out = np.empty((len(ids), self._hidden), np.float32)
        return lambda: self._bank.forward(self._pool, x, ids, weights, out)


class _Norms:
    """Norms of a large batch of rows."""

    def __init__(self, pool: ThreadPool) -> None:
        self._pool = pool
        self._weight = TensorView(np.ones(HIDDEN, np.float32))
        self._batch = TensorView(np.ones((NORM_ROWS, HIDDEN), np.float32))
        self._normed = TensorView(np.ones((NORM_ROWS, HIDDEN), np.float32))

    def time_rows(self) -> float:
        """Return the seconds of a norm of all rows."""
        return _time_each(
            lambda: rms_norm(self._batch, self._weight, self._normed, 1e-6, None, self._pool)
        )


def _time(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _time_each(call: Callable[[], object]) -> float:
    """Return the mean seconds of calls in a row, after a first one."""
    call()
    return _time(lambda: [call() for _ in range(CALLS)]) / CALLS


class Calibrator:
    """Banks of experts on which this machine is measured, one round at a time.

    Args:
        num_experts: experts in each bank.
    """

    def __init__(self, *, num_experts: int = NUM_EXPERTS) -> None:
        self._threads = recommend_threads(read_topology()).threads
        pool = ThreadPool(self._threads)
        self._banks = {
            name: _Bank(name, pool, hidden=HIDDEN, inner=INNER, num=num_experts) for name in PEAKS
        }
        self._tiny = _Bank("int8", pool, hidden=TINY, inner=TINY, num=TOP_K)
        self._step = TinyStep(pool)
        self._norms = _Norms(pool)
        self._samples: dict[tuple[str, str], list[float]] = {}
        self._load = os.getloadavg()[0]
        self.rounds = 0

    def forget(self) -> None:
        """Discard all measurements so far; the next ``measure`` is the first round."""
        self._samples.clear()
        self.rounds = 0

    def measure(self) -> None:
        """Measure each rate of each bank (packed experts of one weight format) once, as one
        round.
        """
        self.rounds += 1
        few = np.arange(TOP_K, dtype=np.int64)[None]
        step_s = _time_each(lambda: self._step.run(0))
        self._step.run(CALLS)
        layers_s = _time(lambda: self._step.run(CALLS)) - step_s
        for what, seconds in (
            ("step", step_s),
            ("layer", max(0.0, layers_s) / CALLS),
            ("experts", self._tiny.time_calls(few)),
            ("norm", self._norms.time_rows()),
        ):
            self._samples.setdefault(("tiny", what), []).append(seconds)
        for name, bank in self._banks.items():
            for what, measure in (
                ("read", bank.time_reading),
                ("token", bank.time_token),
                ("peak", bank.time_peak),
                ("prompt", bank.time_prompt),
            ):
                self._samples.setdefault((name, what), []).append(measure())

    def sum_up(self) -> Calibration:
        """Return the medians of all rounds. The caller ensures that at least one has been
        measured.
        """
        assert self.rounds, "nothing was measured"
        cpu = cpu_features()
        read = max(self._middle(name, "read") for name in self._banks)
        isa = _name_isa(kernel_isas()[-1])
        int8_tops = self._middle("int8", "peak") / 1e12
        hardware = HardwareSpec(
            name="measured",
            title="this machine",
            processor=Processor(
                title=cpu.brand or cpu.vendor or "this machine's processor",
                cores=self._threads,
                ghz=int8_tops * 1e3 / (self._threads * OPS_PER_CYCLE[isa][1]),
                isa=isa,
                bandwidth_gbps=read / 1e9,
                bf16_tflops=self._middle("bf16", "peak") / 1e12,
                int8_tops=int8_tops,
                price_usd=0,
                price_source="not asked for",
                source="measured here",
            ),
            memory_gib=_count_memory() / GIB,
            dram_usd_per_gib=0,
            price_source="not asked for",
            source=f"measured here, {self.rounds} rounds",
        )
        compute = self._share("prompt", "peak")
        formats = {name: self._find_shares(name) for name in self._banks}
        formats["int4"] = formats["int4g32"]
        efficiencies = msgspec.structs.replace(
            read_efficiencies(),
            cpu_bandwidth=self._share("token", "read"),
            cpu_avx=compute,
            cpu_amx=compute,
            formats=formats,
            step_us=self._middle("tiny", "step") * 1e6,
            layer_us=self._middle("tiny", "layer") * 1e6,
            experts_us=self._middle("tiny", "experts") * 1e6,
            norm_ns=self._middle("tiny", "norm") / (NORM_ROWS * HIDDEN) * 1e9,
        )
        return Calibration(
            fingerprint=find_fingerprint(),
            hardware=hardware,
            efficiencies=efficiencies,
            rounds=self.rounds,
            load=self._load,
        )

    def _middle(self, name: str, what: str) -> float:
        return statistics.median(self._samples[name, what])

    def _share(self, what: str, of: str) -> float:
        """Return the median ratio of two measurements, such as a rate that kernels reach and its
        peak, over rounds and formats.
        """
        pairs = [(self._samples[n, what], self._samples[PEAKS[n], of]) for n in self._banks]
        return _divide(*(chain.from_iterable(side) for side in zip(*pairs, strict=True)))

    def _find_shares(self, name: str) -> FormatShares:
        """Return which shares of the machine's peak bandwidth and arithmetic the kernels of a
        weight format reach: medians over the rounds.
        """
        reads = zip(*(self._samples[each, "read"] for each in self._banks), strict=True)
        peaks = self._samples[PEAKS[name], "peak"]
        return FormatShares(
            bandwidth=_divide(self._samples[name, "token"], map(max, reads)),
            compute=_divide(self._samples[name, "prompt"], peaks),
        )


def _divide(reached: Iterable[float], peaks: Iterable[float]) -> float:
    """Return the median of reached / peak over the pairs of measurements, at most 1."""
    return min(1.0, statistics.median(a / b for a, b in zip(reached, peaks, strict=True)))


def calibrate(*, budget_s: float = BUDGET_S, num_experts: int = NUM_EXPERTS) -> Calibration:
    """Measure this machine, in under ten seconds if no other process loads it.

    Args:
        budget_s: seconds after which no further round begins; there are at least two rounds.
        num_experts: experts in each bank.
    """
    calibrator = Calibrator(num_experts=num_experts)
    end = time.monotonic() + budget_s
    while calibrator.rounds < ROUNDS and (calibrator.rounds < 2 or time.monotonic() < end):
        calibrator.measure()
    return calibrator.sum_up()


def _name_isa(kernel_isa: str) -> Isa:
    if kernel_isa.startswith("avx512"):
        return "avx512"
    return "amx" if kernel_isa == "amx" else "avx2"


def _count_memory() -> int:
    topology = read_topology()
    limit = topology.limits.memory_limit_bytes
    total = topology.memory_total_bytes
    return total if limit is None else min(total, limit)
