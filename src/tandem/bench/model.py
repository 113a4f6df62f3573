"""`tandem bench model`: six layers of a large MoE model with experts in each weight format.

The shape is Qwen3-30B-A3B's with six of its 48 layers and a vocabulary of 32,000, random weights:
large enough that no cache holds it, small enough for a laptop. Ours is whole engine steps; the
rival is transformers in bfloat16 with grouped experts. Logits must be near those of the same
format's plain arithmetic before a time counts: near the rival's, as far as the format's own error.

The ceiling of a decode step is reading, once, the packed bytes of the distinct experts that its
tokens choose and all other weights, at the speed at which a bank of experts is read; that of a
prefill is left to `tandem bench kernels`, whose operators bound it.
"""

import json
import tempfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig
from transformers.utils.logging import disable_progress_bar

from tandem import _native
from tandem.bench.driver import EngineDriver, Phase, TransformersDriver
from tandem.bench.harness import BenchCase, time_call
from tandem.core.errors import CapacityError
from tandem.core.spec import ModelSpec
from tandem.models.families import describe_model
from tandem.models.precision import plan_experts
from tandem.models.skeleton import build_skeleton

__all__ = ["make_cases"]

FORMATS = ("int8g128", "int4g32", "bf16")
LARGEST_ERROR = {"int8g128": 0.06, "int4g32": 0.35, "bf16": 0.03}
"""Of a token's logits against the rival's, as a norm relative to theirs: the format's own error of
one layer (0.021, 0.145, 0.005), over six layers whose errors add as random ones do, and bfloat16's
in everything else."""
DECODE_CONTEXT = 128
PREFILLS, BATCHES = (128, 512, 2048), (1, 4, 16)
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
QUICK_SHAPE = SHAPE | {
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 512,
}


class _Bench:
    """One random model; each side is loaded when the first case needs it, one format at a time."""

    def __init__(self, folder: Path, shape: dict[str, int]) -> None:
        self._folder = folder
        self._shape = shape
        self._ours: tuple[str, EngineDriver] | None = None

    @cached_property
    def folder(self) -> Path:
        _write_model(self._folder, self._shape)
        return self._folder

    @cached_property
    def spec(self) -> ModelSpec:
        return describe_model(self.folder)

    @cached_property
    def threads(self) -> int:
        return _native.recommend_threads(_native.read_topology()).threads

    @cached_property
    def rival(self) -> TransformersDriver:
        return TransformersDriver(self.folder, "grouped_mm", "bfloat16")

    @cached_property
    def bandwidth(self) -> torch.Tensor:
        """Bytes to read, far more than a cache holds."""
        return torch.ones(64 << 20, dtype=torch.float32)

    def ours(self, weight_format: str) -> EngineDriver:
        if self._ours is None or self._ours[0] != weight_format:
            self._ours = None  # Two formats at once may not fit.
            driver = EngineDriver(self.folder, "bfloat16", weight_format)
            self._ours = (weight_format, driver)
        return self._ours[1]

    def case(self, weight_format: str, phase: Phase, tokens: int, batch: int) -> BenchCase:
        prompts: list[list[int]] = []

        def check() -> str:
            generator = torch.Generator().manual_seed(tokens * batch)
            shape = (batch, tokens)
            vocab_size = self._shape["vocab_size"]
            prompts[:] = torch.randint(0, vocab_size, shape, generator=generator).tolist()
            got = self.ours(weight_format).score(prompts[0][:64])
            want = self.rival.score(prompts[0][:64])
            error = ((got - want).norm(dim=-1) / want.norm(dim=-1)).median().item()
            if not error < LARGEST_ERROR[weight_format]:
                return f"logits differ by {error:.4f}"
            self.ours(weight_format).measure(phase, prompts)
            return "ok"

        words = f"tokens={tokens}" if phase == "prefill" else f"batch={batch}"
        is_decode = phase == "decode"
        return BenchCase(
            name=f"format={weight_format} phase={phase} {words}",
            unit="ms",
            ours=lambda: self.ours(weight_format).measure(phase, prompts),
            check=check,
            baseline=lambda: self.rival.measure(phase, prompts, self.threads),
            baseline_name=f"{self.rival_name} threads={self.threads}",
            ceiling=(lambda: self._measure_reading(weight_format, batch)) if is_decode else None,
        )

    @property
    def rival_name(self) -> str:
        return "transformers grouped_mm bfloat16"

    def _measure_reading(self, weight_format: str, batch: int) -> float:
        """Milliseconds that reading a decode step's weights takes, from one reading just now."""
        torch.set_num_threads(self.threads)
        seconds_per_byte = time_call(self.bandwidth.sum) / self.bandwidth.nbytes
        spec = self.spec
        packed = plan_experts(spec, weight_format, "cpu")
        share = 1 - (1 - spec.top_k / spec.num_experts) ** batch
        # The embedding's table is not read but for a row.
        others = spec.weight_bytes - packed.plain_bytes - 2 * spec.vocab_size * spec.hidden_size
        return (packed.size_bytes * share + others) * seconds_per_byte * 1e3


def make_cases(*, quick: bool) -> Iterator[BenchCase]:
    """Yield the cases, a format after the other; ``quick`` takes a tiny model and the ends."""
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        bench = _Bench(Path(scratch), QUICK_SHAPE if quick else SHAPE)
        if not quick:
            _check_memory()
        for weight_format in FORMATS:
            for batch in BATCHES[::2] if quick else BATCHES:
                yield bench.case(weight_format, "decode", DECODE_CONTEXT, batch)
            for tokens in PREFILLS[:1] if quick else PREFILLS:
                yield bench.case(weight_format, "prefill", tokens, 1)


def _check_memory() -> None:
    """Refuse where both models, 7 GB in bfloat16 each, would not fit."""
    needed, free = 17 << 30, _native.read_topology().memory_available_bytes
    if free < needed:
        raise CapacityError(
            "bench.model", f"{free >> 20} MiB of memory free: two models need {needed >> 20}"
        )


def _write_model(folder: Path, shape: dict[str, int]) -> None:
    """Write a checkpoint of random bfloat16 weights, a layer a file."""
    config = AutoConfig.for_model(
        "qwen3_moe", **shape, max_position_embeddings=4096, norm_topk_prob=True, dtype="bfloat16"
    )
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, meta in build_skeleton(config).state_dict().items():
        parts = name.split(".")
        file = f"{parts[2]:>02}" if parts[1] == "layers" else "rest"
        # Norms of one, matrices that keep the size of what passes through.
        weight = torch.ones(meta.shape, dtype=torch.bfloat16)
        if meta.dim() > 1:
            weight.normal_(0, meta.shape[-1] ** -0.5, generator=generator)
        files.setdefault(f"model-{file}.safetensors", {})[name] = weight
    for file, tensors in files.items():
        save_file(tensors, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
