"""A case over operators of one shape used in turn, so that no cache holds the next one's weights.

The rival is whichever of its kinds (dtype, threads) is the fastest for the case. The ceiling is
what takes longer, reading the bytes that a call needs or doing its multiply-adds in registers; it
is measured on an operator that is not in use, in the same rounds.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from tandem.bench.harness import BenchCase, time_call

__all__ = ["Kind", "Turns", "list_kinds", "make_turn_case", "time_torch"]

Kind = tuple[torch.dtype | str, int]
"""Kind of the rival: torch in a dtype, or a peer by its name; and its threads."""

LONG_TOKENS = 256
"""Above, a call takes so long that the rivals are compared by one call each."""


class Turns(Protocol):
    """Operators of ours and of the rival, with what each is called with; ``turn`` picks one."""

    @property
    def count(self) -> int:
        """Count of the operators."""
        ...

    @property
    def kinds(self) -> list[Kind]:
        """Kinds of the rival."""
        ...

    def run(self, turn: int) -> object:
        """Call ours."""
        ...

    def time_rival(self, turn: int, kind: Kind) -> float:
        """Return the seconds of one call of the rival, on as many threads as ``kind`` says."""
        ...

    def check_rival(self, kind: Kind) -> str:
        """Return what is wrong with the rival's result; nothing where it is right."""
        ...

    def find_idle(self, turn: int) -> int:
        """Return an operator that has been out of use for long."""
        ...

    def read_all(self, turn: int) -> None:
        """Read all packed bytes of ours."""
        ...

    def read(self, idle: int, turn: int) -> None:
        """Read as many packed bytes of operator ``idle`` as the call of ``turn`` needs."""
        ...

    def multiply(self, turn: int) -> None:
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


def make_turn_case(
    name: str, *, num_tokens: int, largest_error: float, find: Callable[[], Turns]
) -> BenchCase:
    """Make a case; ``find`` gives its operators, made when they are first asked for."""
    turn = 0
    chosen: Kind = (torch.bfloat16, 1)

    def time_ours() -> float:
        nonlocal turn
        turns = find()
        turn = (turn + 1) % turns.count
        return time_call(lambda: turns.run(turn)) * 1e3

    def time_rival(kind: Kind) -> float:
        return find().time_rival(turn, kind) * 1e3

    def time_ceiling() -> float:
        turns = find()
        idle = turns.find_idle(turn)
        # The rival leaves the caches full of what it wrote: writing that back slows the next read.
        turns.read_all(turn)
        read = time_call(lambda: turns.read(idle, turn))
        return max(read, time_call(lambda: turns.multiply(idle))) * 1e3

    def check() -> str:
        nonlocal chosen
        turns = find()
        error = turns.measure_error()
        if not error <= largest_error:
            return f"relative error {error:.4f}, at most {largest_error} is allowed"
        for kind in turns.kinds:
            if fault := turns.check_rival(kind):
                return fault
        tries = 1 if num_tokens > LONG_TOKENS else 3
        chosen = min(turns.kinds, key=lambda kind: min(time_rival(kind) for _ in range(tries)))
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
