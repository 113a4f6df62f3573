"""The simulated world: processes, the channels between them, chance, and faults.

A run is decided by its seed: all chance comes from ``World.random``, all time from the loop. A
message, an answer and a slice of bytes is a *step*; ``crash_at`` strikes between two steps, so that
a test can kill a process at every one of them in turn. A failure of an invariant is a line in
``violations``, which the test that made the world looks at when it is over.
"""

import asyncio
import collections
import itertools
import random
from collections.abc import Callable, Iterable

from tandem.core.clock import Clock
from tandem.sim.loop import LoopClock
from tandem.sim.network import Faults, Session
from tandem.sim.process import Process

__all__ = ["Faults", "World"]

TRAVEL_S = 0.001
"""Mean time of a message or slice."""
LATE_S = (0.1, 12.0)
"""Seconds by which a late one is longer."""
STALL_S = (5.0, 60.0)
SILENT_S = 3.0
"""After which a session with a process that does not answer ends: the control channel's lease."""


class World:
    """All processes of a run. Made inside a ``VirtualLoop``; subclasses add what is simulated.

    Args:
        seed: decides the run.
        faults: what goes wrong by chance.
    """

    def __init__(self, seed: int, faults: Faults) -> None:
        self.random = random.Random(seed)
        self.faults = faults
        self.ids = itertools.count()
        """Ids of processes."""
        self.violations: list[str] = []
        self.network = Process(self, "network")
        """Carries what is under way: it goes on when its sender dies."""
        self.sessions: list[Session] = []
        """Open ones, of each the direction from who opened it."""
        self.steps = 0
        self.num_answers: collections.Counter[str] = collections.Counter()
        """By method."""
        self.crash_at: dict[int, Callable[[], None]] = {}
        """The action after a step, by its number."""
        self.cuts: set[frozenset[str]] = set()
        """Pairs of names between which nothing passes."""
        self.clock = LoopClock()

    # Subclasses override the methods from here to `make_clock`.

    def note_answer(self, far: Process, method: str, *, error: str, body: bytes) -> None:
        """Look at an answer that is about to leave; ``error`` is a code, empty for none."""

    def on_session_end(self, session: Session) -> None:
        """Tell the far side that a session has ended, as the control channel does."""

    def make_clock(self) -> Clock:
        """Return the clock of a new process."""
        return self.clock

    # The methods below draw random delays, count steps and cut transfers into slices.

    async def travel(self) -> None:
        """Take the time of one message or slice."""
        self.note_step()
        delay_s = self.random.expovariate(1 / TRAVEL_S)
        if self.random.random() < self.faults.late:
            delay_s += self.random.uniform(*LATE_S)
        await asyncio.sleep(delay_s)

    def note_step(self) -> None:
        """Count a step, and strike if ``crash_at`` says so."""
        self.steps += 1
        action = self.crash_at.pop(self.steps, None)
        if action is not None:
            # The action runs between two steps of the loop, not in the middle of the step that
            # reached the count.
            asyncio.get_running_loop().call_soon(action)

    def draw_slices(self, length: int) -> list[tuple[int, int]]:
        """Cut ``length`` bytes into a few slices, (begin, end) each, that move by themselves."""
        if length <= 0:
            return []
        cuts = {0, length, *(self.random.randrange(length) for _ in range(2))}
        return list(itertools.pairwise(sorted(cuts)))

    # The methods below kill and stop processes.

    def kill(self, process: Process) -> None:
        """End a process and its sessions."""
        process.kill()
        self.end_sessions_of(process)

    def stall(self, process: Process) -> None:
        """Stop a process for a while; its sessions end in the meantime."""
        process.stall_until(process.loop.now_s + self.random.uniform(*STALL_S))
        for session in self.sessions:
            if process in (session.near, session.far):
                self.network.spawn(self.lose_silent(session))

    # The methods below open and end sessions.

    def open_session(self, near: Process, far: Process) -> Session:
        """Return the direction from ``near`` to ``far`` of a new session."""
        session = Session(self, near, far)
        session.back = Session(self, far, near)
        session.back.back = session
        self.sessions.append(session)
        return session

    def end_session(self, session: Session) -> None:
        """Close a session and tell the far side."""
        if not session.is_open:
            return
        session.close()
        self.sessions = [other for other in self.sessions if other is not session]
        self.on_session_end(session)

    def end_sessions_of(self, process: Process) -> None:
        """Close all sessions from and to a process."""
        for session in [s for s in self.sessions if process in (s.near, s.far)]:
            self.end_session(session)

    async def lose_silent(self, session: Session) -> None:
        """End a session when the lease of the control channel has passed."""
        await asyncio.sleep(SILENT_S)
        self.end_session(session)

    # The methods below cut channels between processes, and ask for cuts.

    def is_cut_by_name(self, a: str, b: str) -> bool:
        """Return True if nothing passes between the processes of two names."""
        return frozenset((a, b)) in self.cuts

    def is_cut(self, near: Process, far: Process) -> bool:
        """Return True if nothing passes between two processes."""
        return bool(self.cuts) and self.is_cut_by_name(near.name, far.name)

    def cut_off(self, a: str, others: Iterable[str]) -> Callable[[], None]:
        """Let nothing pass between one name and others; returns what mends it."""
        pairs = {frozenset((a, b)) for b in others}
        self.cuts |= pairs
        for session in self.sessions:
            if frozenset((session.near.name, session.far.name)) in pairs:
                self.network.spawn(self.lose_silent(session))

        def mend() -> None:
            self.cuts -= pairs

        return mend
