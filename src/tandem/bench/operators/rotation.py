"""A case over operators of one shape used in turn, so that no cache holds the next one's weights.

The rival is whichever of its kinds (dtype, threads) is the fastest for the case. The ceiling is
what takes longer, reading the bytes that a call needs or doing its multiply-adds in registers; it
is measured on an operator that is not in use, in the same rounds.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from tandem.bench.harness import BenchCase, time_call

__all__ = ["Kind", "Rotation", "list_kinds", "make_rotation_case", "time_torch"]

Kind = tuple[torch.dtype | str, int]
"""Kind of the rival: torch in a dtype, or a peer by its name; and its threads."""

LONG_TOKENS = 256
"""Above, a call takes so long that the rivals are compared by one call each."""


class Rotation(Protocol):
    """Operators of ours and of the rival, with what each is called with; ``nth`` picks one."""

    @property
    def count(self) -> int:
        """Count of the operators."""
        ...

    @property
    def kinds(self) -> list[Kind]:
        """Kinds of the rival."""
        ...

    def run(self, nth: int) -> object:
        """Call ours."""
        ...

    def time_rival(self, nth: int, kind: Kind) -> float:
        """Return the seconds of one call of the rival, on as many threads as ``kind`` says."""
        ...

    def check_rival(self, kind: Kind) -> str:
        """Return what is wrong with the rival's result; nothing where it is right."""
        ...

    def find_idle(self, nth: int) -> int:
        """Return an operator that has been out of use for long."""
        ...

    def read_all(self, nth: int) -> None:
        """Read all packed bytes of ours."""
        ...

    def read(self, idle: int, nth: int) -> None:
        """Read as many packed bytes of operator ``idle`` as the call of ``nth`` needs."""
        ...

    def multiply(self, nth: int) -> None:
        """Do the multiply-adds of a call in registers."""
        ...

    def measure_error(self) -> float:
        """Return the error of ours against float32, as a norm relative to the result's."""
        ...


def list_kinds(rivals: Iterable[torch.dtype | str], num_threads: int) -> list[Kind]:
    """Return each rival with one thread and with all."""
    return [(rival, count) for rival in rivals for count in sorted({1, num_threads})]


def time_torch(kind: Kind, call: Callable[[], object]) -> float:
    """Return the seconds of a call of torch on as many threads as ``kind`` says."""
    torch.set_num_threads(kind[1])
    return time_call(call)


def make_rotation_case(
    name: str, *, num_tokens: int, largest_error: float, find: Callable[[], Rotation]
) -> BenchCase:
    """Make a case; ``find`` gives its operators, made when they are first asked for."""
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
