"""How the server of the simulated world starts and reaches instances.

The server's supervisors, sessions and dispatcher are the product's; here are what they call: a
launcher, and the control channel. That is an ordered connection which loses nothing while it lives,
but may be slow, and ends when a side dies or has been silent for a while.
"""

import asyncio
import contextlib

import msgspec
from sim_instance import SimInstance

from tandem.core.errors import DeadlineError, PeerLostError, TandemError, make_error
from tandem.core.wire import (
    CancelRequest,
    InstanceStage,
    ReleaseHold,
    StageChanged,
    StepOutputs,
)
from tandem.engine.process.methods import METHODS
from tandem.sim.world import SILENT_S

START_S = (0.2, 2.0)
"""From the start of a process until it serves."""
METHODS_BY_NAME = {method.name: method for method in METHODS}
Event = CancelRequest | ReleaseHold | StepOutputs | StageChanged


class Lane:
    """One direction of a connection: messages arrive in order, each some time after it was sent."""

    def __init__(self, world, sender, receiver, take) -> None:
        self._world, self._sender, self._receiver, self._take = world, sender, receiver, take
        self._last_s = 0.0
        self._waiting: list = []
        self.is_open = True

    def send(self, *message) -> None:
        world = self._world
        delay_s = world.random.expovariate(1 / 0.001)
        if world.random.random() < world.faults.late:
            delay_s += world.random.uniform(0.1, 2.5)
        loop = world.network.loop
        self._last_s = max(self._last_s, loop.now_s + delay_s)
        self._waiting.append(message)
        loop.call_at(self._last_s, self._arrive)

    def _arrive(self) -> None:
        context = self._world.context if self._receiver is None else self._receiver.context
        self._world.network.loop.call_soon(self._take_next, context=context)

    def _take_next(self) -> None:
        message = self._waiting.pop(0)
        if self.is_open and (self._receiver is None or self._receiver.is_alive):
            self._world.note_step()
            self._take(*message)


