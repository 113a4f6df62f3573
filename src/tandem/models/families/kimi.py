"""Kimi-Linear: conditions on its configuration.

Published files name Python code of their own, which is never run; transformers' class is used.
"""

from typing import Any

__all__ = ["find_problem"]

ONLY = {
    "mla_use_nope": True,
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
    "tie_word_embeddings": False,
}
"""Fields of Kimi-Linear's configuration that transformers' class ignores, each with the only value
for which the class is right.
"""


def find_problem(config: Any) -> tuple[str, str] | None:
    """Return (field, problem) of a configuration that is not supported; None: it is supported."""
    for name, value in ONLY.items():
        stated = getattr(config, name, None)
        if stated not in (None, value):
            return name, f"{name} {stated!r}: only {value!r} runs"
    return None
