"""Run what a usual machine cannot: ``python tools/hardware_check.py``, a row a kind of hardware.

A row is run, failed or absent. ``--stand-in`` runs the code of each row over what stands for the
hardware in tests: the fake device, the emulated tile, two parts on one node. Exit status 1 if a row
failed. The table is for ``benchmarks/``; say which machine it was.
"""

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tandem._native import DirectReader, ThreadPool, kernel_isas, read_topology
from tandem.bench.harness import run_cases
from tandem.bench.operators import hybrid
from tandem.core.clock import MonotonicClock
from tandem.core.errors import TandemError, UnsupportedError
from tandem.core.wire import AddRequest, SamplingParams
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.kernels.cpu.experts import PackedExperts
from tandem.kernels.device import Device
from tandem.kernels.fake.device import FakeDevice
from tandem.kernels.hybrid import HybridDecoder
from tandem.kernels.native import Buffer
from tandem.kernels.weights.formats import find_format
from tandem.models.config import ModelConfig
from tandem.models.loading.expert_disk import measure_reads

STEPS = 20
NUM_EXPERTS, HIDDEN, INNER, TOP_K, NUM_LAYERS = 16, 128, 64, 4, 4
ROOT = Path(__file__).parent.parent
TESTS_TIMEOUT_S = 600
GPU_MARK = "pytest.mark.gpu"
INFINIBAND = Path("/sys/class/infiniband")


class Row(NamedTuple):
    """One kind of hardware."""

    name: str
    find: Callable[[], str]
    """Returns what is missing; empty: it is here."""
    run: Callable[[bool], str]
    """Checks it, over a stand-in if told so; returns what was found. Raises what is wrong."""


class Outcome(NamedTuple):
    """A row of the table."""

    name: str
    state: str
    detail: str


def find_gpu() -> str:
    """Return why there is no GPU to use."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    return ""


def open_gpu(*, stand_in: bool) -> Device:
    """Return the GPU, or what stands for it."""
    if stand_in:
        return FakeDevice()
    from tandem.kernels.cuda.device import CudaDevice

    return CudaDevice("cuda:0")


def close(device: Device) -> None:
    """End what a stand-in has."""
    if isinstance(device, FakeDevice):
        device.close()


def check_graph(stand_in: bool) -> str:
    """Capture copies, operators and host functions; launch them many times."""
    device = open_gpu(stand_in=stand_in)
    try:
        source, target = (device.allocate_staging(1024).view(torch.float32) for _ in range(2))
        there = device.allocate(1024).view(torch.float32)
        stream, seen = device.make_stream(), []

        def double() -> None:
            there.mul_(2.0)

        def work() -> None:
            device.copy(source, there, stream)
            device.run(stream, double)
            device.copy(there, target, stream)
            device.call_host(stream, lambda: seen.append(float(target[0])))

        graph = device.capture(stream, work)
        for i in range(STEPS):
            source.fill_(i)
            device.launch(graph, stream)
            stream.synchronize()
        wanted = [2.0 * i for i in range(STEPS)]
        if seen != wanted:
            raise AssertionError(f"{STEPS} launches gave {seen}, not {wanted}")

        def fail() -> None:
            raise ValueError("on purpose")

        device.call_host(stream, fail)
        try:
            stream.synchronize()
        except ValueError:
            return f"{STEPS} launches, a host function's error raised"
        raise AssertionError("the error of a host function was lost")
    finally:
        close(device)


class _Choice(NamedTuple):
    """The same as ``ExpertChoice``, of layers that are matrices."""

    x: Buffer
    ids: Buffer
    weights: Buffer


class _Step:
    """Layers of one matrix each, on the device; a router that turns by the layer."""

    def __init__(self, matrices: list[Tensor], ids: list[Tensor], weights: Tensor) -> None:
        self._matrices, self._ids, self._weights = matrices, ids, weights
        self._idx = 0
        self._hidden: Tensor | None = None

    def begin_(self) -> None:
        """Begin with the first layer."""
        self._idx = 0

    def choose_experts_(self, layer: nn.Module, x: Tensor) -> _Choice:
        """Multiply, and give the experts what came out."""
        del layer
        self._hidden = x
        x.copy_(torch.tanh(x @ self._matrices[self._idx]))
        ids = self._ids[self._idx]
        self._idx = (self._idx + 1) % len(self._matrices)
        return _Choice(Buffer(x), Buffer(ids), Buffer(self._weights))

    def run_shared_(self, choice: object) -> None:
        """Do something beside the experts that changes no value."""
        del choice
        assert self._hidden is not None
        self._hidden.mul_(1.0)

    def leave_sum_(self, out: Buffer) -> None:
        """Add the experts' sum at once."""
        assert self._hidden is not None
        self._hidden.add_(out.tensor)

    def complete_(self, x: Tensor) -> None:
        """Leave the stream as it is."""