class SimClient:
    """A ``SessionClient``, and the other end of it: a ``ServerPeer``."""

    silence_s = 0.0

    def __init__(self, world, instance: SimInstance) -> None:
        self._world, self._instance = world, instance
        self._take_event = self._note_lost = None
        self._calls: dict[int, asyncio.Future] = {}
        self._handlers: dict[int, asyncio.Task] = {}
        self._num_calls = 0
        self.is_connected = False
        self._to_instance = Lane(world, None, instance.process, self._arrive_there)
        self._to_server = Lane(world, instance.process, None, self._arrive_here)

    def on_event(self, callback, event_type) -> None:
        assert event_type == StepOutputs | StageChanged
        self._take_event = callback

    def on_peer_lost(self, callback) -> None:
        self._note_lost = callback

    async def __aenter__(self):
        process = self._instance.process
        await asyncio.sleep(self._world.random.uniform(*START_S))
        await process.pass_stall()
        if not process.is_alive:
            raise PeerLostError("world.connect", f"{process.name} died while it started")
        self.is_connected = True
        self._world.clients.append(self)
        self._to_server.send("event", msgspec.msgpack.encode(StageChanged(InstanceStage.READY)))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.end("closed", tell=False)

    def end(self, why: str, *, tell: bool = True, forget_in_s: float = 0.0) -> None:
        """Both sides learn of it, a stopped one when it goes on.

        ``forget_in_s``: until the instance gives up a server that is silent.
        """
        if not self.is_connected:
            return
        self.is_connected = False
        self._world.clients.remove(self)
        self._to_instance.is_open = self._to_server.is_open = False
        error = PeerLostError("world.rpc", why)
        calls, self._calls = self._calls, {}
        for call in calls.values():
            if not call.done():
                call.set_exception(error)
        process = self._instance.process
        if process.is_alive:
            forget = self._instance.api.forget_peer
            if forget_in_s:
                process.loop.call_later(forget_in_s, forget, self, error, context=process.context)
            else:
                process.loop.call_soon(forget, self, error, context=process.context)
        if tell:
            self._note_lost(self, error)

    async def lose_silent(self) -> None:
        """End it if the instance does not answer for as long as the control channel waits."""
        await asyncio.sleep(SILENT_S)
        if self._instance.process.is_stalled:
            self.end("silent")

    @property
    def process(self):
        return self._instance.process

    # The server's end.

    async def call(self, method, request, response_type, *, timeout_s=30.0):
        if not self.is_connected:
            raise PeerLostError("world.rpc", "not connected")
        number = self._num_calls = self._num_calls + 1
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        self._to_instance.send("call", number, method, msgspec.msgpack.encode(request))
        try:
            async with asyncio.timeout(timeout_s):
                return msgspec.msgpack.decode(await answer, type=response_type)
        except TimeoutError as error:
            if isinstance(error, TandemError):
                raise
            self._cancel_there(number)
            raise DeadlineError("world.rpc", f"{method}: no answer in {timeout_s} s") from None
        except asyncio.CancelledError:
            self._cancel_there(number)
            raise
        finally:
            self._calls.pop(number, None)

    def _cancel_there(self, number: int) -> None:
        if self.is_connected:
            self._to_instance.send("cancel", number)

    def push(self, event) -> None:
        if not self.is_connected:
            raise PeerLostError("world.rpc", "not connected")
        self._to_instance.send("event", msgspec.msgpack.encode(event))

    def _arrive_here(self, kind: str, *message) -> None:
        if kind == "event":
            self._take_event(self, msgspec.msgpack.decode(message[0], type=Event))
            return
        number, outcome = message
        call = self._calls.get(number)
        if call is None or call.done():
            return
        if isinstance(outcome, TandemError):
            call.set_exception(make_error(outcome.code, outcome.where, outcome.what, outcome.field))
        else:
            call.set_result(outcome)

    # The instance's end.

    def push_threadsafe(self, event) -> None:
        if not self.is_connected:
            raise PeerLostError("world.rpc", "not connected")
        self._to_server.send("event", msgspec.msgpack.encode(event))

    def _arrive_there(self, kind: str, *message) -> None:
        if kind == "event":
            event = msgspec.msgpack.decode(message[0], type=Event)
            self._instance.api.take_event(self, event)
        elif kind == "cancel":
            handler = self._handlers.pop(message[0], None)
            if handler is not None:
                handler.cancel()
        else:
            number = message[0]
            handler = self._instance.process.spawn(self._answer(*message))
            self._handlers[number] = handler
            handler.add_done_callback(lambda _: self._handlers.pop(number, None))

    async def _answer(self, number: int, method: str, payload: bytes) -> None:
        called = METHODS_BY_NAME[method]
        request = msgspec.msgpack.decode(payload, type=called.request_type)
        try:
            outcome = msgspec.msgpack.encode(await self._instance.api.handle(called, self, request))
        except TandemError as error:
            outcome = error
        self._to_server.send("answer", number, outcome)


class SimChild:
    """An ``InstanceChild``."""

    pid = 1

    def __init__(self, world, instance: SimInstance) -> None:
        self._world, self.instance = world, instance
        self.client = SimClient(world, instance)
        self.exited = asyncio.Event()
        world.children[instance.process.instance_id] = self

    async def wait(self) -> int:
        await self.exited.wait()
        return -9

    async def end(self, *, is_lost=False) -> None:
        if self.instance.process.is_alive:
            # Asked first, as a process that is well ends by itself.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.exited.wait(), 0.05)
            self._world.kill(self.instance.process)


class SimLauncher:
    """A ``Launcher`` of one instance."""

    def __init__(self, world) -> None:
        self._world = world

    async def start(self, spec) -> SimChild:
        instance = SimInstance(self._world, spec.name, spec.role, self._world.draw_weights(spec))
        self._world.instances[spec.name] = instance
        return SimChild(self._world, instance)

    async def close(self) -> None:
        pass
