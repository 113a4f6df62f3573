"""Models: transformers' skeleton, our operators placed by rules, and sources of weights.

The names below are imported lazily, because their modules import torch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tandem.models.loading.hub import pull
    from tandem.models.loading.loader import CausalModel, load_model
    from tandem.models.planning.plan_report import render_plan
    from tandem.models.planning.planner import describe_model, plan_model

__all__ = [
    "CausalModel",
    "describe_model",
    "load_model",
    "plan_model",
    "pull",
    "render_plan",
]

_HOMES = {
    "CausalModel": "loading.loader",
    "describe_model": "planning.planner",
    "load_model": "loading.loader",
    "plan_model": "planning.planner",
    "pull": "loading.hub",
    "render_plan": "planning.plan_report",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
