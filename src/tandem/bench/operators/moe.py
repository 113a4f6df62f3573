"""`tandem bench moe`: packed experts against torch, and against the limits of the machine.

A case is one MoE layer of a known model with random routing. Of a small layer some experts are made
in several copies used in turn, so that the caches do not hold the weights of the next call; of a
large layer as many experts as fit into half of the free memory together with the rivals' copies.
The rival is torch, which computes one expert after the other on the tokens that chose it, in bf16
or fp32, on one thread or on as many as ours, whichever is the fastest for the case. With
``--with-peers`` the rival is kt-kernel in the format nearest to ours, from the same weights, with
one worker or as many as our threads: on shared cores its workers spin against each other and one
worker may be faster. Set OMP_WAIT_POLICY=PASSIVE on shared cores, or torch's threads spin too and
lose more than the kernels differ by.

The ceiling is the slower of reading the packed bytes of the chosen experts once and doing as many
multiply-adds on operands in registers, with the instruction that the format's kernel uses. It is
measured on another layer, if there is one, in the same rounds.
"""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from safetensors.torch import load_file, save_file

from tandem._native import ThreadPool, cpu_features, read_topology, recommend_threads
from tandem.bench.harness import BenchCase
from tandem.bench.operators.rotation import Kind, list_kinds, make_rotation_case, time_torch
from tandem.bench.rivals.isa import list_kt_settings
from tandem.bench.rivals.processes import RivalProcess, install_rival
from tandem.kernels.cpu.experts import PackedExperts
from tandem.kernels.weights.formats import find_format

__all__ = ["make_cases"]


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer: hidden and intermediate size, experts per token, experts of the model."""

    name: str
    hidden: int
    inner: int
    top_k: int
    num_experts: int


SHAPES = [
    Shape("qwen3-30b-a3b", 2048, 768, 8, 128),
    Shape("deepseek-v3", 7168, 2048, 8, 256),
    Shape("kimi-k2", 7168, 2048, 8, 384),
    Shape("mixtral", 4096, 14336, 2, 8),
]
LAYER_WEIGHTS = 80 * 10**6
"""Weights of one layer, unless top_k experts have more: 16 experts of Qwen3-30B-A3B."""
TOTAL_WEIGHTS = 200 * 10**6
"""Fewest weights of all layers used in turn: 125 MB at 4 bits, most of which does not fit into a
cache of 32 MB.
"""
WEIGHT_BYTES, PEER_WEIGHT_BYTES = 8, 6
"""Bytes per weight: the rival's in fp32 and bf16 with ours in up to 16 bits; and a peer's, whose
file is in the page cache and copied by each of its processes.
"""
MEMORY_SHARE = 0.5
"""Share of the free memory that all weights of a case may take."""
FORMATS = {
    "int8g128": 0.021,
    "int4g32": 0.145,
    "f32": 1e-5,
    "bf16": 0.005,
    "fp8": 0.05,
    "fp8row": 0.05,
    "mxfp4": 0.25,
    "int8row": 0.03,
}
"""Largest allowed error of a result relative to float32, by weight format, on these Gaussian
weights.
"""
QUICK_FORMATS = ("int8g128", "int4g32", "bf16")
KT_KINDS = {"int8g128": "int8", "int4g32": "int4", "bf16": "bf16"}
"""kt-kernel's format nearest to each of ours; its integer formats have one scale per row."""
KT_NARROW = ("bf16",)
"""Formats that kt-kernel's AVX2 variant can pack; it reads integer formats only from packed
checkpoints.
"""
KT_LARGEST_ERROR = {"int8g128": 0.04, "int4g32": 0.35, "bf16": 0.008}
"""Largest allowed error of kt-kernel's result by our format; 0.028, 0.28 and 0.004 were
measured.
"""
KT_REQUIREMENTS = (
    "torch==2.13.0",
    "safetensors",
    "gguf",
    "typer",
    "rich",
    "pyyaml",
    "httpx",
    "packaging",
    "psutil",
)
KT_VERSION = "kt-kernel==0.7.2"
TOKENS = (1, 4, 16, 64, 256, 2048, 4096)
QUICK_TOKENS = (1, 16, 256)


