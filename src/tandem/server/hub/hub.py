"""Wakes models when they are asked for, and lets others sleep to make room.

One wakes at a time, in the order of asking. A request passes a gate before it is submitted: there
its model is awake, and stays so until the request has ended. All of it runs on one event loop.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol

from starlette.applications import Starlette

from tandem.core.errors import NotFoundError, PeerLostError
from tandem.core.wire import InstanceInfo
from tandem.server.engine import EngineClient
from tandem.server.hub.residency import Residency

__all__ = ["HostedModel", "ModelHub", "SleepingEngine"]

logger = logging.getLogger(__name__)

WAKE_TIMEOUT_S = 1800.0
"""For the weights to be read."""
State = Literal["new", "waking", "awake", "draining", "asleep", "evicted"]


class SleepingEngine(EngineClient, Protocol):
    """An engine whose instances can be without processes."""

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        ...

    async def sleep(self) -> None:
        """End the processes once no request is live; prepare the next start."""
        ...

    async def evict(self) -> None:
        """Give up what ``sleep`` has prepared."""
        ...

    async def wake(self) -> InstanceInfo:
        """Start the processes; returns when they serve. Raises PeerLostError."""
        ...


@dataclass(slots=True, eq=False)
class HostedModel:
    """One model."""

    name: str
    app: Starlette
    """From ``build_app``, over the engine."""
    engine: SleepingEngine
    is_pinned: bool = False
    """It never sleeps to make room for another."""
    state: State = "new"
    num_entering: int = 0
    """Requests between the gate and the engine."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Replaced and set whenever the state changes."""

    def enter(self, state: State) -> None:
        """Change the state."""
        logger.info("event=model_state model=%s state=%s", self.name, state)
        self.state = state
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    @property
    def is_busy(self) -> bool:
        """True if it has requests."""
        return bool(self.num_entering or self.engine.num_live)


class ModelHub:
    """The models of one address.

    Args:
        models: by name; borrowed.
        residency: of their needs.
    """

    def __init__(self, models: Mapping[str, HostedModel], residency: Residency) -> None:
        self.models = dict(models)
        self.residency = residency
        self._waking = asyncio.Lock()
        """Fair: it is taken in the order of asking."""
        self._wakes: dict[str, asyncio.Task[None]] = {}
        """Under way, or waiting for their turn."""

    def make_loader(self, name: str) -> Callable[[], Awaitable[None]]:
        """Return what loads a model that never was, so that what is sent can be checked."""

        async def load() -> None:
            if self.find(name).state in ("new", "waking") and self.find(name).engine.info is None:
                await self.wake(name)

        return load

    def make_gate(self, name: str) -> "partial[AbstractAsyncContextManager[None]]":
        """Return the gate of a model's requests; see ``ClusterClient.gate``."""
        return partial(self.use, name)

    def find(self, name: str) -> HostedModel:
        """Return a model by its name; raises NotFoundError."""
        model = self.models.get(name)
        if model is None:
            what = f"there is no model {name[:100]!r}: {', '.join(self.models)}"
            raise NotFoundError("hub.find", what, field="model")
        return model

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[None]:
        """Hold a model awake; wakes it first.

        Raises: as ``wake``.
        """
        model = self.find(name)
        self.residency.note_use(name)
        while model.state != "awake":
            await self.wake(name)
        model.num_entering += 1
        try:
            yield
        finally:
            model.num_entering -= 1

    async def wake(self, name: str) -> None:
        """Wake a model, or load it for the first time.

        Raises: NotFoundError; ConfigError (there is no room for it); PeerLostError (it cannot
            serve; says why).
        """
        self.find(name)
        task = self._wakes.get(name)
        if task is None:
            # Waking runs as its own task: if the request that asked first is cancelled, the others
            # still wait for the model.
            task = self._wakes[name] = asyncio.create_task(self._wake(name))
            task.add_done_callback(partial(self._forget_wake, name))
        await asyncio.shield(task)

    def _forget_wake(self, name: str, task: "asyncio.Task[None]") -> None:
        del self._wakes[name]
        if not task.cancelled():
            # Retrieve the exception, so that asyncio does not log it as never retrieved when no
            # request waited.
            task.exception()

    async def close(self) -> None:
        """End what is under way."""
        tasks = list(self._wakes.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _wake(self, name: str) -> None:
        model = self.find(name)
        async with self._waking:
            if model.state == "awake":
                return
            busy = {each.name for each in self.models.values() if each.is_busy}
            pinned = {each.name for each in self.models.values() if each.is_pinned}
            for victim in self.residency.choose_victims(name, busy, pinned):
                await self._sleep(self.models[victim])
            before = model.state
            model.enter("waking")
            self.residency.note_awake(name)
            try:
                async with asyncio.timeout(WAKE_TIMEOUT_S):
                    info = await model.engine.wake()
            except BaseException as error:
                # A wake that failed puts the model back to sleep, so that the memory it has taken
                # is free again.
                model.enter("draining")
                await asyncio.shield(model.engine.sleep())
                self.residency.note_asleep(name)
                model.enter("asleep" if before != "new" else "new")
                if isinstance(error, TimeoutError):
                    what = f"{name} did not serve within {WAKE_TIMEOUT_S:g} s"
                    raise PeerLostError("hub.wake", what) from error
                raise
            kv_bytes = info.num_blocks * info.block_size * info.kv_bytes_per_token
            self.residency.note_need(name, info.weight_bytes + kv_bytes)
            model.enter("awake")

    async def sleep(self, name: str) -> None:
        """Let a model end its requests, and give its memory back; its next wake is prepared."""
        model = self.find(name)
        async with self._waking:
            await self._sleep(model)

    async def evict(self, name: str) -> None:
        """Do as ``sleep``, and prepare nothing."""
        model = self.find(name)
        async with self._waking:
            await self._sleep(model)
            if model.state == "asleep":
                await model.engine.evict()
                model.enter("evicted")

    async def _sleep(self, model: HostedModel) -> None:
        if model.state != "awake":
            return
        # In the state "draining" new requests for the model wait at the gate.
        model.enter("draining")
        while model.num_entering:
            await asyncio.sleep(0.01)
        await model.engine.sleep()
        self.residency.note_asleep(model.name)
        model.enter("asleep")

    def pin(self, name: str, *, is_pinned: bool) -> None:
        """Say whether a model may sleep to make room for another."""
        self.find(name).is_pinned = is_pinned
