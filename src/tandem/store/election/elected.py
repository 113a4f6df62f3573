"""The master of a process that takes part in elections: present while the process leads.

All calls are checked twice against the term: before the handler, so that none begins late, and
after it, so that none is acknowledged late. Each term has a new master, which knows nothing of an
earlier one. Opens no socket.
"""

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, Protocol, TypeVar

from tandem.core.errors import PeerLostError, TandemError
from tandem.rpc import Kept
from tandem.store.election.campaign import Campaign
from tandem.store.messages import LeaderAnswer
from tandem.store.metrics import StoreCounters
from tandem.store.sessions import Caller
from tandem.store.tasks import Tasks

__all__ = ["ElectableMaster", "ElectedMaster", "Term"]

logger = logging.getLogger(__name__)


class Term(Protocol):
    """The time for which this process is the elected leader, and so runs the master; see
    ``Campaign``.
    """

    def holds(self) -> bool:
        """Return True while the term lasts, so that the master may serve."""
        ...

    def resign(self, *, min_epoch: int) -> None:
        """End the term (time as leader), so that the epoch (number) of the next one is above
        ``min_epoch``.
        """
        ...


class ElectableMaster(Protocol):
    """The part of ``StoreMaster`` that ``ElectedMaster`` uses."""

    @property
    def epoch(self) -> int:
        """The epoch (number) of the term for which the master was elected; 0 for a master that
        cannot be called.
        """
        ...

    def methods(self) -> list[tuple[str, Callable[..., Any], type, type]]:
        """Return the methods that hosts and clients may call."""
        ...

    def start(self) -> None:
        """Start the master's periodic work."""
        ...

    async def aclose(self) -> None:
        """Stop all tasks of the master."""
        ...

    def on_caller_lost(self, caller: Caller) -> None:
        """Note that a session with a host or client has ended."""
        ...


M = TypeVar("M", bound=ElectableMaster)


class _ElectedTerm:
    """One term (time as leader) of this process. Once over it stays over, also during later
    terms.
    """

    def __init__(self, elected: "ElectedMaster[Any]", campaign: Campaign, epoch: int) -> None:
        self._elected = elected
        self._campaign = campaign
        self._epoch = epoch

    def holds(self) -> bool:
        return self._elected.master.epoch == self._epoch and self._campaign.holds()

    def resign(self, *, min_epoch: int) -> None:
        if self.holds():
            self._campaign.resign(min_epoch=min_epoch)