def make_experts(pool: ThreadPool, *, isa: str | None = None, num_parts: int = 1) -> PackedExperts:
    """Return random experts in int8."""
    chance = torch.Generator().manual_seed(1)
    gate_up = torch.randn(NUM_EXPERTS, 2 * INNER * num_parts, HIDDEN, generator=chance) * 0.1
    down = torch.randn(NUM_EXPERTS, HIDDEN, INNER * num_parts, generator=chance) * 0.1
    return PackedExperts.pack(
        find_format("int8g32"),
        gate_up,
        down,
        pool=pool,
        isa=isa,
        num_parts=num_parts,
        is_bound=num_parts > 1,
    )


def check_hybrid(stand_in: bool) -> str:
    """Run steps with experts on the host: captured and not, against the same work in order."""
    pool = ThreadPool(2, oversubscribe=True)
    experts = make_experts(pool)
    chance = torch.Generator().manual_seed(2)
    host_matrices = [torch.randn(HIDDEN, HIDDEN, generator=chance) * 0.1 for _ in range(NUM_LAYERS)]
    found: list[str] = []
    for num_tokens in (1, 3, 16):
        ids = [
            torch.stack([torch.randperm(NUM_EXPERTS, generator=chance)[:TOP_K]] * num_tokens)
            for _ in range(NUM_LAYERS)
        ]
        weights = torch.full((num_tokens, TOP_K), 1 / TOP_K)
        x = torch.randn(num_tokens, HIDDEN, generator=chance)
        wanted = x.clone()
        for matrix, chosen in zip(host_matrices, ids, strict=True):
            wanted = torch.tanh(wanted @ matrix)
            wanted = wanted + experts.forward(wanted.contiguous(), chosen, weights)
        for is_captured in (True, False):
            device = open_gpu(stand_in=stand_in)
            place = torch.device("cpu") if stand_in else device.torch_device
            decoder = HybridDecoder(
                device,
                [nn.Identity() for _ in range(NUM_LAYERS)],
                [experts] * NUM_LAYERS,
                (HIDDEN, TOP_K),
                torch.float32,
                has_shared=[True] * NUM_LAYERS,
                is_captured=is_captured,
            )
            hidden = x.to(place).clone()
            step = _Step(
                [matrix.to(place) for matrix in host_matrices],
                [chosen.to(place) for chosen in ids],
                weights.to(place),
            )
            times: list[float] = []
            try:
                for _ in range(STEPS):
                    hidden.copy_(x)
                    begin = time.perf_counter()
                    decoder.run(step, None, hidden)  # type: ignore[arg-type] - layers of its own
                    times.append(time.perf_counter() - begin)
                    error = (hidden.cpu() - wanted).abs().max().item()
                    if not error < 1e-3:
                        raise AssertionError(f"{num_tokens} tokens: off by {error}")
            finally:
                decoder.close()
                close(device)
            kind = "graph" if is_captured else "eager"
            found.append(f"{num_tokens} {kind} {1e3 * statistics.median(times):.2f} ms")
    return f"{NUM_LAYERS} layers, tokens: " + ", ".join(found)


def generate(device: str, expert_device: str) -> tuple[list[list[int]], float]:
    """Return what the demo model answers to three prompts, and the seconds of a decode step."""
    config = EngineConfig(kv_cache_gib=0.05, block_size=16, max_batch_tokens=64)
    model = ModelConfig(
        path="demo",
        device=device,
        expert_device=expert_device,
        dtype="float32",
        packed_cache="off",
    )
    engine = build_engine(model, config, MonotonicClock()).engine
    for i, size in enumerate((20, 9, 70)):
        prompt = [(7 * i + 11 * j) % 100 + 5 for j in range(size)]
        sampling = SamplingParams(max_tokens=STEPS, temperature=0.0, ignore_eos=True)
        engine.add(AddRequest(request_id=str(i), prompt_ids=prompt, sampling=sampling))
    tokens: list[list[int]] = [[], [], []]
    times: list[float] = []
    while engine.has_requests:
        begin = time.perf_counter()
        outputs = engine.step()
        times.append(time.perf_counter() - begin)
        for output in outputs:
            if output.error_text is not None:
                raise AssertionError(f"request {output.request_id}: {output.error_text}")
            tokens[int(output.request_id)] += output.token_ids
    return tokens, statistics.median(times)


