"""Printing of a plan's choices: as tables, or what matters most in a few lines."""

import sys
from collections.abc import Sequence

from tandem.cli.output import print_table

__all__ = ["print_choices", "print_summary"]

Rows = Sequence[tuple[str, str, str]]


LINES = (
    ("model", ("model", "dtype")),
    ("memory", ("weights", "KV cache")),
    ("context", ("context", "requests")),
    ("speed", ("speed",)),
)
"""Lines of a summary, each of the rows of a plan by their names."""


def print_summary(model: str, rows: Rows, instances: Sequence[str]) -> None:
    """Print what matters most of a plan: model, memory, context and speed, a line each.

    Args:
        model: name of the model.
        rows: rows of the plan of each instance.
        instances: names of the instances.
    """
    values = {name: value for name, value, _ in rows}
    whys = {name: why for name, _, why in rows}
    values["model"] = f"{model}, {whys.get('model', '')}".rstrip(", ")
    if "weights" in values:
        values["weights"] = f"{values['weights']} of weights"
    if "KV cache" in values:
        values["KV cache"] = f"KV cache of {values['KV cache']}"
    if "speed" in values:
        why = whys["speed"]
        values["speed"] += ", predicted" if why.startswith("predicted") else f" ({why})"
    for line, names in LINES:
        told = [values[name] for name in names if name in values]
        if line == "model" and len(instances) > 1:
            told[-1] += f"; {', '.join(instances)}, each:"
        if told:
            sys.stdout.write(f"{line:<8} {', '.join(told)}\n")


def print_choices(rows: Rows, rejected: Rows) -> None:
    """Print the choices of a plan with their reasons and, if there are any, the rejected ones."""
    print_table(("what", "value", "why"), rows)
    if rejected:
        sys.stdout.write("\n")
        print_table(("rejected", "value", "why not"), rejected)
