"""One GGUF file in our engine, in llama.cpp and in its fork: cases ``gguf=TYPE`` of `tandem bench
model`.

The file has the shape of `tandem bench model` and random blocks: coded from Gaussian weights once
and repeated, or random bytes for types with codebooks, for which no encoder exists here. All
matrices have one type, with the head and the embedding in Q6_K, or a mixture such as q4_k_m. Ours
computes on the file's own codes. Before a time counts, our logits must be near each peer's, or,
without peers, near those of the decoded file.
"""

import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig

from tandem import _native
from tandem.bench.harness import BenchCase, time_call
from tandem.bench.rivals.llama_rivals import PEERS, LlamaCpp, install_llama
from tandem.bench.serving.driver import EngineDriver, Phase
from tandem.core.errors import UnsupportedError
from tandem.models.codecs.gguf_blocks import BLOCK_TYPES, dequantize
from tandem.models.codecs.gguf_quantizers import QUANTIZED_TYPES, quantize_rows
from tandem.models.gguf.metadata import make_metadata, read_sizes
from tandem.models.gguf.mixtures import MIXTURES, choose_types
from tandem.models.gguf.origins import list_tensors
from tandem.models.gguf.vocabulary import NO_VOCABULARY
from tandem.models.planning.planner import describe_model, plan_model
from tandem.models.sources.gguf_header import BLOCK_SIZES
from tandem.models.sources.gguf_writer import PlannedTensor, write_gguf

__all__ = ["KINDS", "SHAPE", "make_stored_cases", "write_random_gguf"]

KINDS = (
    *("q4_0", "q4_k", "q5_k", "q6_k", "iq4_xs", "q4_k_m", "q2_k", "q3_k"),
    *("iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s"),
)
"""Types of all matrices, and mixtures of types; a file of one type has its head in Q6_K."""
QUICK_KINDS = ("q4_k_m", "iq2_xs")
SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 32_000,
}
"""Shape of Qwen3-30B-A3B with six of its 48 layers."""
QUICK_SHAPE = SHAPE | {
    "hidden_size": 256,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 512,
}
DECODE_CONTEXT, SPARE, PREFILL = 128, 64, 512
BATCHES = (1, 16)
LARGEST_ERROR = 0.1
"""Largest allowed norm of the difference from another program's logits for the same file: the other
program quantises activations in other groups.
"""
POOL_BLOCKS = 4096
HALF_AT = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}
"""Byte offsets of the fp16 numbers in a block, by type; other types have them at the start."""


def write_random_gguf(path: Path, shape: Mapping[str, int], kind: str) -> None:
    """Write a qwen3_moe model of random blocks.

    Args:
       path: the new file.
       shape: fields of the model's configuration.
       kind: one of ``KINDS``.
    """
    config = AutoConfig.for_model(
        "qwen3_moe", **shape, max_position_embeddings=4096, norm_topk_prob=True, dtype="bfloat16"
    )
    mixture = MIXTURES.get(kind, MIXTURES["q4_k_m"])
    shapes = list_tensors(config)
    kinds = choose_types(mixture, read_sizes(config), shapes)
    if kind.upper() in BLOCK_TYPES:
        wide = ("token_embd.weight", "output.weight")
        for name, chosen in kinds.items():
            if chosen != "F32":
                kinds[name] = "Q6_K" if name in wide else kind.upper()
    planned = [PlannedTensor(name, kinds[name], size) for name, size in shapes.items()]
    metadata = make_metadata(config, "random", mixture.file_type) | NO_VOCABULARY
    blocks = _RandomBlocks()
    with path.open("wb") as file:
        write_gguf(file, metadata, planned, blocks.make)


class _RandomBlocks:
    """Makes random bytes for the tensors of a GGUF file: norms are 1, and matrices keep the size of
    activations.
    """

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)
        self._pools: dict[tuple[str, int], NDArray[np.uint8]] = {}

    def make(self, tensor: PlannedTensor) -> NDArray[np.uint8]:
        """Return the bytes of a tensor."""
        if len(tensor.shape) == 1:
            return np.ones(tensor.shape, np.float32).view(np.uint8)
        if tensor.kind == "F32":
            values = self._rng.normal(scale=tensor.shape[-1] ** -0.5, size=tensor.shape)
            return values.astype(np.float32).reshape(-1).view(np.uint8)
        key = (tensor.kind, tensor.shape[-1])
        if key not in self._pools:
            self._pools[key] = self._draw(*key)
        pool = self._pools[key]
        count = tensor.size_bytes // pool.shape[1]
        return pool[self._rng.integers(0, len(pool), count, dtype=np.int32)]

    def _draw(self, kind: str, inputs: int) -> NDArray[np.uint8]:
        """Return random blocks [N, bytes] with weights scaled for ``inputs`` inputs."""
        weights, size = BLOCK_SIZES[kind]
        std = inputs**-0.5
        if kind in QUANTIZED_TYPES:
            values = self._rng.normal(scale=std, size=(POOL_BLOCKS, weights))
            return quantize_rows(kind, values.astype(np.float32))
        raw = self._rng.integers(0, 256, (POOL_BLOCKS, size), dtype=np.uint8)
        one = np.array([1.0], "<f2").view(np.uint8)
        for at in HALF_AT.get(kind, (0,)):
            raw[:, at : at + 2] = one
        scale = np.array([std / dequantize(kind, raw).std()], "<f2").view(np.uint8)
        for at in HALF_AT.get(kind, (0,)):
            raw[:, at : at + 2] = scale
        return raw


