"""A recipe on the demo model, and a dataset to learn from."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="fine-tuning needs the `finetune` extra")
pytest.importorskip("peft", reason="fine-tuning needs the `finetune` extra")

WORDS = ["name", "color", "size", "owner", "date", "price", "place", "shape", "weight", "sound"]


@pytest.fixture(scope="module")
def dataset_dir(tmp_path_factory) -> Path:
    """A dataset folder with ten alpaca rows."""
    folder = tmp_path_factory.mktemp("data")
    rows = [
        {"instruction": f"What is the {w}?", "input": "", "output": f"The {w} is {w[::-1]}."}
        for w in WORDS
    ]
    (folder / "identity.json").write_text(json.dumps(rows, indent=1))
    (folder / "dataset_info.json").write_text('{"identity": {"file_name": "identity.json"}}')
    return folder


@pytest.fixture(scope="module")
def make_values(dataset_dir) -> Any:
    """Return ``make(output_dir, **changes)``: the flat keys of a short run."""

    def make(output_dir: Path, **changes: Any) -> dict[str, Any]:
        return {
            "model_name_or_path": "demo",
            "dataset": "identity",
            "dataset_dir": str(dataset_dir),
            "output_dir": str(output_dir),
            "lora_rank": 4,
            "lora_dropout": 0.1,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "num_train_epochs": 2,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "save_steps": 2,
            "cutoff_len": 64,
            "cpu_infer": 2,
            "plot_loss": True,
            **changes,
        }

    return make


@pytest.fixture
def free_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prediction without its simulated step, most of its time: for tests of its other parts."""
    from tandem.finetune.forecast import prediction
    from tandem.finetune.forecast.fake_step import StepCost
    from tandem.finetune.forecast.machine_speed import MachineSpeed

    monkeypatch.setattr(prediction, "simulate_step", lambda *_: StepCost())
    monkeypatch.setattr(prediction, "measure_speed", lambda **_: MachineSpeed(1.0, 1.0, 1.0, 1.0))


@pytest.fixture(scope="session")
def adapt() -> Any:
    """Return ``adapt(model)``: the model with adapters of rank 8 on all targets."""
    from tandem.finetune.recipes.recipe import make_recipe
    from tandem.finetune.training.expert_adapters import adapt_model
    from tandem.finetune.training.trainer import make_lora_config

    recipe = make_recipe({"model_name_or_path": "demo", "output_dir": "out"})

    def add(model: Any) -> Any:
        # PEFT tells that the model has another name than the recipe's.
        model.name_or_path = recipe.model.model_name_or_path
        return adapt_model(model, make_lora_config(recipe, model), is_empty=True)

    return add
