"""The schedule of the learning rate: the arguments that a recipe gives it, checked before a model
is loaded for it.
"""

import math
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import SchedulerType, get_scheduler

from tandem.core.errors import ConfigError
from tandem.finetune.recipes.recipe import TrainKeys

__all__ = ["plan_schedule"]

WHERE = "finetune.run"
WITHOUT_ARGUMENTS = ("constant", "constant_with_warmup")
"""Schedules to which transformers passes no arguments, whatever there are."""


def plan_schedule(train: TrainKeys, num_steps: int) -> dict[str, Any]:
    """Return the arguments of a recipe's schedule, such as the least learning rate.

    They are those of ``lr_scheduler_kwargs``, which transformers gives the schedule by name.
    ``warmup_stable_decay`` needs ``num_decay_steps``: if they are not given, all steps after the
    stable ones, and if these are not given either, two thirds of the steps after the warm-up, as in
    LLaMA-Factory.

    Args:
        train: the recipe's settings of training.
        num_steps: optimizer steps of the run.

    Raises: ConfigError (there is no such schedule, or an argument is missing, unknown or out of
        bounds; ``field`` names the key).
    """
    name = train.lr_scheduler_type
    names = [kind.value for kind in SchedulerType]
    if name not in names:
        what = f"lr_scheduler_type {name!r}: choose one of {', '.join(names)}"
        raise ConfigError(WHERE, what, field="lr_scheduler_type")
    given: dict[str, Any] = dict(train.lr_scheduler_kwargs or {})
    share = train.warmup_steps
    num_warmup = int(share) if share >= 1 else math.ceil(share * num_steps)
    try:
        kwargs = _fill_decay(given, num_steps - num_warmup) if _has_decay(name) else given
        _try_schedule(train, kwargs, num_warmup, num_steps)
    except (ArithmeticError, TypeError, ValueError) as error:
        shown = ", ".join(f"{key}: {value}" for key, value in given.items())
        what = f"lr_scheduler_type {name} with lr_scheduler_kwargs {{{shown}}}: {error}"
        raise ConfigError(
            WHERE, f"{what}: correct lr_scheduler_kwargs", field="lr_scheduler_kwargs"
        ) from error
    return kwargs


def _try_schedule(
    train: TrainKeys, kwargs: dict[str, Any], num_warmup: int, num_steps: int
) -> None:
    """Make the schedule, and ask it for the rate of a few steps.

    Raises: TypeError, ValueError, ArithmeticError (the arguments do not suit it).
    """
    if kwargs and train.lr_scheduler_type in WITHOUT_ARGUMENTS:
        raise TypeError("this schedule takes no arguments")
    schedule = get_scheduler(
        train.lr_scheduler_type,
        optimizer=torch.optim.AdamW([torch.zeros(1)], lr=train.learning_rate),
        num_warmup_steps=num_warmup,
        num_training_steps=num_steps,
        scheduler_specific_kwargs=kwargs,
    )
    # Some arguments are first used at a later step.
    shares = schedule.lr_lambdas if isinstance(schedule, LambdaLR) else []
    for step in (0, num_warmup, (num_warmup + num_steps) // 2, num_steps - 1, num_steps):
        for find_share in shares:
            if not 0 <= find_share(step) < math.inf:
                raise ValueError(f"step {step} has {find_share(step)} of the learning rate")


def _has_decay(name: str) -> bool:
    return name == SchedulerType.WARMUP_STABLE_DECAY.value


def _fill_decay(given: dict[str, Any], num_steps: int) -> dict[str, Any]:
    """Return the arguments of ``warmup_stable_decay``; ``num_steps`` come after the warm-up."""
    if "num_decay_steps" in given:
        return given
    rest = max(num_steps, 0)
    num_stable = int(given.get("num_stable_steps", rest // 3))
    others = {key: value for key, value in given.items() if key != "num_stable_steps"}
    return {**others, "num_decay_steps": max(rest - num_stable, 0)}
