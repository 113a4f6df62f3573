"""One run on the demo model, interrupted and resumed: what it leaves, and that it repeats."""

import json
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerControl, TrainerState

from tandem.core.errors import ConfigError, ConflictError, NotFoundError
from tandem.finetune.forecast.prediction import predict_run
from tandem.finetune.recipes.recipe import make_recipe
from tandem.finetune.training import checkpoints
from tandem.finetune.training.callbacks import CheckpointCallback
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


def test_a_resumed_run_is_the_same_bit_by_bit(make_values, tmp_path):
    """Inside the second epoch, where rows of the first epoch's order were learned.

    Three epochs of three packed rows, two a step and one in an epoch's last step, from two workers;
    dropout and data go on as they would have.
    """
    options = {"num_train_epochs": 3, "save_steps": 1, "plot_loss": False, "max_samples": 9}
    batches = {"per_device_train_batch_size": 1, "packing": True, "cutoff_len": 112}
    options |= {"expert_format": "int8", "dataloader_num_workers": 2}
    values = make_values(tmp_path / "whole", **options, **batches)
    assert finetune(make_recipe(values)).num_examples == 3
    wanted = read_steps(tmp_path / "whole")
    assert sorted(wanted) == list(range(1, 7))
    for step in (3,):
        folder = tmp_path / f"from-{step}"
        shutil.copytree(tmp_path / "whole" / f"checkpoint-{step}", folder / f"checkpoint-{step}")
        # What an interrupted write leaves is not taken for a checkpoint, and is removed.
        (folder / ".checkpoint-9.partial").mkdir()
        changes = {"output_dir": str(folder), "resume_from_checkpoint": True}
        finetune(make_recipe({**values, **changes}))
        found = read_steps(folder)
        assert sorted(found) == list(range(step, 7))
        for later, (loss, tensors) in found.items():
            assert loss == wanted[later][0], (step, later)
            assert tensors.keys() == wanted[later][1].keys()
            same = (torch.equal(tensors[name], wanted[later][1][name]) for name in tensors)
            assert all(same), (step, later)
        # Its loss is that of all steps, not of those that it made.
        first, again = (read_loss(place) for place in (tmp_path / "whole", folder))
        assert first == again == pytest.approx(sum(loss for loss, _ in wanted.values()) / 6)
        last = load_file(folder / "adapter_model.safetensors")
        assert all(torch.equal(last[name], wanted[6][1][name]) for name in last)
        assert not (folder / ".checkpoint-9.partial").exists()


def read_steps(folder) -> dict[int, tuple[float, dict[str, torch.Tensor]]]:
    """Return the logged loss and the adapter after each step that has a checkpoint."""
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    losses = {line["step"]: line["loss"] for line in history if "loss" in line}
    return {
        step: (losses[step], load_file(path / "adapter_model.safetensors"))
        for path in folder.glob("checkpoint-*")
        for step in [int(path.name.rpartition("-")[2])]
    }


def read_loss(folder) -> float:
    """Return the loss of a run, which all its records have."""
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    results = [
        json.loads((folder / f"{name}_results.json").read_text()) for name in ("train", "all")
    ]
    found = {line["train_loss"] for line in [*results, history[-1]]}
    (loss,) = found
    assert str(loss) in (folder / "README.md").read_text()
    return loss


@pytest.mark.parametrize(("is_old", "wanted"), [(False, 9.5), (True, 2 * 2.0 + 2 * 1.0 + 2 * 1.5)])
def test_the_losses_before_a_checkpoint(is_old, wanted, tmp_path):
    """Are in it; one of an earlier release has its log, whose last two steps are not logged yet."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([parameter])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    checkpoints.save_run_state(tmp_path, optimizer, schedule, 9.5)
    if is_old:
        path = tmp_path / "run_state.json"
        document = json.loads(path.read_text())
        del document["loss_sum"]
        path.write_text(json.dumps(document))
    trainer: Any = SimpleNamespace(loss_sum=0.0)
    callback = CheckpointCallback(tmp_path, 1, trainer=trainer, resume_from=tmp_path)
    history = [{"step": 2, "loss": 2.0}, {"step": 3, "eval_loss": 9.0}, {"step": 4, "loss": 1.0}]
    state = TrainerState(global_step=6, log_history=history)
    arguments: Any = None
    callback.on_train_begin(
        arguments, state, TrainerControl(), optimizer=optimizer, lr_scheduler=schedule
    )
    assert trainer.loss_sum == wanted


def test_a_run_is_not_trained_over(run):
    """Results of another run are kept unless the recipe says otherwise."""
    values, _, _ = run
    with pytest.raises(ConflictError, match="overwrite_output_dir"):
        finetune(make_recipe(values))


@pytest.fixture
def earlier(run, tmp_path):
    """A copy of the run's folder, and the keys of a run over it."""
    values, folder, _ = run
    shutil.copytree(folder, tmp_path / "out")
    changes = {"output_dir": str(tmp_path / "out"), "overwrite_output_dir": True}
    return tmp_path / "out", {**values, **changes}


