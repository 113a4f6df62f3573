"""`tandem bench finetune-memory`: memory predicted by `tandem finetune --dry-run` against that of a
run.

Models of several kinds with random weights, each with a recipe of a few steps. One process predicts
and another runs the recipe. The check is that the prediction, which includes the memory of
libraries, is within a tenth of the measured peak; the ratio is prediction over peak.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.bench.harness import BenchCase
from tandem.bench.rivals.processes import RivalProcess
from tandem.models.loading.hub import DEMO_FOLDER

__all__ = ["make_cases"]

BOUND = 0.1
"""Largest allowed error of a prediction, as a share of the measured peak."""
NUM_STEPS = 2
WORDS_PER_TOKEN = 2
"""Words per row of the data, as a multiple of the cutoff in tokens: every row is longer than the
cutoff.
"""
KINDS: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "qwen3", "intermediate_size": 1536, "num_hidden_layers": 3},
    "moe": {
        "model_type": "qwen3_moe",
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 384,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "norm_topk_prob": True,
    },
}
BF16 = {"bf16": True}


@dataclass(frozen=True)
class Run:
    """A fine-tuning run: a model, and the settings of its recipe that decide the memory."""

    name: str
    kind: str
    num_tokens: int
    num_rows: int
    """Rows in a batch of the run."""
    keys: dict[str, Any]
    sizes: dict[str, Any] = field(default_factory=dict)
    """Sizes of the model that differ from the defaults of its kind."""


RUNS = (
    Run("dense bf16", "dense", 512, 4, {**BF16, "lora_rank": 8}),
    Run("dense float32 wide", "dense", 512, 2, {"lora_rank": 64}, {"vocab_size": 64_000}),
    Run(
        "dense int8 checkpointed",
        "dense",
        1024,
        2,
        {**BF16, "linear_format": "int8", "gradient_checkpointing": True, "lora_rank": 16},
    ),
    Run("dense bf16 packed", "dense", 512, 4, {**BF16, "packing": True}),
    Run("moe bf16", "moe", 1024, 1, {**BF16, "expert_format": "bf16", "lora_rank": 8}),
    Run(
        "moe int8 experts",
        "moe",
        256,
        4,
        {
            **BF16,
            "expert_format": "int8",
            "linear_format": "int8",
            "lora_target": "all,experts",
            "lora_rank": 16,
        },
    ),
    Run("moe float32", "moe", 256, 4, {"expert_format": "f32", "lora_rank": 32}),
    Run(
        "moe int8 checkpointed",
        "moe",
        1024,
        2,
        {**BF16, "expert_format": "int8", "gradient_checkpointing": True},
    ),
    Run("moe tensors", "moe", 512, 2, {**BF16, "expert_format": "none"}),
)
QUICK = (
    Run(
        "toy",
        "dense",
        64,
        1,
        {"lora_rank": 4},
        {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "head_dim": 32},
    ),
)


def make_cases(*, quick: bool = False) -> Iterator[BenchCase]:
    """Yield a case for each run: predicted gigabytes against the measured peak."""
    with RivalProcess(Path(sys.executable), "forecast_rival.py") as peer:
        for run in QUICK if quick else RUNS:
            with tempfile.TemporaryDirectory() as folder:
                yield _make_case(run, Path(folder), peer)


def _make_case(run: Run, folder: Path, peer: RivalProcess) -> BenchCase:
    found: dict[str, float] = {}

    def check() -> str:
        recipe = str(_write_run(run, folder))
        parts = peer.call("predict", recipe=recipe)
        begin, peak = peer.call("run", recipe=recipe)
        found["measured"], found["predicted"] = peak / 1e9, sum(parts.values()) / 1e9
        own = sum(size for name, size in parts.items() if name != "libraries")
        shown = ", ".join(f"{name} {size / 1e6:.0f}" for name, size in parts.items())
        shown += f" MB; without libraries {own / 1e6:.0f} of {(peak - begin) / 1e6:.0f} MB"
        sys.stderr.write(f"{run.name}: {shown}\n")
        ratio = found["predicted"] / found["measured"]
        what = f"{found['predicted']:.3f} GB predicted, {found['measured']:.3f} measured"
        return "ok" if abs(ratio - 1) <= BOUND else f"{what}: {ratio:.2f}"

    words = f"run={run.name.replace(' ', '-')} rows={run.num_rows} tokens={run.num_tokens}"
    return BenchCase(
        name=words,
        unit="GB",
        ours=lambda: found["predicted"],
        baseline=lambda: found["measured"],
        baseline_name="measured",
        check=check,
        higher_is_better=True,
        max_rounds=1,
    )


def _write_run(run: Run, folder: Path) -> Path:
    """Write the checkpoint, the data and the recipe (settings file) of a fine-tuning run; return
    the recipe's path.
    """
    _write_checkpoint(run, folder / "model")
    data = folder / "data"
    data.mkdir()
    text = " ".join(f"word{i}" for i in range(WORDS_PER_TOKEN * run.num_tokens))
    rows = [
        {"instruction": f"Count from {i}.", "input": "", "output": text}
        for i in range(NUM_STEPS * run.num_rows)
    ]
    (data / "rows.json").write_text(json.dumps(rows))
    (data / "dataset_info.json").write_text('{"rows": {"file_name": "rows.json"}}')
    recipe = {
        "model_name_or_path": str(folder / "model"),
        "dataset": "rows",
        "dataset_dir": str(data),
        "output_dir": str(folder / "out"),
        "cutoff_len": run.num_tokens,
        "per_device_train_batch_size": run.num_rows,
        "max_steps": NUM_STEPS,
        "logging_steps": 1,
        "save_steps": NUM_STEPS + 1,
        **run.keys,
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    return path


def _write_checkpoint(run: Run, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    sizes = {
        "vocab_size": 16_000,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "eos_token_id": 0,
        "pad_token_id": 0,
        **KINDS[run.kind],
        **run.sizes,
    }
    config = CONFIG_MAPPING[sizes.pop("model_type")](**sizes)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_FOLDER / name, folder / name)
