"""Calls between processes of the simulated world: lost in either direction, late, doubled, cut."""

import asyncio
from collections import Counter
from random import Random
from typing import Any, Protocol, TypeVar

import msgspec

from tandem.core.errors import DeadlineError, PeerLostError, TandemError, make_error
from tandem.rpc import Kept
from tandem.sim.process import Process

__all__ = ["Faults", "Session"]

T = TypeVar("T")
Answer = tuple[str, str, str, str | None, bytes]
"""Code, place, text and field of an error, or an empty code; and the body."""

CALL_TIMEOUT_S = 30.0
"""Seconds of a call that names no deadline."""


class Faults(msgspec.Struct, frozen=True):
    """Probabilities, each of one message or one write unless it says otherwise."""

    lose: float = 0.0
    late: float = 0.0
    double: float = 0.0
    stall: float = 0.0
    """A process that is stopped in the middle of a write."""
    drag: float = 0.0
    """A slice of a read that takes up to a second: readers that space could be reused under."""
    rot_per_s: float = 0.0
    """Bytes of objects that flip by themselves."""
    disk: float = 0.0
    """Rate at which a disk fails, fills, slows down or hangs: each a few times a minute at 1."""


class NetworkWorld(Protocol):
    """The part of a ``World`` that carries calls."""

    random: Random
    faults: Faults
    network: Process
    num_answers: Counter[str]

    async def travel(self) -> None:
        """Take the time of one message or slice."""
        ...

    def is_cut(self, near: Process, far: Process) -> bool:
        """Return True if nothing passes between two processes."""
        ...

    def note_step(self) -> None:
        """Count a step."""
        ...

    def note_answer(self, far: Process, method: str, *, error: str, body: bytes) -> None:
        """Look at an answer that is about to leave; ``error`` is a code, empty for none."""
        ...


class Session:
    """One direction of a session: calls from ``near`` to ``far``; what ``rpc.Peer`` is.

    ``World.open_session`` makes both directions. Requests and answers cross as msgpack, so that
    no two processes share an object.
    """

    back: "Session"
    """The other direction."""

    def __init__(self, world: NetworkWorld, near: Process, far: Process) -> None:
        self.world, self.near, self.far = world, near, far
        self.is_open = True
        self.lost = asyncio.Event()
        """Set when it has ended."""

    @property
    def name(self) -> str:
        """The name that the other side gives itself."""
        return self.far.name

    @property
    def instance_id(self) -> str:
        """Another for each start of the other process."""
        return self.far.instance_id

    @property
    def is_lost(self) -> bool:
        """True if it has ended."""
        return not self.is_open

    def close(self) -> None:
        """End both directions; ``World.end_session`` also tells the far side."""
        for side in (self, self.back):
            side.is_open = False
            side.lost.set()

    async def call(
        self,
        method: str,
        request: object,
        response_type: type[T],
        *,
        timeout_s: float | None = None,
    ) -> T:
        """Call a method of the far process.

        Raises: PeerLostError; DeadlineError; what the method raises.
        """
        await self.near.pass_stall()
        if not (self.is_open and self.near.is_alive):
            raise PeerLostError("world.call", f"no session with {self.far.name}")
        world, chance = self.world, self.world.random
        data = msgspec.msgpack.encode(request)
        reply: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        copies = 2 if chance.random() < world.faults.double else 1
        for number in range(copies):
            if chance.random() < world.faults.lose:
                continue
            world.network.spawn(self._deliver(method, data, reply if number == 0 else None))
        lost = asyncio.ensure_future(self.lost.wait())
        try:
            await asyncio.wait(
                (reply, lost),
                timeout=timeout_s or CALL_TIMEOUT_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
            await self.near.pass_stall()
            if reply.done():
                code, where, what, field, body = reply.result()
                if code:
                    raise make_error(code, where, what, field)
                return msgspec.msgpack.decode(body, type=response_type)
            if self.lost.is_set():
                raise PeerLostError("world.call", f"{self.far.name} is gone")
            raise DeadlineError("world.call", f"{method}: no answer in {timeout_s} s")
        finally:
            lost.cancel()
            if not reply.done():
                reply.cancel()

    def begin(
        self,
        method: str,
        request: object,
        response_type: type[T],
        *,
        timeout_s: float | None = None,
    ) -> "asyncio.Task[T]":
        """Do as ``call``: it leaves as soon as the loop gets to it, in the order of such calls."""
        calling = self.call(method, request, response_type, timeout_s=timeout_s)
        return asyncio.get_running_loop().create_task(calling)

    async def _deliver(
        self, method: str, data: bytes, reply: "asyncio.Future[Answer] | None"
    ) -> None:
        world = self.world
        await world.travel()
        await self.far.pass_stall()
        if not self.far.is_alive or world.is_cut(self.near, self.far):
            return
        answer = await self._answer(method, data)
        if answer is None:
            return
        world.note_step()
        world.num_answers[method] += 1
        world.note_answer(self.far, method, error=answer[0], body=answer[-1])
        if world.random.random() < world.faults.lose or world.is_cut(self.near, self.far):
            return
        await world.travel()
        if reply is not None and not reply.done() and self.near.is_alive:
            reply.set_result(answer)

    async def _answer(self, method: str, data: bytes) -> Answer | None:
        """Run the handler as the far process; None if that died meanwhile."""
        handler, request_type, response_type = self.far.methods[method]
        request: Any = msgspec.msgpack.decode(data, type=request_type)
        try:
            answer: Any = self.far.run(handler, self.back, request)
            if isinstance(answer, Kept):
                answer = answer.work
            if asyncio.iscoroutine(answer):
                answer = await self.far.spawn(answer)
        except TandemError as error:
            return (error.code, error.where, error.what, error.field, b"")
        except asyncio.CancelledError:
            return None
        body = msgspec.msgpack.encode(answer)
        msgspec.msgpack.decode(body, type=response_type)  # The types of methods are checked here.
        return ("", "", "", None, body)
