"""`tandem bench kernels`: the cases of `moe` and of `linear`, chosen by `op=`."""

from collections.abc import Iterator

from tandem.bench import linear, moe
from tandem.bench.harness import BenchCase

__all__ = ["make_cases"]


def make_cases(*, quick: bool) -> Iterator[BenchCase]:
    """Yield the experts' cases, then the matrices'."""
    yield from moe.make_cases(quick=quick)
    yield from linear.make_cases(quick=quick)