def check_model(stand_in: bool) -> str:
    """Serve the demo model in part and whole on the GPU; its tokens are those of the CPU."""
    device = "cpu" if stand_in else "cuda:0"
    wanted, on_cpu_s = generate("cpu", "auto")
    found = [f"CPU {1e3 * on_cpu_s:.2f} ms a step"]
    for name, expert_device in (("experts on the CPU", "cpu"), ("all on the GPU", device)):
        tokens, seconds = generate(device, expert_device)
        if tokens != wanted:
            raise AssertionError(f"{name}: tokens {tokens}, on the CPU {wanted}")
        found.append(f"{name} {1e3 * seconds:.2f} ms")
    return ", ".join(found)


def check_bench(stand_in: bool) -> str:
    """Run ``tandem bench hybrid``, few rounds of each case; tell launches and the host's share."""
    device = open_gpu(stand_in=stand_in)
    found: list[str] = []
    try:
        cases = hybrid.make_cases(quick=stand_in, device=device)
        for record in run_cases("hybrid", cases, budget_s=1.0, rounds=3):
            if record.check != "ok":
                raise AssertionError(f"{record.case}: {record.check}")
            assert record.ours is not None, record.case
            beside = "" if record.ratio is None else f" ({record.ratio:.2f}x)"
            found.append(f"{record.case} {1e3 * record.ours:.2f} ms{beside}")
        shape = hybrid.TINY if stand_in else hybrid.SHAPES[0]
        layers = hybrid.Layers(device, shape, "int4g32")
        for is_captured in (True, False):
            decode = hybrid.Decode(layers, 1, is_captured=is_captured)
            kind = "graph" if is_captured else "no graph"
            found.append(f"{kind}: {hybrid.describe_step(decode)}")
            decode.close()
    finally:
        close(device)
    return "; ".join(found)


def find_gpu_and_pytest() -> str:
    """Return why tests that need a GPU cannot run."""
    missing = find_gpu()
    if missing:
        return missing
    return "" if importlib.util.find_spec("pytest") else "pytest is not installed"


