"""A test of many cases that take less time than pytest needs for a test."""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

__all__ = ["each"]


def each(
    names: str | Sequence[str], cases: Iterable[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call a test with every case, as one test; an error names the case that it came from.

    For cases of milliseconds, where ``pytest.mark.parametrize``, which takes the same arguments,
    costs more than they do. All cases share the fixtures of the test; those that have a method
    ``restart`` are as new for each case.
    """
    words = [names] if isinstance(names, str) else list(names)
    rows = [dict(zip(words, case if len(words) > 1 else (case,), strict=True)) for case in cases]
    assert rows, names

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            skipped = None
            num_run = 0
            for row in rows:
                for fixture in fixtures.values():
                    if hasattr(fixture, "restart"):
                        fixture.restart()
                try:
                    test(**fixtures, **row)
                    num_run += 1
                except pytest.skip.Exception as skip:
                    skipped = skip
                except BaseException as error:
                    error.add_note(f"case: {row}")
                    raise
            if not num_run and skipped is not None:
                raise skipped

        signature = inspect.signature(test)
        left = [p for name, p in signature.parameters.items() if name not in words]
        run.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return run

    return decorate