def list_files(folder) -> dict[str, int]:
    return {str(path): path.stat().st_size for path in folder.rglob("*")}


@pytest.mark.usefixtures("free_step")
@pytest.mark.parametrize("name", ["", "checkpoint-2", "../link"])
def test_a_folder_is_not_emptied_of_what_training_goes_on_from(earlier, name):
    """The adapter was removed before it was read."""
    folder, values = earlier
    (folder.parent / "link").symlink_to(folder)
    files = list_files(folder)
    recipe = make_recipe({**values, "adapter_name_or_path": str(folder / name)})
    assert "another output_dir" in predict_run(recipe).problems[0]
    with pytest.raises(ConflictError, match="name another output_dir"):
        finetune(recipe)
    assert list_files(folder) == files


@pytest.mark.parametrize(
    "changes", [{"dataset": "absent"}, {"lr_scheduler_type": "odd"}, {"lora_target": "absent"}]
)
def test_a_run_that_cannot_begin_leaves_the_one_before(earlier, changes):
    """A slip in a recipe costs nothing."""
    folder, values = earlier
    files = list_files(folder)
    with pytest.raises((ConfigError, NotFoundError)):
        finetune(make_recipe({**values, **changes}))
    assert list_files(folder) == files


@pytest.mark.usefixtures("free_step")
def test_a_page_that_no_run_has_left_is_kept(make_values, tmp_path):
    """As of a project in whose folder a recipe is tried."""
    (tmp_path / "README.md").write_text("mine")
    recipe = make_recipe(make_values(tmp_path))
    with pytest.raises(ConflictError, match=r"README\.md"):
        finetune(recipe)
    assert "README.md" in predict_run(recipe).problems[0]
    assert (tmp_path / "README.md").read_text() == "mine"


@pytest.mark.usefixtures("free_step")
def test_an_output_folder_that_cannot_be_made_is_named(make_values, tmp_path, monkeypatch):
    """A file, a path through a file, a broken link, a name that no file system has, and a place
    where only the attempt tells.
    """
    monkeypatch.setattr("tandem.finetune.training.trainer.load_frozen", None)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "broken").symlink_to(tmp_path / "absent")
    places = ["file", "file/out", "broken", "n" * 300]
    for place in (*(tmp_path / name for name in places), "/proc/out"):
        recipe = make_recipe(make_values(place))
        with pytest.raises(ConfigError, match="name another output_dir") as caught:
            finetune(recipe)
        assert caught.value.field == "output_dir"
        if place != "/proc/out":
            assert "name another output_dir" in predict_run(recipe).problems[0], place
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.usefixtures("free_step")
@pytest.mark.parametrize("key", ["resume_from_checkpoint", "adapter_name_or_path"])
def test_what_is_not_there_to_go_on_from_is_told_before_the_model(
    key, make_values, tmp_path, monkeypatch
):
    """Loading takes minutes; transformers would end with an error of its own."""
    monkeypatch.setattr("tandem.finetune.training.trainer.load_frozen", None)
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "absent", tmp_path / "empty", "false"):
        recipe = make_recipe(make_values(tmp_path / "out", **{key: str(path)}))
        with pytest.raises(NotFoundError) as caught:
            finetune(recipe)
        assert caught.value.field == key
        assert str(path) in predict_run(recipe).problems[0]


def test_validation_of_which_the_cutoff_leaves_nothing_is_refused(make_values, tmp_path):
    """With eval_strategy transformers would end with an error of its own, after the model."""
    rows = [{"instruction": "q " * 100, "output": "a"}]
    (tmp_path / "long.json").write_text(json.dumps(rows))
    values = make_values(tmp_path / "out", eval_dataset=str(tmp_path / "long.json"), cutoff_len=4)
    with pytest.raises(ConfigError, match="no answer in any record of validation"):
        finetune(make_recipe(values))


def test_a_checkpoint_that_replaces_another_is_whole_at_any_moment(tmp_path, monkeypatch):
    """As when a run goes on from an earlier one than the last, and is killed."""
    written, final = tmp_path / ".checkpoint-4.partial", tmp_path / "checkpoint-4"
    for folder in (written, final):
        folder.mkdir()
        for name in "abc":
            (folder / name).write_text(folder.name)

    def killed(folder, **_):
        next(iter(folder.iterdir())).unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.publish_folder(written, final)
    assert checkpoints.list_checkpoints(tmp_path) == [final]
    assert [path.read_text() for path in final.iterdir()] == [written.name] * 3
