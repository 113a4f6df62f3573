"""Models: the transformers skeleton, our operators put into it by rules, and weight sources.

The names below load their modules, and with them torch, only when they are used.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tandem.models.hub import pull
    from tandem.models.loader import CausalModel, load_model
    from tandem.models.plan_report import render_plan
    from tandem.models.planner import describe_model, plan_model

__all__ = [
    "CausalModel",
    "describe_model",
    "load_model",
    "plan_model",
    "pull",
    "render_plan",
]

_HOMES = {
    "CausalModel": "loader",
    "describe_model": "planner",
    "load_model": "loader",
    "plan_model": "planner",
    "pull": "hub",
    "render_plan": "plan_report",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