def check_tests(stand_in: bool) -> str:
    """Run the tests that are marked ``gpu``; over a stand-in, see that there are such."""
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if GPU_MARK in path.read_text()]
    if not marked:
        raise AssertionError(f"no test is marked {GPU_MARK}")
    if stand_in:
        return f"{len(marked)} files of tests"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-W", "default"]
    ran = subprocess.run(
        [*command, "-p", "no:cacheprovider", *map(str, marked)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TESTS_TIMEOUT_S,
        check=False,
    )
    lines = ran.stdout.rstrip().splitlines() or ["pytest printed nothing"]
    if ran.returncode != 0:
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        raise AssertionError("; ".join([*failed, lines[-1]]))
    return lines[-1].strip("= ")


def find_amx() -> str:
    """Return why there is no AMX."""
    return "" if "amx" in kernel_isas() else "the CPU has no AMX, or this build no kernels for it"


def check_amx(stand_in: bool) -> str:
    """Compare the tiles' sums with the plain kernels', which must be equal in int8."""
    pool = ThreadPool(1)
    isa = "amx_emulated" if stand_in else "amx"
    chance = torch.Generator().manual_seed(3)
    x = torch.randn(64, HIDDEN, generator=chance)
    ids = torch.stack([torch.randperm(NUM_EXPERTS, generator=chance)[:TOP_K] for _ in range(64)])
    weights = torch.full((64, TOP_K), 1 / TOP_K)
    plain, tiles = (make_experts(pool, isa=name) for name in ("plain", isa))
    if not torch.equal(plain.forward(x, ids, weights), tiles.forward(x, ids, weights)):
        raise AssertionError(f"{isa} and plain kernels give other sums")
    return f"{isa}: sums of 64 tokens bitwise those of plain"


def find_sockets() -> str:
    """Return why there are no two nodes of memory."""
    count = len(read_topology().numa_nodes)
    return "" if count > 1 else f"{count} NUMA node"


def check_sockets(stand_in: bool) -> str:
    """Split experts over two nodes; look where the memory is."""
    pool = ThreadPool(2, oversubscribe=True)
    nodes = pool.node_ids
    if not stand_in and len(set(nodes)) < 2:
        raise AssertionError(f"two threads lie on nodes {nodes}")
    split, whole = (make_experts(pool, num_parts=parts) for parts in (2, 2))
    chance = torch.Generator().manual_seed(4)
    x = torch.randn(8, HIDDEN, generator=chance)
    ids = torch.stack([torch.randperm(NUM_EXPERTS, generator=chance)[:TOP_K] for _ in range(8)])
    weights = torch.full((8, TOP_K), 1 / TOP_K)
    if not torch.equal(split.forward(x, ids, weights), whole.forward(x, ids, weights)):
        raise AssertionError("two runs of the same parts differ")
    try:
        places = split.find_part_nodes()
    except UnsupportedError as error:
        return f"2 parts; the kernel does not say where they lie: {error.what}"
    if not stand_in and len(set(places)) < 2:
        raise AssertionError(f"parts lie on nodes {places}")
    return f"2 parts on nodes {places}, bound: {split.is_bound}"


def find_rdma() -> str:
    """Return why there is no RDMA."""
    devices = sorted(p.name for p in INFINIBAND.iterdir()) if INFINIBAND.is_dir() else []
    return "" if devices else "no RDMA device"


def check_rdma(stand_in: bool) -> str:
    """Tell the devices; there is no transport for them."""
    devices = [] if stand_in else sorted(path.name for path in INFINIBAND.iterdir())
    return f"no transport yet; devices: {', '.join(devices) or 'none'}"


def find_disk() -> str:
    """Return nothing: every machine has a disk."""
    return ""


def check_disk(stand_in: bool) -> str:
    """Read past the page cache, as experts are, where temporary files lie (TMPDIR)."""
    size = (1 << 20) if stand_in else (256 << 20)
    with tempfile.TemporaryDirectory(prefix="tandem-check-") as folder:
        path = Path(folder) / "experts"
        path.write_bytes(bytes(range(256)) * (size // 256))
        reader = DirectReader(1 << 20)
        why = reader.direct_refusal(reader.add_file(str(path)))
        rate = measure_reads(Path(folder), min(size, 3 << 20))
    past = "past the page cache" if not why else f"through the page cache ({why})"
    return (
        f"{rate.bytes_per_s / 1e9:.2f} GB/s {past}, {reader.backend}, {rate.depth} reads of "
        f"{rate.part_bytes >> 10} KiB"
    )


ROWS = (
    Row("GPU: streams, graphs, host functions", find_gpu, check_graph),
    Row("GPU: decode with experts on the CPU", find_gpu, check_hybrid),
    Row("GPU: the demo model", find_gpu, check_model),
    Row("GPU: tests that need one", find_gpu_and_pytest, check_tests),
    Row("GPU: tandem bench hybrid", find_gpu, check_bench),
    Row("AMX", find_amx, check_amx),
    Row("two sockets", find_sockets, check_sockets),
    Row("RDMA", find_rdma, check_rdma),
    Row("disk", find_disk, check_disk),
)


def check_row(row: Row, *, stand_in: bool) -> Outcome:
    """Run a row, if its hardware is here or something stands for it."""
    missing = "" if stand_in else row.find()
    if missing:
        return Outcome(row.name, "absent", missing)
    try:
        detail = row.run(stand_in)
    except (
        TandemError,
        AssertionError,
        ArithmeticError,
        RuntimeError,
        OSError,
        ValueError,
    ) as error:
        traceback.print_exc()
        return Outcome(row.name, "failed", f"{type(error).__name__}: {error}")
    return Outcome(row.name, "run", f"stand-in: {detail}" if stand_in else detail)


def main(arguments: list[str] | None = None) -> int:
    """Print the table; return 1 if a row failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stand-in", action="store_true", help="Run over what tests use.")
    parser.add_argument("--json", action="store_true", help="Print one JSON document.")
    given = parser.parse_args(arguments)
    outcomes = [check_row(row, stand_in=given.stand_in) for row in ROWS]
    if given.json:
        sys.stdout.write(json.dumps([outcome._asdict() for outcome in outcomes]) + "\n")
    else:
        sys.stdout.write("| hardware | outcome | detail |\n|---|---|---|\n")
        for outcome in outcomes:
            sys.stdout.write(f"| {outcome.name} | {outcome.state} | {outcome.detail} |\n")
    return 1 if any(outcome.state == "failed" for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