class _Stored:
    """One GGUF file; our engine and each peer load it for the first case that needs it."""

    def __init__(self, folder: Path, shape: Mapping[str, int], kind: str) -> None:
        self._folder = folder
        self._shape = shape
        self._kind = kind
        self._ours: EngineDriver | None = None
        self._peers: dict[str, tuple[int, LlamaCpp]] = {}

    @cached_property
    def path(self) -> Path:
        path = self._folder / f"{self._kind}.gguf"
        write_random_gguf(path, self._shape, self._kind)
        return path

    @cached_property
    def threads(self) -> int:
        return _native.recommend_threads(_native.read_topology()).threads

    @cached_property
    def bandwidth(self) -> torch.Tensor:
        """A tensor that is read to measure the bandwidth, far larger than a cache."""
        return torch.ones(64 << 20, dtype=torch.float32)

    def ours(self) -> EngineDriver:
        if self._ours is None:
            self._ours = EngineDriver(self.path, "bfloat16")
        return self._ours

    def peer(self, name: str, batch: int) -> LlamaCpp:
        found = self._peers.get(name)
        if found is None or found[0] != batch:
            if found is not None:
                found[1].close()
            context_len = (DECODE_CONTEXT if batch > 1 else PREFILL) + SPARE
            model = LlamaCpp(self.path, name, self.threads, context_len, batch)
            self._peers[name] = (batch, model)
        return self._peers[name][1]

    def close(self) -> None:
        self._ours = None
        for _, model in self._peers.values():
            model.close()
        self._peers.clear()

    def case(self, phase: Phase, tokens: int, batch: int, peers: list[str]) -> BenchCase:
        prompts: list[list[int]] = []

        def check() -> str:
            generator = torch.Generator().manual_seed(tokens * batch)
            drawn = torch.randint(
                0, self._shape["vocab_size"], (batch, tokens), generator=generator
            )
            prompts[:] = drawn.tolist()
            prompt = prompts[0][:64]
            got = self.ours().score(prompt)
            self.ours().measure(phase, prompts)
            if not peers:
                decoded = EngineDriver(self.path, "bfloat16", "bf16", "bf16")
                return _judge("the decoded file", got, decoded.score(prompt))
            verdicts = [_judge(name, got, self.peer(name, batch).score(prompt)) for name in peers]
            return next((verdict for verdict in verdicts if verdict != "ok"), "ok")

        words = f"tokens={tokens}" if phase == "prefill" else f"batch={batch}"

        def measure(name: str) -> Any:
            return lambda: self.peer(name, batch).measure(phase, prompts)

        return BenchCase(
            name=f"gguf={self._kind} phase={phase} {words}",
            unit="ms",
            ours=lambda: self.ours().measure(phase, prompts),
            check=check,
            rivals={name: measure(name) for name in peers} or None,
            ceiling=(lambda: self._measure_reading(batch)) if phase == "decode" else None,
        )

    def _measure_reading(self, batch: int) -> float:
        """Return the milliseconds of reading a decode step's weights, from one measurement of the
        bandwidth.
        """
        torch.set_num_threads(self.threads)
        seconds_per_byte = time_call(self.bandwidth.sum) / self.bandwidth.nbytes
        spec, plan = describe_model(self.path), plan_model(self.path)
        share = 1 - (1 - spec.top_k / spec.num_experts) ** batch
        others = sum(m.size_bytes for m in plan.matrices if m.role not in ("experts", "embedding"))
        return (plan.expert_bytes * share + others) * seconds_per_byte * 1e3


def _judge(name: str, got: torch.Tensor, want: torch.Tensor) -> str:
    """Compare logits by the median token: a token whose experts nearly tie may choose others."""
    error = ((got - want).norm(dim=-1) / want.norm(dim=-1)).median().item()
    return "ok" if error < LARGEST_ERROR else f"logits of {name} differ by {error:.4f}"


def _find_peers() -> Iterator[str]:
    """Yield the peers that can be installed; log the reason for each that cannot."""
    for name in PEERS:
        try:
            install_llama(name)
        except UnsupportedError as error:
            sys.stderr.write(f"gguf cases without {name}: {error.what}\n")
        else:
            yield name


def make_stored_cases(*, quick: bool, with_peers: bool = False) -> Iterator[BenchCase]:
    """Yield the cases, type by type.

    Args:
       quick: a tiny model and two types.
       with_peers: llama.cpp and its fork are measured in the same rounds.
    """
    shape = QUICK_SHAPE if quick else SHAPE
    peers = list(_find_peers()) if with_peers else []
    for kind in QUICK_KINDS if quick else KINDS:
        with ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            bench = _Stored(scratch, shape, kind)
            stack.callback(bench.close)
            for batch in BATCHES:
                yield bench.case("decode", DECODE_CONTEXT, batch, peers)
            yield bench.case("prefill", PREFILL, 1, peers)
