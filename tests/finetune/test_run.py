"""One run on the demo model, interrupted and resumed: what it leaves, and that it repeats."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from tandem.core.errors import ConflictError
from tandem.finetune.recipes.recipe import make_recipe
from tandem.finetune.training.trainer import finetune


@pytest.fixture(scope="module")
def run(tmp_path_factory, make_values):
    """A whole run: (recipe keys, folder, report)."""
    folder = tmp_path_factory.mktemp("run") / "out"
    values = make_values(folder, expert_format="int8", val_size=2)
    return values, folder, finetune(make_recipe(values))


def test_a_run_leaves_its_artefacts_and_no_pickle(run):
    """Every file that LLaMA-Factory leaves is there, but those that are pickles."""
    _, folder, report = run
    names = {path.name for path in folder.iterdir()}
    wanted = "adapter_model.safetensors adapter_config.json trainer_state.json trainer_log.jsonl"
    wanted += " train_results.json eval_results.json all_results.json training_loss.png README.md"
    wanted += " checkpoint-2 checkpoint-4 tokenizer.json"
    assert set(wanted.split()) <= names
    assert not [p for p in folder.rglob("*") if p.suffix in (".bin", ".pt", ".pth", ".pkl")]
    assert not [p for p in folder.rglob("*") if p.name.startswith(".")]
    assert report.num_examples == 8
    assert (
        json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
        == "demo"
    )


def test_the_loss_falls(run):
    """The adapter learns: native gradients through int8 experts point downhill."""
    _, folder, _ = run
    lines = [json.loads(x) for x in (folder / "trainer_log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.3


def test_a_resumed_run_is_the_same_bit_by_bit(run, tmp_path):
    """From the middle checkpoint, dropout and data order go on as they would have."""
    values, folder, _ = run
    again = tmp_path / "again"
    again.mkdir()
    shutil.copytree(folder / "checkpoint-2", again / "checkpoint-2")
    # What an interrupted write leaves is not taken for a checkpoint, and is removed.
    (again / ".checkpoint-3.partial").mkdir()
    changed = {**values, "output_dir": str(again), "resume_from_checkpoint": True}
    finetune(make_recipe(changed))
    first, second = (load_file(f / "adapter_model.safetensors") for f in (folder, again))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not (again / ".checkpoint-3.partial").exists()


def test_a_run_is_not_trained_over(run):
    """Results of another run are kept unless the recipe says otherwise."""
    values, _, _ = run
    with pytest.raises(ConflictError, match="overwrite_output_dir"):
        finetune(make_recipe(values))
