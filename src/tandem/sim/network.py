"""Calls between simulated processes, in which messages are lost, delayed or duplicated, and links
cut.
"""

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
"""Code, place, text and field of an error (an empty code for success), and the body."""

CALL_TIMEOUT_S = 30.0
"""Timeout in seconds of a call without a deadline."""


class Faults(msgspec.Struct, frozen=True):
    """Probabilities of faults, each per message or per write unless the field says otherwise."""

    lose: float = 0.0
    late: float = 0.0
    double: float = 0.0
    stall: float = 0.0
    """Probability that a process is stopped in the middle of a write."""
    drag: float = 0.0
    """Probability that a slice of a read takes up to a second, so that its space might be reused
    meanwhile.
    """
    rot_per_s: float = 0.0
    """Rate per second at which bytes of objects change by themselves."""
    disk: float = 0.0
    """Rate of disk faults (errors, full, slow, hung); 1 means a few of each per minute."""


class NetworkWorld(Protocol):
    """The part of a ``World`` (a simulated run) that carries calls."""

    random: Random
    faults: Faults
    network: Process
    num_answers: Counter[str]

    async def travel(self) -> None:
        """Wait the travel time of one message, or of one slice of the bytes of a transfer."""
        ...

    def is_cut(self, near: Process, far: Process) -> bool:
        """Return True if the link between two processes is cut."""
        ...

    def note_step(self) -> None:
        """Count a step of the run (a message, an answer or a slice of bytes), at which a test may
        kill a process.
        """
        ...

    def note_answer(self, far: Process, method: str, *, error: str, body: bytes) -> None:
        """Observe an answer before it is sent; ``error`` is a code, empty for success."""
        ...


class Session:
    """One direction of a session: calls from ``near`` to ``far``, with the interface of
    ``rpc.Peer``.

    ``World.open_session`` creates both directions. Requests and answers are passed as msgpack, so
    that no two processes share an object.
    """

    back: "Session"
    """The same session seen from the process on the other side."""

    def __init__(self, world: NetworkWorld, near: Process, far: Process) -> None:
        self.world, self.near, self.far = world, near, far
        self.is_open = True
        self.lost = asyncio.Event()
        """Event that is set when the session has ended."""

    @property
    def name(self) -> str:
        """Name of the process on the other side."""
        return self.far.name

    @property
    def instance_id(self) -> str:
        """Id of the other process, new at each start."""
        return self.far.instance_id

    @property
    def is_lost(self) -> bool:
        """True if the session has ended."""
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

        Raises: PeerLostError (there is no session, or the far process is gone); DeadlineError (no
            answer within ``timeout_s``); the errors of the method.
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
        """Start a call as a task; calls are sent in the order in which they were started."""
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
        """Run the handler in the far process; return None if that process died meanwhile."""
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
        # Checks that the answer has the declared type.
        msgspec.msgpack.decode(body, type=response_type)
        return ("", "", "", None, body)
