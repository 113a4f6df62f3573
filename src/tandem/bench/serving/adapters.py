"""Serving LoRA adapters against the model without adapters: cases of `tandem bench engine`.

One engine runs a dense model with random bfloat16 weights, since each token reads all of its
matrices and adapters add the most there, with adapters of rank 16 on all projections. A batch of 16
requests, two for each of eight adapters, is measured in turn with a batch of 16 without adapters.
The check is that a request in the mixed batch gets the same tokens as alone.
"""

import tempfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import msgspec
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tandem.bench.harness import BenchCase
from tandem.bench.serving.driver import EngineDriver, Phase
from tandem.models.adapter_files import AdapterFiles, LoraWeights

__all__ = ["make_adapter_cases"]

NUM_ADAPTERS = 8
RANK = 16
NUM_REQUESTS = 16
PROMPT_LEN = 128
CHECK_TOKENS = 8


class _Served:
    """Our engine with its LoRA adapters, loaded for the first case."""

    def __init__(self, folder: Path, *, quick: bool) -> None:
        self._folder = folder
        self._quick = quick

    @cached_property
    def prompts(self) -> list[list[int]]:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(3, 512, (NUM_REQUESTS, PROMPT_LEN), generator=generator).tolist()

    @cached_property
    def driver(self) -> EngineDriver:
        _write_model(self._folder, quick=self._quick)
        return EngineDriver(self._folder, "bfloat16", num_adapters=NUM_ADAPTERS)

    @cached_property
    def adapters(self) -> list[str]:
        """Digest that names the LoRA adapter of each request."""
        table = self.driver.adapters
        generator = torch.Generator().manual_seed(1)
        digests: list[str] = []
        for i in range(NUM_ADAPTERS):
            modules = {
                name: LoraWeights(
                    torch.randn(RANK, part.in_features, generator=generator)
                    * part.in_features**-0.5,
                    torch.randn(part.out_features, RANK, generator=generator) * RANK**-0.5,
                    1.0,
                )
                for name, part in table.modules.items()
            }
            digest = f"{i:064x}"
            table.install(AdapterFiles(modules, {}, digest))
            self.driver.engine.add_adapter(digest, msgspec.msgpack.encode(digest))
            digests.append(digest)
        return [digests[i % NUM_ADAPTERS] for i in range(NUM_REQUESTS)]

    def measure(self, phase: Phase, adapters: list[str] | None) -> float:
        """Return the tokens/s of a prefill of all prompts, or of decode steps after them."""
        num_tokens = NUM_REQUESTS * (PROMPT_LEN if phase == "prefill" else 1)
        return num_tokens / self.driver.measure(phase, self.prompts, adapters) * 1e3

    def check(self) -> str:
        """Return ``ok``, or the request whose tokens depend on the others in the batch."""
        driver = self.driver
        together = {
            driver.add(p, CHECK_TOKENS, str(i), a): i
            for i, (p, a) in enumerate(zip(self.prompts, self.adapters, strict=True))
        }
        # Requests that a measurement cancelled may still have outputs in the queue; those are
        # returned too, and ignored here.
        drained = driver.drain()
        got = {i: drained[key] for key, i in together.items()}
        for i in range(0, NUM_REQUESTS, 5):
            driver.engine.flush_cache()
            alone = driver.add(self.prompts[i], CHECK_TOKENS, "", self.adapters[i])
            if driver.drain()[alone] != got[i]:
                return f"request {i} gets other tokens alone than in company"
        return "ok"


def make_adapter_cases(*, quick: bool) -> Iterator[BenchCase]:
    """Yield the cases of serving with LoRA adapters: a decode and a prefill."""
    phases: tuple[Phase, ...] = ("decode", "prefill")
    with tempfile.TemporaryDirectory() as folder:
        served = _Served(Path(folder), quick=quick)
        for phase in phases:
            yield BenchCase(
                name=f"model=dense adapters={NUM_ADAPTERS} rank={RANK} phase={phase} "
                f"batch={NUM_REQUESTS}",
                unit="tok/s",
                ours=lambda phase=phase: served.measure(phase, served.adapters),
                baseline=lambda phase=phase: served.measure(phase, None),
                baseline_name="the model alone",
                check=served.check,
                higher_is_better=True,
            )


def _write_model(folder: Path, *, quick: bool) -> None:
    """Write a model with the layer sizes of Qwen3-0.6B, or with toy sizes."""
    size = 128 if quick else 1024
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=512,
        hidden_size=size,
        intermediate_size=3 * size,
        num_hidden_layers=2 if quick else 8,
        num_attention_heads=size // 64,
        num_key_value_heads=size // 128,
        head_dim=128,
        max_position_embeddings=1024,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
