"""The simulated world: processes, channels between them, randomness, and faults.

A run is determined by its seed: all random numbers come from ``World.random``, all times from the
loop. Each message, answer and slice of bytes is a *step*; ``crash_at`` acts between two steps, so
that a test can kill a process at every step in turn. The failure of an invariant is recorded in
``violations``, which the test checks at the end.
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
"""Mean seconds that a message or slice travels."""
LATE_S = (0.1, 12.0)
"""Range of additional seconds for a late message."""
STALL_S = (5.0, 60.0)
SILENT_S = 3.0
"""Seconds after which a session with an unresponsive process ends: the lease of the control
channel.
"""


class World:
    """All processes of a run. Created inside a ``VirtualLoop``; subclasses add the simulated parts.

    Args:
       seed: determines the run.
       faults: probabilities of faults.
    """

    def __init__(self, seed: int, faults: Faults) -> None:
        self.random = random.Random(seed)
        self.faults = faults
        self.ids = itertools.count()
        """Counter that gives each process a unique number."""
        self.violations: list[str] = []
        self.network = Process(self, "network")
        """A process that carries messages, which therefore arrive even if their sender dies."""
        self.sessions: list[Session] = []
        """Open sessions, each in the direction from the process that opened it."""
        self.steps = 0
        self.num_answers: collections.Counter[str] = collections.Counter()
        """Number of answers that were sent, by method."""
        self.crash_at: dict[int, Callable[[], None]] = {}
        """Actions, such as a crash, to run after a step of the simulated world, by the step's
        number.
        """
        self.cuts: set[frozenset[str]] = set()
        """Pairs of process names whose link is cut."""
        self.clock = LoopClock()

    # Subclasses override the methods from here to `make_clock`.

    def note_answer(self, far: Process, method: str, *, error: str, body: bytes) -> None:
        """Observe an answer before it is sent; ``error`` is a code, empty for success."""

    def on_session_end(self, session: Session) -> None:
        """Tell the far side that a session has ended, as the control channel does."""

    def make_clock(self) -> Clock:
        """Return the clock of a new process."""
        return self.clock

    # The methods below draw random delays, count steps and cut transfers into slices.

    async def travel(self) -> None:
        """Wait the travel time of one message, or of one slice of the bytes of a transfer."""
        self.note_step()
        delay_s = self.random.expovariate(1 / TRAVEL_S)
        if self.random.random() < self.faults.late:
            delay_s += self.random.uniform(*LATE_S)
        await asyncio.sleep(delay_s)

    def note_step(self) -> None:
        """Count a step of the run (a message, an answer or a slice of bytes), and run the action,
        such as a kill, that ``crash_at`` has for it.
        """
        self.steps += 1
        action = self.crash_at.pop(self.steps, None)
        if action is not None:
            # The action runs between two steps of the loop, not in the middle of the step that
            # reached the count.
            asyncio.get_running_loop().call_soon(action)

    def draw_slices(self, length: int) -> list[tuple[int, int]]:
        """Split ``length`` bytes into a few slices (begin, end), which travel independently."""
        if length <= 0:
            return []
        cuts = {0, length, *(self.random.randrange(length) for _ in range(2))}
        return list(itertools.pairwise(sorted(cuts)))

    # The methods below kill and stop processes.

    def kill(self, process: Process) -> None:
        """Kill a process and end its sessions."""
        process.kill()
        self.end_sessions_of(process)

    def stall(self, process: Process) -> None:
        """Stop a process for a random time. Its sessions end after the lease, the silence after
        which a peer counts as lost.
        """
        process.stall_until(process.loop.now_s + self.random.uniform(*STALL_S))
        for session in self.sessions:
            if process in (session.near, session.far):
                self.network.spawn(self.lose_silent(session))

    # The methods below open and end sessions.

    def open_session(self, near: Process, far: Process) -> Session:
        """Open a session (a control channel) between two processes; return its direction from
        ``near`` to ``far``.
        """
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
        """Wait for the lease of the control channel (the silence after which a peer counts as
        lost), then end a session.
        """
        await asyncio.sleep(SILENT_S)
        self.end_session(session)

    # The methods below cut channels between processes, and ask for cuts.

    def is_cut_by_name(self, a: str, b: str) -> bool:
        """Return True if the link between two process names is cut."""
        return frozenset((a, b)) in self.cuts

    def is_cut(self, near: Process, far: Process) -> bool:
        """Return True if the link between two processes is cut."""
        return bool(self.cuts) and self.is_cut_by_name(near.name, far.name)

    def cut_off(self, a: str, others: Iterable[str]) -> Callable[[], None]:
        """Cut the links between one name and others; return a function that restores them."""
        pairs = {frozenset((a, b)) for b in others}
        self.cuts |= pairs
        for session in self.sessions:
            if frozenset((session.near.name, session.far.name)) in pairs:
                self.network.spawn(self.lose_silent(session))

        def mend() -> None:
            self.cuts -= pairs

        return mend
