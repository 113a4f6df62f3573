"""The rosters of all launchers that a server uses, kept up to date.

A host name in a launcher's address may resolve to several machines, with a launcher on each. It is
resolved repeatedly, so that machines can be added and removed in the DNS alone. When the connection
to a launcher is lost, its instances stay listed for a while, because they may still serve; then
they are removed. All code runs on one event loop.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Self

import msgspec

from tandem.core.errors import DeadlineError, NotFoundError, PeerLostError, TandemError
from tandem.core.wire import Empty, InstanceStage
from tandem.engine.launching.messages import CHANGE, ROSTER, ChangeRoster, Roster, RosterEntry
from tandem.engine.process.instance import SERVER_ROLE, compat_facts
from tandem.rpc import Auth, Peer, RpcClient, RpcConfig, make_identity
from tandem.rpc.wire.endpoint import parse_endpoint

__all__ = ["Rosters"]

logger = logging.getLogger(__name__)

RESOLVE_INTERVAL_S = 2.0
RETRY_S = 0.5
CHANGE_TIMEOUT_S = 3600.0
CONNECT_TIMEOUT_MS = 5_000
SERVES = (InstanceStage.LOADING, InstanceStage.READY)


class _Link:
    """The connection of a server to one launcher, renewed whenever it is lost."""

    def __init__(self, url: str, auth: Auth, rpc: RpcConfig, on_change: Callable[[], None]) -> None:
        self.url = url
        self._auth = auth
        self._rpc = msgspec.structs.replace(
            rpc, connect_timeout_ms=min(rpc.connect_timeout_ms, CONNECT_TIMEOUT_MS)
        )
        self._on_change = on_change
        self.entries: list[RosterEntry] = []
        self.client: RpcClient | None = None
        """Connected control channel to the launcher; None while there is no connection."""
        self.lost_s: float | None = None
        """Time at which the connection was lost, on the event loop's clock; None if it is connected
        or never was."""
        self.failure = "it has not answered yet"
        self.task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                await self._follow()
            except TandemError as error:
                self.failure = error.what
            self.client = None
            if self.entries and self.lost_s is None:
                self.lost_s = loop.time()
                logger.warning("event=launcher_lost launcher=%s reason=%s", self.url, self.failure)
            await asyncio.sleep(RETRY_S)

    async def _follow(self) -> None:
        lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        client = RpcClient(
            self.url,
            identity=make_identity("server", SERVER_ROLE, compat=compat_facts()),
            auth=self._auth,
            config=self._rpc,
        )

        def note_lost(_: Peer, error: TandemError) -> None:
            self.failure = error.what
            if not lost.done():
                lost.set_result(None)

        client.on_event(lambda _, roster: self._take(roster), Roster)
        client.on_peer_lost(note_lost)
        async with client:
            self._take(await client.call(ROSTER, Empty(), Roster))
            self.client, self.lost_s = client, None
            await lost

    def _take(self, roster: Roster) -> None:
        self.entries = [_reach(entry, self.url) for entry in roster.instances]
        self._on_change()


def _reach(entry: RosterEntry, url: str) -> RosterEntry:
    """Return an entry with the host of its endpoint replaced by the host in the launcher's URL.

    Unchanged if either is a Unix socket.
    """
    theirs, ours = parse_endpoint(entry.endpoint or url), parse_endpoint(url)
    if theirs.is_local_socket or ours.is_local_socket:
        return entry
    host = f"[{ours.host}]" if ":" in ours.host else ours.host
    return msgspec.structs.replace(entry, endpoint=f"tcp://{host}:{theirs.port}")


class Rosters:
    """The rosters of all launchers. An async context manager.

    Args:
        urls: addresses of the launchers (``cluster.launchers``).
        secret: secret of the cluster; None: all are on this machine.
        rpc: settings of the control channels.
        forget_s: seconds after the loss of a launcher until its instances are removed.
    """

    def __init__(
        self, urls: Sequence[str], secret: str | None, rpc: RpcConfig, forget_s: float
    ) -> None:
        self._urls = list(urls)
        self._auths = {url: Auth.for_endpoint(url, secret) for url in urls}
        self._rpc = rpc
        self._forget_s = forget_s
        self._links: dict[str, _Link] = {}
        self._resolving: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self.on_change: Callable[[], None] | None = None
        """Callback for each added, removed or changed entry; None: none."""

    async def __aenter__(self) -> Self:
        await self._resolve()
        self._resolving = asyncio.create_task(self._keep_resolving())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._resolving is not None
        tasks = [self._resolving, *(link.task for link in self._links.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def entries(self) -> list[RosterEntry]:
        """All instances, in the order of the launchers. Of two with one name, only the first is
        listed.
        """
        by_name: dict[str, RosterEntry] = {}
        for link in self._links.values():
            for entry in link.entries:
                by_name.setdefault(entry.name, entry)
        return list(by_name.values())

    def find(self, name: str) -> RosterEntry | None:
        """Return the entry of the instance with this name in the launchers' rosters, or None."""
        return next((entry for entry in self.entries if entry.name == name), None)

    async def wait_for(self, is_met: Callable[[], bool]) -> None:
        """Wait until ``is_met()`` is True, which is asked after each change of the rosters."""
        while not is_met():
            changed = self._changed
            await changed.wait()

    async def wait_first(self, timeout_s: float) -> None:
        """Wait until at least one launcher has sent its roster (its list of instances) with an
        instance in it.

        Raises: DeadlineError (``timeout_s`` has passed; the message gives the last failure).
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self.wait_for(lambda: bool(self.entries))
        except TimeoutError:
            reasons = "; ".join(f"{each.url}: {each.failure}" for each in self._links.values())
            what = f"no launcher told of an instance within {timeout_s:g} s"
            raise DeadlineError("cluster.attach", f"{what}: {reasons or 'no address'}") from None

    async def change(self, change: ChangeRoster) -> None:
        """Send a change to the launcher that owns the instance or, to add one, to the launcher with
        the fewest instances.

        Raises: NotFoundError (no such instance); PeerLostError (its launcher is not connected);
            errors of the launcher.
        """
        link = self._choose(change)
        if link.client is None:
            raise PeerLostError("cluster.change", f"{link.url} is not there: {link.failure}")
        roster = await link.client.call(CHANGE, change, Roster, timeout_s=CHANGE_TIMEOUT_S)
        link.entries = [_reach(entry, link.url) for entry in roster.instances]
        self._note_change()

    def _choose(self, change: ChangeRoster) -> _Link:
        links = list(self._links.values())
        if change.action == "add":
            reachable = [link for link in links if link.client is not None] or links
            if reachable:
                return min(reachable, key=lambda link: len(link.entries))
        for link in links:
            if any(entry.name == change.instance for entry in link.entries):
                return link
        names = ", ".join(entry.name for entry in self.entries)
        raise NotFoundError(
            "cluster.find", f"there is no instance {change.instance!r}: {names}", field="name"
        )

    def _note_change(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        if self.on_change is not None:
            self.on_change()

    # The methods below resolve the launchers' host names again and again.

    async def _keep_resolving(self) -> None:
        while True:
            await asyncio.sleep(RESOLVE_INTERVAL_S)
            await self._resolve()

    async def _resolve(self) -> None:
        """Resolve the launchers' host names: connect to new addresses, and forget launchers and
        their instances that were lost too long ago.
        """
        wanted: dict[str, Auth] = {}
        for url in self._urls:
            for place in await _find_places(url):
                wanted[place] = self._auths[url]
        now_s = asyncio.get_running_loop().time()
        for place, auth in wanted.items():
            if place not in self._links:
                self._links[place] = _Link(place, auth, self._rpc, self._note_change)
        for place, link in list(self._links.items()):
            is_late = link.lost_s is not None and now_s - link.lost_s > self._forget_s
            if is_late and link.entries:
                logger.warning("event=launcher_forgotten launcher=%s", place)
                link.entries = []
                self._note_change()
            if place not in wanted and not link.entries and link.client is None:
                link.task.cancel()
                del self._links[place]


async def _find_places(url: str) -> list[str]:
    """Return one URL for each address that a launcher URL's host name resolves to, each address
    being a launcher's; empty if it does not resolve.
    """
    endpoint = parse_endpoint(url)
    if endpoint.is_local_socket:
        return [url]
    loop = asyncio.get_running_loop()
    found: list[str] = []
    # Ignore host names that DNS cannot resolve now; they are looked up again later.
    with contextlib.suppress(OSError):
        for family, _, _, _, address in await loop.getaddrinfo(
            endpoint.host, endpoint.port, type=socket.SOCK_STREAM
        ):
            host = f"[{address[0]}]" if family == socket.AF_INET6 else address[0]
            found.append(f"tcp://{host}:{endpoint.port}")
    return found
