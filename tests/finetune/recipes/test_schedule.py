"""Schedules of the learning rate: transformers' own, checked before the model is loaded."""

import json

import pytest
import torch
from transformers import get_scheduler

from each import each
from tandem.core.errors import ConfigError
from tandem.finetune.forecast.prediction import predict_run
from tandem.finetune.recipes.recipe import make_recipe, read_recipe
from tandem.finetune.training.schedule import plan_schedule
from tandem.finetune.training.trainer import count_steps, finetune

LEAST = {"model_name_or_path": "demo", "output_dir": "out"}
MIN_LR, STABLE = "cosine_with_min_lr", "warmup_stable_decay"


def plan(num_steps: int, **keys):
    return plan_schedule(make_recipe({**LEAST, **keys}).train, num_steps)


@pytest.mark.parametrize(
    ("name", "kwargs", "served"),
    [
        (MIN_LR, {"min_lr": 1e-3}, {"min_lr": 1e-3}),
        # A third of the five steps after the warm-up is stable, as in LLaMA-Factory.
        (STABLE, None, {"num_decay_steps": 4}),
    ],
)
def test_a_run_has_the_rates_of_transformers(name, kwargs, served, make_values, tmp_path):
    """At every step: the schedules that need arguments ended in errors, after the model."""
    values = make_values(tmp_path / "out", plot_loss=False, max_steps=6, warmup_steps=1)
    values |= {"lr_scheduler_type": name, "lr_scheduler_kwargs": kwargs, "save_steps": 99}
    finetune(make_recipe(values))
    lines = (tmp_path / "out" / "trainer_log.jsonl").read_text().splitlines()
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=values["learning_rate"])
    schedule = get_scheduler(
        name,
        optimizer=optimizer,
        num_warmup_steps=1,
        num_training_steps=6,
        scheduler_specific_kwargs=served,
    )
    wanted = []
    for _ in range(6):
        wanted.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert [json.loads(line)["lr"] for line in lines] == pytest.approx(wanted)
    assert len(set(wanted)) > 3


@each(
    ("keys", "wanted"),
    [
        ({}, {}),
        (
            {"lr_scheduler_type": MIN_LR, "lr_scheduler_kwargs": '{"min_lr": 1e-6}'},
            {"min_lr": 1e-6},
        ),
        (
            {
                "lr_scheduler_type": MIN_LR,
                "lr_scheduler_kwargs": {"min_lr_rate": 0.1, "min_lr": None},
            },
            {"min_lr_rate": 0.1},
        ),
        ({"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": "2"}}, {"power": 2}),
        ({"lr_scheduler_type": STABLE, "warmup_steps": 0.1}, {"num_decay_steps": 60}),
        (
            {"lr_scheduler_type": STABLE, "lr_scheduler_kwargs": {"num_stable_steps": 70}},
            {"num_decay_steps": 30},
        ),
        (
            {
                "lr_scheduler_type": STABLE,
                "lr_scheduler_kwargs": {"num_decay_steps": 10, "decay_type": "1-sqrt"},
            },
            {"num_decay_steps": 10, "decay_type": "1-sqrt"},
        ),
    ],
)
def test_arguments(keys, wanted):
    """Numbers that YAML 1.1 takes for text are numbers; null is left out."""
    found = plan(100, **keys)
    assert found == wanted
    assert [type(value) for value in found.values()] == [type(value) for value in wanted.values()]


def test_arguments_of_a_word(tmp_path):
    """On the command line as in the file."""
    (tmp_path / "r.yaml").write_text("model_name_or_path: demo\noutput_dir: out\n")
    recipe = read_recipe(tmp_path / "r.yaml", ["lr_scheduler_kwargs={min_lr: 1e-6}"])
    assert recipe.train.lr_scheduler_kwargs == {"min_lr": 1e-6}


@each(
    ("name", "kwargs", "field", "message"),
    [
        ("odd", None, "lr_scheduler_type", "choose one of linear"),
        (MIN_LR, None, "lr_scheduler_kwargs", "One of min_lr or min_lr_rate"),
        (MIN_LR, {"min_lr": "low"}, "lr_scheduler_kwargs", "min_lr: low"),
        ("polynomial", {"lr_end": -1}, "lr_scheduler_kwargs", "of the learning rate"),
        (MIN_LR, {"min_lr": 1e-6, "min_rl": 1}, "lr_scheduler_kwargs", "min_rl"),
        ("cosine", {"min_lr": 1e-6}, "lr_scheduler_kwargs", "min_lr"),
        ("constant", {"min_lr": 1e-6}, "lr_scheduler_kwargs", "takes no arguments"),
        ("inverse_sqrt", {"timescale": "long"}, "lr_scheduler_kwargs", "timescale"),
        ("polynomial", {"lr_end": 1.0}, "lr_scheduler_kwargs", "lr_end"),
        (STABLE, {"decay_type": "steep"}, "lr_scheduler_kwargs", "steep"),
        (STABLE, {"num_stable_steps": "many"}, "lr_scheduler_kwargs", "many"),
        (STABLE, {"num_decay_steps": "many"}, "lr_scheduler_kwargs", "many"),
    ],
)
def test_wrong_schedules_are_named(name, kwargs, field, message):
    """Each was an error of Python's own, or of transformers', after the model was loaded."""
    with pytest.raises(ConfigError, match=message) as caught:
        plan(100, lr_scheduler_type=name, lr_scheduler_kwargs=kwargs)
    assert caught.value.field == field


@pytest.mark.usefixtures("free_step")
def test_a_wrong_schedule_is_told_before_the_model(make_values, tmp_path, monkeypatch):
    """And by --dry-run."""
    monkeypatch.setattr("tandem.finetune.training.trainer.load_frozen", None)
    recipe = make_recipe(make_values(tmp_path / "out", lr_scheduler_type=MIN_LR))
    with pytest.raises(ConfigError, match="min_lr_rate"):
        finetune(recipe)
    assert "min_lr_rate" in predict_run(recipe).problems[0]


def test_steps_below_0_are_those_of_the_epochs():
    """As in transformers, whatever the number."""
    for steps in (-1, -7):
        recipe = make_recipe({**LEAST, "max_steps": steps, "num_train_epochs": 2})
        assert count_steps(recipe, 16) == 4
