"""Kimi-Linear: what its configuration must say.

Published files name code to run, which is not run: transformers has the class.
"""

from typing import Any

__all__ = ["find_problem"]

ONLY = {
    "mla_use_nope": True,
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
    "tie_word_embeddings": False,
}
"""Fields that transformers' class does not read, and the values that it computes."""


def find_problem(config: Any) -> tuple[str, str] | None:
    """Return (field, what) of a configuration that does not run; None: nothing."""
    for name, value in ONLY.items():
        stated = getattr(config, name, None)
        if stated not in (None, value):
            return name, f"{name} {stated!r}: only {value!r} runs"
    return None
