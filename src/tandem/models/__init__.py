"""Models: the transformers skeleton, our operators put into it by rules, and weight sources.

The names below load their modules, and with them torch, only when they are used.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tandem.models.families import describe_model
    from tandem.models.hub import pull
    from tandem.models.loader import CausalModel, load_model
    from tandem.models.plan import RulesReport, explain_rules

__all__ = [
    "CausalModel",
    "RulesReport",
    "describe_model",
    "explain_rules",
    "load_model",
    "pull",
]

_HOMES = {
    "CausalModel": "loader",
    "RulesReport": "plan",
    "describe_model": "families",
    "explain_rules": "plan",
    "load_model": "loader",
    "pull": "hub",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
