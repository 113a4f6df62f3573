"""Cases over operators of one shape that are used in turn, so that caches do not hold the weights
of the next call.

The rival is its fastest variant (dtype, threads) for the case. The ceiling is the slower of reading
the bytes that a call needs and doing its multiply-adds in registers; it is measured in the same
rounds, on an operator that is not in use.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from tandem.bench.harness import BenchCase, time_call

__all__ = ["Kind", "Rotation", "list_kinds", "make_rotation_case", "time_torch"]

Kind = tuple[torch.dtype | str, int]
"""A variant of the rival: a dtype of torch or the name of a peer, and the number of threads."""

LONG_TOKENS = 256
"""Above this many tokens a call takes so long that rivals are compared by one call each."""


class Rotation(Protocol):
    """Operators of ours and of the rival with their inputs; ``nth`` chooses one of them."""

    @property
    def count(self) -> int:
        """Number of operators that are used in turn."""
        ...

    @property
    def kinds(self) -> list[Kind]:
        """Variants (dtype and number of threads) of the rival that are measured."""
        ...

    def run(self, nth: int) -> object:
        """Call our operator ``nth``."""
        ...

    def time_rival(self, nth: int, kind: Kind) -> float:
        """Return the seconds of one call of the rival's operator ``nth``, in the variant ``kind``,
        which also gives the number of threads.
        """
        ...

    def check_rival(self, kind: Kind) -> str:
        """Return a description of the error in the result of the rival's variant ``kind``; empty if
        it is right.
        """
        ...

    def find_idle(self, nth: int) -> int:
        """Return the index of an operator that was last used long before ``nth``."""
        ...

    def read_all(self, nth: int) -> None:
        """Read all packed bytes of our operator ``nth``."""
        ...

    def read(self, idle: int, nth: int) -> None:
        """Read as many packed bytes of operator ``idle`` as a call of ``nth`` needs."""
        ...

    def multiply(self, nth: int) -> None:
        """Do as many multiply-adds as a call of operator ``nth`` needs, on operands in
        registers.
        """
        ...

    def measure_error(self) -> float:
        """Return the norm of our error against float32, relative to the result's norm."""
        ...


def list_kinds(rivals: Iterable[torch.dtype | str], num_threads: int) -> list[Kind]:
    """Return the variants to measure: each rival (a dtype of torch, or a library's name) with one
    thread and with all threads.
    """
    return [(rival, count) for rival in rivals for count in sorted({1, num_threads})]


def time_torch(kind: Kind, call: Callable[[], object]) -> float:
    """Return the seconds of a call of torch on the number of threads in ``kind``."""
    torch.set_num_threads(kind[1])
    return time_call(call)


def make_rotation_case(
    name: str, *, num_tokens: int, largest_error: float, find: Callable[[], Rotation]
) -> BenchCase:
    """Return a case; ``find`` returns its operators and is called when the case first runs."""
    nth = 0
    chosen: Kind = (torch.bfloat16, 1)

    def time_ours() -> float:
        nonlocal nth
        rotation = find()
        nth = (nth + 1) % rotation.count
        return time_call(lambda: rotation.run(nth)) * 1e3

    def time_rival(kind: Kind) -> float:
        return find().time_rival(nth, kind) * 1e3

    def time_ceiling() -> float:
        rotation = find()
        idle = rotation.find_idle(nth)
        # The rival leaves written data in the caches, whose write-back would slow the measured
        # read: reading all of our weights first evicts it.
        rotation.read_all(nth)
        read = time_call(lambda: rotation.read(idle, nth))
        return max(read, time_call(lambda: rotation.multiply(idle))) * 1e3

    def check() -> str:
        nonlocal chosen
        rotation = find()
        error = rotation.measure_error()
        if not error <= largest_error:
            return f"relative error {error:.4f}, at most {largest_error} is allowed"
        for kind in rotation.kinds:
            if fault := rotation.check_rival(kind):
                return fault
        tries = 1 if num_tokens > LONG_TOKENS else 3
        chosen = min(rotation.kinds, key=lambda kind: min(time_rival(kind) for _ in range(tries)))
        return "ok"

    return BenchCase(
        name=name,
        unit="ms",
        ours=time_ours,
        check=check,
        baseline=lambda: time_rival(chosen),
        baseline_name=lambda: f"{chosen[0]} threads={chosen[1]}",
        ceiling=time_ceiling,
    )
