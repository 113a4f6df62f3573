"""Printing of a plan's choices as tables."""

import sys
from collections.abc import Sequence

from tandem.cli.output import print_table

__all__ = ["print_choices"]

Rows = Sequence[tuple[str, str, str]]


def print_choices(rows: Rows, rejected: Rows) -> None:
    """Print the choices of a plan with their reasons and, if there are any, the rejected ones."""
    print_table(("what", "value", "why"), rows)
    if rejected:
        sys.stdout.write("\n")
        print_table(("rejected", "value", "why not"), rejected)