def list_kt_kinds() -> tuple[str, ...]:
    """Return our formats for which kt-kernel has a counterpart on this machine and under the cap of
    its instruction set.
    """
    return tuple(KT_KINDS) if cpu_features().avx512bw else KT_NARROW


def count_experts(shape: Shape, free_bytes: int, *, has_peers: bool) -> int:
    """Return how many experts of this shape fit here; at least as many as a token uses."""
    weights = 3 * shape.hidden * shape.inner
    if shape.top_k * weights <= LAYER_WEIGHTS:
        return min(shape.num_experts, LAYER_WEIGHTS // weights)
    weight_bytes = WEIGHT_BYTES + (PEER_WEIGHT_BYTES if has_peers else 0)
    held = int(free_bytes * MEMORY_SHARE) // (weights * weight_bytes)
    return max(shape.top_k, min(shape.num_experts, held))


@dataclass
class _Batch:
    """The inputs of one call of a layer's experts: x [T, D], ids [T, K], router weights [T, K]."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    @property
    def num_active(self) -> int:
        return len(self.ids.unique())


class _TorchExperts:
    """The rival, a layer's experts in torch: weights [E, 2 F, D] and [E, D, F] in one dtype."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, dtype: torch.dtype) -> None:
        self._gate_up, self._down = gate_up.to(dtype), down.to(dtype)

    @torch.inference_mode()
    def forward(self, batch: _Batch) -> torch.Tensor:
        x = batch.x.to(self._gate_up.dtype)
        out = torch.zeros(x.shape, dtype=torch.float32)
        for expert in batch.ids.unique().tolist():
            tokens, slots = torch.where(batch.ids == expert)
            gate, up = F.linear(x[tokens], self._gate_up[expert]).chunk(2, -1)
            y = F.linear(F.silu(gate) * up, self._down[expert]).float()
            out.index_add_(0, tokens, y * batch.weights[tokens, slots, None])
        return out


class _KtKernel:
    """kt-kernel with the layers of one shape in one format; one process per number of threads.

    Args:
       folder: files with weights and batches are exchanged here.
       name: our format.
       shape: sizes of the layers.
       kinds: the variants of the rival to start.
    """

    def __init__(self, folder: Path, name: str, shape: Shape, kinds: list[Kind]) -> None:
        self._folder = folder
        self._stack = ExitStack()
        python = install_rival("kt-kernel", KT_REQUIREMENTS, bare=[KT_VERSION])
        settings = list_kt_settings()
        self._processes = {
            kind: self._stack.enter_context(
                RivalProcess(python, "kt_kernel_rival.py", str(kind[1]), settings=settings)
            )
            for kind in kinds
        }
        paths = sorted(map(str, folder.glob("layer-*")))
        for process in self._processes.values():
            process.call(
                "load",
                paths=paths,
                kind=KT_KINDS[name],
                top_k=shape.top_k,
                max_tokens=max(TOKENS),
            )
        self._batches: list[_Batch] = []

    def take(self, batches: list[_Batch]) -> None:
        """Give the peer (kt-kernel) a batch of inputs for each layer, unless it has them
        already.
        """
        if self._batches is batches:
            return
        self._batches = batches
        paths = [str(self._folder / f"batch-{i:02}.safetensors") for i in range(len(batches))]
        for path, batch in zip(paths, batches, strict=True):
            tensors = {"x": batch.x.bfloat16(), "ids": batch.ids, "weights": batch.weights}
            save_file({key: value.contiguous() for key, value in tensors.items()}, path)
        for process in self._processes.values():
            process.call("take", paths=paths)

    def run(self, nth: int, kind: Kind) -> float:
        """Return the seconds of one call of layer ``nth``, by the variant ``kind`` of kt-kernel."""
        return self._processes[kind].call("run", nth=nth)

    def compute(self, kind: Kind) -> torch.Tensor:
        """Return the result of the first layer for its batch, by the variant ``kind`` of
        kt-kernel.
        """
        path = str(self._folder / "out.safetensors")
        self._processes[kind].call("run", nth=0)
        self._processes[kind].call("save", path=path)
        return load_file(path)["out"].float()

    def close(self) -> None:
        self._stack.close()


class _Layers:
    """Random layers of one shape; the rival's copies in both dtypes, ours in one format.

    Args:
       shape: sizes of each layer.
       pool: our threads.
       folder: files for peers; None for no peers.
    """

    def __init__(self, shape: Shape, pool: ThreadPool, folder: Path | None) -> None:
        self.shape = shape
        self.pool = pool
        self._folder = folder
        self._generator = torch.Generator().manual_seed(0)
        weights = 3 * shape.hidden * shape.inner
        free_bytes = read_topology().memory_available_bytes
        self.num_experts = count_experts(shape, free_bytes, has_peers=folder is not None)
        self.num_layers = -(-TOTAL_WEIGHTS // (self.num_experts * weights))
        self.layers = [self._make_layer() for _ in range(self.num_layers)]
        self.rivals = {
            dtype: [_TorchExperts(*layer, dtype) for layer in self.layers]
            for dtype in (torch.bfloat16, torch.float32)
        }
        if folder is not None:
            self._write(folder)
        self._kt: tuple[str, _KtKernel] | None = None
        self._ours: tuple[str, list[PackedExperts]] = ("", [])

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator)

    def _make_layer(self) -> tuple[torch.Tensor, torch.Tensor]:
        count, hidden, inner = self.num_experts, self.shape.hidden, self.shape.inner
        gate_up = self._normal(count, 2 * inner, hidden) / hidden**0.5
        return gate_up, self._normal(count, hidden, inner) / inner**0.5

    def _write(self, folder: Path) -> None:
        """Write the layers' weights to a file in ``folder`` for the peers (rival libraries in
        processes of their own).
        """
        for path in folder.glob("layer-*"):
            path.unlink()
        for i, (gate_up, down) in enumerate(self.layers):
            gate, up = gate_up.chunk(2, 1)
            tensors = {"gate": gate, "up": up, "down": down}
            tensors = {key: value.bfloat16().contiguous() for key, value in tensors.items()}
            save_file(tensors, folder / f"layer-{i:02}.safetensors")

    def list_kinds(self, name: str) -> list[Kind]:
        """Return the rivals of a format: kt-kernel's variants, or torch's if kt-kernel lacks the
        format.
        """
        if self._folder is None or name not in list_kt_kinds():
            return list_kinds(self.rivals, self.pool.num_threads)
        return list_kinds([f"kt-kernel {KT_KINDS[name]}"], self.pool.num_threads)

    def kt_kernel(self, name: str, batches: list[_Batch]) -> _KtKernel:
        """Return the peer in the format nearest to ours, with the batches of a case."""
        assert self._folder is not None
        if self._kt is None or self._kt[0] != name:
            self.close()  # Two formats at once may not fit.
            peer = _KtKernel(self._folder, name, self.shape, self.list_kinds(name))
            self._kt = (name, peer)
        self._kt[1].take(batches)
        return self._kt[1]

    def close(self) -> None:
        """End the processes of the peer (kt-kernel); idempotent."""
        if self._kt is not None:
            self._kt[1].close()
            self._kt = None

    def make_batch(self, num_tokens: int) -> _Batch:
        scores = torch.rand(num_tokens, self.num_experts, generator=self._generator)
        weights, ids = scores.topk(self.shape.top_k)
        x = self._normal(num_tokens, self.shape.hidden)
        return _Batch(x, ids, weights / weights.sum(-1, True))

    def pack(self, name: str) -> list[PackedExperts]:
        if self._ours[0] != name:
            self._ours = ("", [])  # Freed before the next ones are made.
            weight_format = find_format(name)
            pack = PackedExperts.pack
            ours = [pack(weight_format, *layer, pool=self.pool) for layer in self.layers]
            self._ours = (name, ours)
        return self._ours[1]


class _Bench:
    """State that the cases share: the layers of one shape at a time, made by the check of the
    shape's first case.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._pool = ThreadPool(recommend_threads(read_topology()).threads)
        self._layers: _Layers | None = None

    def find(self, shape: Shape) -> _Layers:
        if self._layers is None or self._layers.shape != shape:
            self.close()
            self._layers = _Layers(shape, self._pool, self._folder)
        return self._layers

    def close(self) -> None:
        """Free the layers, so that the next ones fit, and end the peer (kt-kernel)."""
        if self._layers is not None:
            self._layers.close()
            self._layers = None


@dataclass(frozen=True, slots=True)
class _Turns:
    """The layers of a case's shape, which are called in turn so that no cache holds them, each with
    a batch of its own.
    """

    layers: _Layers
    name: str
    batches: list[_Batch]

    @property
    def count(self) -> int:
        return self.layers.num_layers

    @property
    def kinds(self) -> list[Kind]:
        return self.layers.list_kinds(self.name)

    def find(self, nth: int) -> PackedExperts:
        return self.layers.pack(self.name)[nth]

    def run(self, nth: int) -> torch.Tensor:
        batch = self.batches[nth]
        return self.find(nth).forward(batch.x, batch.ids, batch.weights)

    def time_rival(self, nth: int, kind: Kind) -> float:
        rival = kind[0]
        if isinstance(rival, str):
            return self.layers.kt_kernel(self.name, self.batches).run(nth, kind)
        layer = self.layers.rivals[rival][nth]
        return time_torch(kind, lambda: layer.forward(self.batches[nth]))

    def check_rival(self, kind: Kind) -> str:
        if not isinstance(kind[0], str):
            return ""  # torch's own result is what ours is checked against.
        error = self._compare(self.layers.kt_kernel(self.name, self.batches).compute(kind))
        allowed = KT_LARGEST_ERROR[self.name]
        return "" if error <= allowed else f"{kind[0]}: relative error {error:.4f} over {allowed}"

    def find_idle(self, nth: int) -> int:
        # The layer that was used last is read, since its next use is farthest away: ours then finds
        # none of its weights in the caches because of this read.
        return (nth - 1) % self.count

    def read_all(self, nth: int) -> None:
        self.find(nth).read_weights(self.layers.num_experts)

    def read(self, idle: int, nth: int) -> None:
        self.find(idle).read_weights(self.batches[nth].num_active)

    def multiply(self, nth: int) -> None:
        shape, num_tokens = self.layers.shape, len(self.batches[nth].x)
        macs = num_tokens * shape.top_k * 3 * shape.hidden * shape.inner
        self.find(nth).multiply_registers(macs)

    def measure_error(self) -> float:
        return self._compare(self.run(0))

    def _compare(self, got: torch.Tensor) -> float:
        torch.set_num_threads(self.layers.pool.num_threads)
        want = self.layers.rivals[torch.float32][0].forward(self.batches[0])
        return float((got - want).norm() / want.norm())


def _make_case(bench: _Bench, shape: Shape, name: str, num_tokens: int) -> BenchCase:
    batches: list[_Batch] = []

    def find() -> _Turns:
        layers = bench.find(shape)
        if not batches:
            batches.extend(layers.make_batch(num_tokens) for _ in range(layers.num_layers))
        return _Turns(layers, name, batches)

    return make_rotation_case(
        f"op=moe format={name} shape={shape.name} tokens={num_tokens}",
        num_tokens=num_tokens,
        largest_error=FORMATS[name],
        find=find,
    )


def make_cases(*, quick: bool, with_peers: bool = False) -> Iterator[BenchCase]:
    """Yield the cases, shape by shape and format by format.

    Args:
       quick: fewer shapes, formats and batches.
       with_peers: the baseline is kt-kernel if it has the format; it is installed if need be.
    """
    with ExitStack() as stack:
        folder = None
        if with_peers:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bench = _Bench(folder)
        stack.callback(bench.close)
        for shape in SHAPES[:1] if quick else SHAPES:
            for name in QUICK_FORMATS if quick else FORMATS:
                for num_tokens in QUICK_TOKENS if quick else TOKENS:
                    yield _make_case(bench, shape, name, num_tokens)
