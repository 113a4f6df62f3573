"""A master's place in a process: filled while the process leads, empty otherwise.

Whatever is called goes through the seat, which answers only while the term holds: asked before,
so that nothing begins late, and again after, so that nothing is acknowledged late. Each term has a
master of its own; what an earlier one knew is never used again. Knows no socket.
"""

import asyncio
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from tandem.core.clock import Clock
from tandem.core.errors import PeerLostError, TandemError
from tandem.store.config import StoreConfig
from tandem.store.election.campaign import Campaign
from tandem.store.election.roster import RosterStore
from tandem.store.master.master import OpenWay, StoreMaster
from tandem.store.messages import LeaderAnswer
from tandem.store.metrics import StoreCounters
from tandem.store.sessions import Caller

__all__ = ["MasterSeat"]

logger = logging.getLogger(__name__)


class _SeatTerm:
    """One term: over for good when it is, though there may be later ones."""

    def __init__(self, seat: "MasterSeat", campaign: Campaign, epoch: int) -> None:
        self._seat = seat
        self._campaign = campaign
        self._epoch = epoch

    def holds(self) -> bool:
        return self._seat.master.epoch == self._epoch and self._campaign.holds()

    def resign(self, *, min_epoch: int) -> None:
        if self.holds():
            self._campaign.resign(min_epoch=min_epoch)


class MasterSeat:
    """Serves a master, or says who does. All calls from one event loop.

    Args:
        config: of the store.
        clock: of the master.
        draw: chance, see ``StoreMaster``.
        end_sessions: called with the reason when a term ends: hosts and clients look elsewhere.
        open_way: see ``StoreMaster``.
        open_roster: returns the way to the membership for the term of an epoch.
        damaged: names what of this process's files did not hold together; it may grow.
    """

    def __init__(
        self,
        config: StoreConfig,
        *,
        clock: Clock,
        draw: Callable[[int], int],
        end_sessions: Callable[[TandemError], None],
        open_way: OpenWay | None = None,
        open_roster: Callable[[int], RosterStore] | None = None,
        damaged: Sequence[str] = (),
    ) -> None:
        self.counters = StoreCounters()
        self.campaign: Campaign | None = None
        """None: a single master, which always leads."""
        self._config = config
        self._clock = clock
        self._draw = draw
        self._end_sessions = end_sessions
        self._open_way = open_way
        self._open_roster = open_roster
        self._damaged = damaged
        self._closing: set[asyncio.Task[None]] = set()
        self.master = self._make_master(0)
        """While nobody sits here, one of epoch 0, empty, that nobody can call."""
        self._handlers: dict[str, Callable[..., Any]] = {}

    @property
    def is_leader(self) -> bool:
        """Whether it may serve now."""
        return self.master.epoch > 0 and (self.campaign is None or self.campaign.holds())

    def methods(self) -> list[tuple[str, Callable[..., Any], type, type]]:
        """Return what hosts and clients may call, over all terms; see ``StoreMaster.methods``."""
        table: list[tuple[str, Callable[..., Any], type, type]] = [
            ("leader", self._leader, type(None), LeaderAnswer)
        ]
        for name, handler, request, response in self.master.methods():
            is_async = asyncio.iscoroutinefunction(handler)
            serve = self._serve if is_async else self._serve_plain
            table.append((name, _bind(serve, name, is_async=is_async), request, response))
        return table

    def take(self, epoch: int) -> None:
        """Begin a term. For ``Campaign``, or once and for all."""
        self.master = self._make_master(epoch)
        self._handlers = {name: handler for name, handler, *_ in self.master.methods()}
        self.counters.terms += 1
        self.master.start()

    def leave(self) -> None:
        """End the term, if there is one. For ``Campaign``."""
        master = self.master
        if master.epoch == 0:
            return
        self._handlers.clear()
        self.master = self._make_master(0)
        closing = asyncio.get_running_loop().create_task(master.aclose())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        self._end_sessions(self._describe())

    def on_caller_lost(self, caller: Caller) -> None:
        """See ``StoreMaster``."""
        self.master.on_caller_lost(caller)

    async def aclose(self) -> None:
        """End the master's tasks."""
        await self.master.aclose()
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _make_master(self, epoch: int) -> StoreMaster:
        term = None if self.campaign is None else _SeatTerm(self, self.campaign, epoch)
        master = StoreMaster(
            self._config,
            clock=self._clock,
            epoch=epoch,
            draw=self._draw,
            term=term,
            open_way=self._open_way,
            roster=None if not epoch or self._open_roster is None else self._open_roster(epoch),
        )
        master.counters = self.counters
        master.damaged = self._damaged
        return master

    def _leader(self, _: Caller, __: None) -> LeaderAnswer:
        if self.is_leader:
            return LeaderAnswer(is_leader=True, epoch=self.master.epoch)
        leader = None if self.campaign is None else self.campaign.leader
        if leader is None:
            return LeaderAnswer(is_leader=False)
        return LeaderAnswer(is_leader=False, address=leader.address, epoch=leader.epoch)

    def _describe(self) -> PeerLostError:
        leader = None if self.campaign is None else self.campaign.leader
        who = "nobody that is known" if leader is None else leader.address
        return PeerLostError("store.leader", f"this master does not lead; {who} does")

    async def _serve(self, name: str, caller: Caller, request: Any) -> Any:
        self._check_leads()
        master = self.master
        answer = await self._handlers[name](caller, request)
        self._check_leads(master)
        return answer

    def _serve_plain(self, name: str, caller: Caller, request: Any) -> Any:
        self._check_leads()
        answer = self._handlers[name](caller, request)
        self._check_leads()
        return answer

    def _check_leads(self, master: StoreMaster | None = None) -> None:
        if not self.is_leader or (master is not None and master is not self.master):
            raise self._describe()


def _bind(serve: Callable[..., Any], name: str, *, is_async: bool) -> Callable[..., Any]:
    """Return ``serve`` for one method; a coroutine function if it is one, which rpc looks at."""
    if not is_async:
        return functools.partial(serve, name)

    async def bound(caller: Caller, request: Any) -> Any:
        return await serve(name, caller, request)

    return bound
