"""The LoRA adapters of a cluster: one table of names, to which every instance is kept equal.

An adapter is served once every instance that serves has loaded the same content. An instance that
is restarted gets the list of adapters before its start; changes made during the start are applied
when it serves. Running requests keep the adapter with which they began. All code runs on one event
loop.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from tandem.core.adapter import AdapterInfo, AdapterSource, UnloadAdapter
from tandem.core.errors import (
    CapacityError,
    ConfigError,
    ConflictError,
    NotFoundError,
    PeerLostError,
    TandemError,
)
from tandem.core.wire import AddRequest, InstanceInfo
from tandem.engine.process.methods import LOAD_ADAPTER, UNLOAD_ADAPTER, InstanceMethod

__all__ = ["AdapterMember", "ClusterAdapters"]

Req = TypeVar("Req")
Res = TypeVar("Res")

logger = logging.getLogger(__name__)


class AdapterMember(Protocol):
    """An instance as the adapter table sees it; the object stays the same over restarts."""

    @property
    def name(self) -> str:
        """Name of the instance, unique in the cluster."""
        ...

    @property
    def info(self) -> InstanceInfo | None:
        """The facts of the running instance; None while it does not serve."""
        ...

    def set_adapters(self, sources: Sequence[AdapterSource]) -> None:
        """Set the adapters that the instance loads at its next start."""
        ...

    async def call(self, method: InstanceMethod[Req, Res], request: Req) -> Res:
        """Call a method of the instance; see ``InstanceSession.call``."""
        ...


class ClusterAdapters:
    """The table of LoRA adapters that a cluster serves, by name.

    Args:
        members: all instances; borrowed.
        count_live: given an adapter's digest, returns the number of its requests that have not
            ended.
        max_adapters: largest number of names served at a time; two names for the same content count
            as two.
    """

    def __init__(
        self,
        members: Sequence[AdapterMember],
        count_live: Callable[[str], int],
        max_adapters: int = 64,
    ) -> None:
        self._max_adapters = max_adapters
        self._members = members
        self._count_live = count_live
        self._table: dict[str, AdapterInfo] = {}
        self._leaving: set[str] = set()
        """Digests of adapters that are no longer served but still have live requests."""
        self._has_begun = False
        self._lock = asyncio.Lock()
        """Lock that serialises changes of the table."""
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def table(self) -> Mapping[str, AdapterInfo]:
        """The adapters that requests may ask for, by name."""
        return self._table

    def begin(self, sources: Sequence[AdapterSource]) -> None:
        """Fill the table with the adapters that the instances loaded at their start.

        Raises: ConfigError (more than ``max_adapters``); PeerLostError (one of ``sources`` could
            not be loaded, or instances loaded different content for the same name).
        """
        if len(sources) > self._max_adapters:
            what = f"{len(sources)} adapters, max_adapters allows {self._max_adapters}: raise it"
            raise ConfigError("engine.start", what, field="model.max_adapters")
        for source in sources:
            found: dict[str, AdapterInfo] = {}
            for member in self._members:
                info = member.info
                if info is None:
                    # The instance was lost again; it gets the adapters when it comes back.
                    continue
                if source.name in info.adapter_failures:
                    what = f"adapter {source.name}: {info.adapter_failures[source.name]}"
                    raise PeerLostError("engine.start", what)
                found |= {a.digest: a for a in info.adapters if a.name == source.name}
            if len(found) > 1:
                what = f"adapter {source.name}: {source.folder} changed while it was read"
                raise PeerLostError("engine.start", what)
            for adapter in found.values():
                self._table[source.name] = adapter
        self._has_begun = True
        self._tell_members()

    async def load(self, source: AdapterSource) -> AdapterInfo:
        """Load an adapter on every instance and serve it under its name.

        Raises: CapacityError (``max_adapters`` names are served); ConflictError (the name is taken;
            the file changed meanwhile); PeerLostError (no
            instance serves); what the instances raise.
        """
        async with self._lock:
            if len(self._table) >= self._max_adapters and source.name not in self._table:
                what = f"{len(self._table)} adapters are loaded, the most that max_adapters allows"
                raise CapacityError("engine.load_adapter", f"{what}: unload one")
            if source.name in self._table:
                what = f"an adapter {source.name!r} is loaded: unload it first"
                raise ConflictError("engine.load_adapter", what, field="lora_name")
            members = [member for member in self._members if member.info is not None]
            if not members:
                raise PeerLostError("engine.load_adapter", "no instance serves: try again")
            answers = await asyncio.gather(
                *(member.call(LOAD_ADAPTER, source) for member in members), return_exceptions=True
            )
            loaded = {a.digest: a for a in answers if isinstance(a, AdapterInfo)}
            failures = [answer for answer in answers if isinstance(answer, BaseException)]
            if failures or len(loaded) != 1:
                for digest in loaded:
                    await self._release(digest)
                if failures:
                    raise failures[0]
                what = f"{source.folder} changed while it was read: try again"
                raise ConflictError("engine.load_adapter", what)
            info = next(iter(loaded.values()))
            self._leaving.discard(info.digest)
            self._table[source.name] = info
            self._tell_members()
            return info

    async def unload(self, name: str) -> AdapterInfo:
        """Stop accepting requests for the adapter of this name; requests that run continue.

        Raises: NotFoundError (no adapter of this name is loaded).
        """
        async with self._lock:
            info = self._table.pop(name, None)
            if info is None:
                what = f"no adapter {name[:200]!r} is loaded"
                raise NotFoundError("engine.unload_adapter", what, field="lora_name")
            self._tell_members()
            await self._release(info.digest)
            return info

    def note_serving(self, member: AdapterMember) -> None:
        """Load or unload adapters on an instance that serves again, so that it matches the
        table.
        """
        if self._has_begun:
            self._run(self._bring_in_line(member))

    def note_end(self, request: AddRequest) -> None:
        """Record that a request has ended. If it was the last one of an adapter that is no longer
        served, the adapter is freed.
        """
        digest = request.adapter
        if digest in self._leaving and not self._count_live(digest):
            self._run(self._unload(digest))

    async def close(self) -> None:
        """Cancel the loads and unloads of adapters that run in the background, and wait until they
        have ended.
        """
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _tell_members(self) -> None:
        sources = [
            AdapterSource(name=name, folder=info.folder, digest=info.digest)
            for name, info in self._table.items()
        ]
        for member in self._members:
            member.set_adapters(sources)

    def _is_wanted(self, digest: str) -> bool:
        return any(info.digest == digest for info in self._table.values())

    async def _release(self, digest: str) -> None:
        """Let the instances free an adapter, now or when its last request has ended."""
        if self._is_wanted(digest):
            return
        if self._count_live(digest):
            # Let the instances keep the adapter for now: a live request uses it and may move to
            # another instance, which then needs it.
            self._leaving.add(digest)
        else:
            await self._unload_everywhere(digest)

    async def _unload(self, digest: str) -> None:
        async with self._lock:
            is_idle = not self._count_live(digest)
            if digest in self._leaving and is_idle and not self._is_wanted(digest):
                await self._unload_everywhere(digest)

    async def _unload_everywhere(self, digest: str) -> None:
        self._leaving.discard(digest)
        for member in self._members:
            if member.info is not None:
                await self._try(member, member.call(UNLOAD_ADAPTER, UnloadAdapter(digest=digest)))

    async def _bring_in_line(self, member: AdapterMember) -> None:
        async with self._lock:
            info = member.info
            if info is None:
                return
            has = {adapter.digest for adapter in info.adapters}
            lost: dict[str, TandemError] = {}
            for name, wanted in self._table.items():
                if wanted.digest in has:
                    continue
                source = AdapterSource(name=name, folder=wanted.folder, digest=wanted.digest)
                try:
                    await member.call(LOAD_ADAPTER, source)
                except TandemError as error:
                    logger.warning("event=adapter_failed instance=%s error=%s", member.name, error)
                    if not error.retryable:
                        lost[name] = error
            await self._withdraw(lost)
            for digest in has:
                if not self._is_wanted(digest) and digest not in self._leaving:
                    await self._try(
                        member, member.call(UNLOAD_ADAPTER, UnloadAdapter(digest=digest))
                    )

    async def _withdraw(self, lost: Mapping[str, TandemError]) -> None:
        """Stop serving adapters that an instance has failed to load, since a served adapter must be
        on every instance.

        This happens if their files were replaced or removed after they were first loaded. New
        content under the same name is another model, so the administrator must load it explicitly.
        """
        for name, error in lost.items():
            info = self._table.pop(name)
            self._tell_members()
            logger.error(
                "event=adapter_withdrawn name=%r error=%s: load it again to serve what is there",
                name,
                error.what,
            )
            await self._release(info.digest)

    async def _try(self, member: AdapterMember, work: Awaitable[object]) -> None:
        try:
            await work
        except TandemError as error:
            # Only log the failure: this instance refuses requests for the adapter by name, and its
            # next start is told to load the adapter again.
            logger.warning("event=adapter_failed instance=%s error=%s", member.name, error)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
