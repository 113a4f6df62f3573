"""`tandem bench plan`: the planner's prediction for this machine against a measurement.

Ours is an engine step of a random model with some layers of Qwen3-30B-A3B. The baseline is the
planner's time for the same step, from a calibration of the same round: bandwidth, peak rates and
our kernels' shares of them are measured again in each round, so that other load on the machine
slows both. The ratio is predicted over measured time; 1 is exact.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

import torch

from tandem.bench.harness import BenchCase
from tandem.bench.serving.driver import EngineDriver, Phase
from tandem.bench.serving.model import LINEAR_FORMATS, QUICK_SHAPE, SHAPE, write_random_model
from tandem.kernels.calibration import Calibrator
from tandem.placement.costs import Placement, decode_time, prefill_time
from tandem.placement.shape import ModelShape, read_shape

__all__ = ["make_cases"]

NUM_LAYERS = 3
"""Layers of Qwen3-30B-A3B's 48 that the model has: 3.6 GB in bf16."""
CONTEXT = 128
CASES: tuple[tuple[str, Phase, int, int], ...] = (
    ("int8g128", "decode", CONTEXT, 1),
    ("int8g128", "decode", CONTEXT, 8),
    ("int8g128", "prefill", 512, 1),
    ("int4g32", "decode", CONTEXT, 1),
    ("int4g32", "prefill", 512, 1),
    ("bf16", "decode", CONTEXT, 1),
    ("bf16", "prefill", 256, 1),
)
"""Cases as (format, phase, tokens of a prompt, sequences)."""
PLANNED_NAMES = {"int8g128": "int8", "int4g32": "int4g32", "bf16": "bf16"}
QUICK_EXPERTS = 16


class _Bench:
    """One random model, loaded in one format at a time, and the planner's description of it."""

    def __init__(self, folder: Path, shape: Mapping[str, int], num_experts: int | None) -> None:
        self._folder, self._shape, self._num_experts = folder, shape, num_experts
        self._ours: tuple[str, EngineDriver] | None = None

    @cached_property
    def folder(self) -> Path:
        write_random_model(self._folder, self._shape)
        return self._folder

    @cached_property
    def shape(self) -> ModelShape:
        return read_shape(json.loads((self.folder / "config.json").read_text()), "random")

    @cached_property
    def calibrator(self) -> Calibrator:
        if self._num_experts is None:
            return Calibrator()
        return Calibrator(num_experts=self._num_experts)

    def ours(self, weight_format: str) -> EngineDriver:
        if self._ours is None or self._ours[0] != weight_format:
            self._ours = None  # Two formats at once may not fit.
            linear = LINEAR_FORMATS["qwen3_moe"][weight_format]
            self._ours = (
                weight_format,
                EngineDriver(self.folder, "bfloat16", weight_format, linear),
            )
        return self._ours[1]

    def predict(self, weight_format: str, phase: Phase, tokens: int, batch: int) -> float:
        """Return the milliseconds that the planner predicts for a step, from rates of this machine
        that are measured now.
        """
        self.calibrator.forget()
        self.calibrator.measure()
        now = self.calibrator.sum_up()
        linear = LINEAR_FORMATS["qwen3_moe"][weight_format]
        place = Placement(
            expert_format=PLANNED_NAMES[weight_format],
            dense_format=PLANNED_NAMES[linear],
            is_dense_on_gpu=False,
            is_attention_on_gpu=False,
        )
        spec, eff = now.hardware, now.efficiencies
        if phase == "decode":
            step = decode_time(spec, self.shape, place, eff, users=batch, context=tokens)
        else:
            step = prefill_time(spec, self.shape, place, eff, tokens=tokens, users=batch)
        return step.seconds * 1e3

    def case(self, weight_format: str, phase: Phase, tokens: int, batch: int) -> BenchCase:
        generator = torch.Generator().manual_seed(tokens * batch)
        vocab_size = self._shape["vocab_size"]
        prompts: list[list[int]] = torch.randint(
            0, vocab_size, (batch, tokens), generator=generator
        ).tolist()

        def check() -> str:
            self.ours(weight_format).measure(phase, prompts)
            self.predict(weight_format, phase, tokens, batch)
            return "ok"

        return BenchCase(
            name=f"format={weight_format} phase={phase} tokens={tokens} batch={batch}",
            unit="ms",
            ours=lambda: self.ours(weight_format).measure(phase, prompts),
            check=check,
            baseline=lambda: self.predict(weight_format, phase, tokens, batch),
            baseline_name="the planner",
        )


def make_cases(*, quick: bool) -> Iterator[BenchCase]:
    """Yield the cases, format by format.

    Args:
       quick: a tiny model, only to show that the bench runs: its times are all overhead.
    """
    shape = QUICK_SHAPE if quick else {**SHAPE, "num_hidden_layers": NUM_LAYERS}
    with tempfile.TemporaryDirectory() as scratch:
        bench = _Bench(Path(scratch), shape, QUICK_EXPERTS if quick else None)
        for weight_format, phase, tokens, batch in CASES:
            yield bench.case(weight_format, phase, tokens, batch)
