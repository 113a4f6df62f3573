"""The models behind one address: each is woken when asked for, and others sleep to make room.

One model wakes at a time, in the order of asking. Before a request is submitted it passes its
model's gate: there it waits until the model is awake, which then stays awake until the request has
ended. All of it runs on one event loop.
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
"""Time limit in seconds of waking a model, which includes reading its weights."""
State = Literal["new", "waking", "awake", "draining", "asleep", "evicted"]


class SleepingEngine(EngineClient, Protocol):
    """An engine that can end its processes to sleep, and start them again."""

    @property
    def num_live(self) -> int:
        """Number of requests that have not ended."""
        ...

    async def sleep(self) -> None:
        """End the processes once no request is live, and prepare a fast start."""
        ...

    async def evict(self) -> None:
        """Give up what ``sleep`` has prepared for a fast start, and its memory."""
        ...

    async def wake(self) -> InstanceInfo:
        """Start the processes; return when they serve.

        Raises: PeerLostError (one cannot serve at all).
        """
        ...


@dataclass(slots=True, eq=False)
class HostedModel:
    """One model of a hub, with its HTTP application and its state (asleep, awake, ...)."""

    name: str
    app: Starlette
    """Application of ``build_app`` over the model's engine."""
    engine: SleepingEngine
    is_pinned: bool = False
    """True if the model is never put to sleep to make room for another."""
    state: State = "new"
    num_entering: int = 0
    """Number of requests for which the model was kept or made awake and which were not submitted to
    its engine yet.
    """
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Event that is set, and replaced by a new one, whenever the state changes."""

    def enter(self, state: State) -> None:
        """Change the model's state, and wake the tasks that wait for a change."""
        logger.info("event=model_state model=%s state=%s", self.name, state)
        self.state = state
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    @property
    def is_busy(self) -> bool:
        """True if it has requests that have not ended."""
        return bool(self.num_entering or self.engine.num_live)


class ModelHub:
    """The models behind one address, of which those that do not fit in memory together sleep.

    Args:
        models: models by name; not owned.
        residency: decides which models are awake.
    """

    def __init__(self, models: Mapping[str, HostedModel], residency: Residency) -> None:
        self.models = dict(models)
        self.residency = residency
        self._waking = asyncio.Lock()
        """Lock that is held while a model is woken; it is fair, so models wake in the order of
        being asked for.
        """
        self._wakes: dict[str, asyncio.Task[None]] = {}
        """Tasks that wake a model or wait for their turn to do so, by the model's name."""

    def make_loader(self, name: str) -> Callable[[], Awaitable[None]]:
        """Return a function that loads a model if it was never loaded, so that its requests can be
        checked.
        """

        async def load() -> None:
            if self.find(name).state in ("new", "waking") and self.find(name).engine.info is None:
                await self.wake(name)

        return load

    def make_gate(self, name: str) -> "partial[AbstractAsyncContextManager[None]]":
        """Return the gate that a model's requests pass before they are submitted: a context that
        keeps the model awake. See ``ClusterClient.gate``.
        """
        return partial(self.use, name)

    def find(self, name: str) -> HostedModel:
        """Return a model by its name. Raises: NotFoundError (there is none of this name)."""
        model = self.models.get(name)
        if model is None:
            what = f"there is no model {name[:100]!r}: {', '.join(self.models)}"
            raise NotFoundError("hub.find", what, field="model")
        return model

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[None]:
        """Wake a model if necessary, and keep it awake while the block runs.

        Raises: errors of ``wake``.
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
        """Wake a model, or load it for the first time; return when it serves.

        Raises: NotFoundError (no model of this name); CapacityError (pinned models leave no room
            for it); ConfigError (there is too little for it alone); PeerLostError (it cannot serve;
            says why).
        """
        self.find(name)
        task = self._wakes.get(name)
        # A wake that has ended stays here until its callback runs, and by then another wake may
        # have put the model to sleep again: waiting for it would return at once, for ever.
        if task is None or task.done():
            # Waking runs as its own task: if the request that asked first is cancelled, the others
            # still wait for the model.
            task = self._wakes[name] = asyncio.create_task(self._wake(name))
            task.add_done_callback(partial(self._forget_wake, name))
        await asyncio.shield(task)

    def _forget_wake(self, name: str, task: "asyncio.Task[None]") -> None:
        if self._wakes.get(name) is task:
            del self._wakes[name]
        if not task.cancelled():
            # Retrieve the exception, so that asyncio does not log it as never retrieved when no
            # request waited.
            task.exception()

    async def close(self) -> None:
        """Cancel the wakes (starts of sleeping models) in progress."""
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
            self.residency.note_need(name, info.memory_bytes)
            model.enter("awake")

    async def sleep(self, name: str) -> None:
        """Put a model to sleep after its requests have ended, and prepare its next start."""
        model = self.find(name)
        async with self._waking:
            await self._sleep(model)

    async def evict(self, name: str) -> None:
        """Put a model to sleep as ``sleep`` does, without preparing its next start."""
        model = self.find(name)
        async with self._waking:
            await self._sleep(model)
            if model.state == "asleep":
                await model.engine.evict()
                model.enter("evicted")

    async def _sleep(self, model: HostedModel) -> None:
        if model.state != "awake":
            return
        # In the state "draining" new requests for the model wait in ``use`` until it is awake
        # again.
        model.enter("draining")
        while model.num_entering:
            await asyncio.sleep(0.01)
        await model.engine.sleep()
        self.residency.note_asleep(model.name)
        model.enter("asleep")

    def pin(self, name: str, *, is_pinned: bool) -> None:
        """Set whether a model must not be put to sleep to make room for another."""
        self.find(name).is_pinned = is_pinned