class ElectedMaster(Generic[M]):
    """Serves a master while this process leads, else answers who leads. All calls come from one
    event loop.

    Args:
        make_master: makes the master of an epoch, from its term (None: it never ends) and the
            counters of all terms.
        end_sessions: called with the reason when a term ends, so that hosts and clients reconnect
            to the new leader.
    """

    def __init__(
        self,
        make_master: "Callable[[int, Term | None, StoreCounters], M]",
        *,
        end_sessions: Callable[[TandemError], None],
    ) -> None:
        self.counters = StoreCounters()
        self.campaign: Campaign | None = None
        """The campaign in an election; None for a single master, which always leads."""
        self._make = make_master
        self._end_sessions = end_sessions
        self._closing = Tasks()
        self.master = self._make_master(0)
        """The master of the current term; between terms an empty one of epoch 0 that cannot be
        called.
        """
        self._handlers: dict[str, Callable[..., Any]] = {}

    @property
    def is_leader(self) -> bool:
        """True if this process may serve now."""
        return self.master.epoch > 0 and (self.campaign is None or self.campaign.holds())

    def methods(self) -> list[tuple[str, Callable[..., Any], type, type]]:
        """Return the methods that hosts and clients may call, valid over all terms (times as
        leader) of this process; see ``StoreMaster.methods``.
        """
        table: list[tuple[str, Callable[..., Any], type, type]] = [
            ("leader", self._leader, type(None), LeaderAnswer)
        ]
        for name, _, request, response in self.master.methods():
            table.append((name, functools.partial(self._serve, name), request, response))
        return table

    def take(self, epoch: int) -> None:
        """Begin a term (time as leader) with a new master. Called by ``Campaign``, or once for a
        single master.
        """
        self.master = self._make_master(epoch)
        self._handlers = {name: handler for name, handler, *_ in self.master.methods()}
        self.counters.terms += 1
        self.master.start()

    def leave(self) -> None:
        """End the current term (time as leader), if there is one, and stop serving its master.
        Called by ``Campaign``.
        """
        master = self.master
        if master.epoch == 0:
            return
        self._handlers.clear()
        self.master = self._make_master(0)
        self._closing.spawn(master.aclose())
        self._end_sessions(self._describe())

    def on_caller_lost(self, caller: Caller) -> None:
        """Tell the current master, if this process has one, that a session with a host or client
        has ended.
        """
        self.master.on_caller_lost(caller)

    async def aclose(self) -> None:
        """Stop the tasks of the current master, and wait for those of earlier ones."""
        await self.master.aclose()
        await self._closing.join()

    def _make_master(self, epoch: int) -> M:
        term = None if self.campaign is None else _ElectedTerm(self, self.campaign, epoch)
        return self._make(epoch, term, self.counters)

    def _leader(self, _: Caller, __: None) -> LeaderAnswer:
        begin_s = time.perf_counter()
        leader = None if self.campaign is None else self.campaign.leader
        if self.is_leader:
            answer = LeaderAnswer(is_leader=True, epoch=self.master.epoch)
        elif leader is None:
            answer = LeaderAnswer(is_leader=False)
        else:
            answer = LeaderAnswer(is_leader=False, address=leader.address, epoch=leader.epoch)
        self._observe("leader", begin_s)
        return answer

    def _describe(self) -> PeerLostError:
        leader = None if self.campaign is None else self.campaign.leader
        who = "nobody that is known" if leader is None else leader.address
        return PeerLostError("store.leader", f"this master does not lead; {who} does")

    def _serve(self, name: str, caller: Caller, request: Any) -> Any:
        """Call the current master's handler. Return the answer, or a coroutine if the answer takes
        time.
        """
        begin_s, is_answered = time.perf_counter(), True
        try:
            self._check_leads()
            master = self.master
            answer = self._handlers[name](caller, request)
            is_kept = isinstance(answer, Kept)
            if is_kept or asyncio.iscoroutine(answer):
                is_answered = False
                work = answer.work if is_kept else answer
                work = _Finished(work, functools.partial(self._finish, name, begin_s, master))
                return Kept(work) if is_kept else work
            self._check_leads(master)
            return answer
        finally:
            if is_answered:
                self._observe(name, begin_s)

    def _finish(self, name: str, begin_s: float, master: M, *, is_answered: bool) -> None:
        self._observe(name, begin_s)
        if is_answered:
            self._check_leads(master)

    def _observe(self, name: str, begin_s: float) -> None:
        self.counters.observe(name, time.perf_counter() - begin_s)

    def _check_leads(self, master: M | None = None) -> None:
        if not self.is_leader or (master is not None and master is not self.master):
            raise self._describe()


class _Finished(Coroutine[Any, Any, Any]):
    """A handler's work with ``end`` after it, which is told whether it has an answer, and may raise
    an error instead.

    To close this before it has begun closes the work as well. A coroutine with the work as an
    argument would leave it behind, never awaited, when a call is cancelled before its turn.
    """

    def __init__(self, work: Coroutine[Any, Any, Any], end: Callable[..., None]) -> None:
        self._work = work
        self._steps = self._run(end)

    def _run(self, end: Callable[..., None]) -> Generator[Any, Any, Any]:
        try:
            answer = yield from self._work.__await__()
        except BaseException:
            end(is_answered=False)
            raise
        end(is_answered=True)
        return answer

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._steps

    def send(self, value: Any) -> Any:
        return self._steps.send(value)

    def throw(self, *error: Any) -> Any:
        try:
            return self._steps.throw(*error)
        except BaseException:
            self._work.close()  # If this had not begun, the work has not either.
            raise

    def close(self) -> None:
        self._steps.close()
        self._work.close()
