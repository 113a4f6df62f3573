"""The cases of a test that `make test` runs, where others stand for the rest."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

__all__ = ["rest_slow"]


def rest_slow(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Return a test's parameters, of which those that are not among ``quick`` are slow.

    ``make test`` runs the quick ones alone, ``make test-slow`` all.

    Args:
        quick: cases, each of which must be among ``cases``: one that is renamed is not lost.
        cases: single values, or tuples of a value for each parameter.
    """
    rows = list(cases)
    assert all(case in rows for case in quick), [case for case in quick if case not in rows]
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in quick else pytest.mark.slow,
        )
        for case in rows
    ]
