"""The channel to the leading master, for hosts and clients.

Hosts and clients know addresses of masters and not etcd: thousands of clients would each need its
address, a connection and a password to learn what any master can tell. All known masters are asked
at once. One that says it leads is chosen; one that another master names is asked as well, so that
one live address suffices. When the session ends for any reason, the search begins anew. A master
that stops leading ends its sessions.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from tandem.core.errors import (
    CapacityError,
    ConfigError,
    ConflictError,
    DeadlineError,
    NotFoundError,
    PeerLostError,
    TandemError,
    UnsupportedError,
)
from tandem.rpc import BegunCall, Peer, RpcClient
from tandem.store.messages import LeaderAnswer

__all__ = ["LeaderClient"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

PROBE_TIMEOUT_S = 1.0
"""Time limit in seconds of the question for the leader: a stopped master must not delay the
others.
"""
PAUSE_S = 0.1
"""Seconds between a master's answer and the next question to it."""
TRANSIENT = (PeerLostError, DeadlineError, CapacityError, NotFoundError)
"""Errors after which the question is repeated; see ``rpc.client``."""


class LeaderClient:
    """A ``MasterChannel`` (for calls to the master) that keeps one session with the current leader
    of several masters.

    Args:
        urls: addresses of masters that may lead.
        make_client: makes the RPC client of an address, with a ``connect_timeout_ms`` for one
            attempt.
        on_peer: called with the leader when a session begins.
        on_peer_lost: called once when the session ends.
    """

    def __init__(
        self,
        urls: Sequence[str],
        make_client: Callable[[str], RpcClient],
        *,
        on_peer: Callable[[Peer], None] | None = None,
        on_peer_lost: Callable[[], None] | None = None,
    ) -> None:
        self._urls = list(dict.fromkeys(urls))
        self._make_client = make_client
        self._on_peer = on_peer
        self._on_peer_lost = on_peer_lost
        self._clients: dict[str, RpcClient] = {}
        """RPC clients by address. Kept over sessions, because a client numbers its sessions."""
        self._client: RpcClient | None = None
        self._lost = asyncio.Event()
        self._settled = asyncio.Event()
        """Set while there is a leader, and after the search was given up."""
        self._failure: TandemError | None = None
        self._last_error: TandemError = PeerLostError(
            "store.leader", f"no master answered at {', '.join(urls)}: is one running?"
        )
        self._following: asyncio.Task[None] | None = None

    @property
    def endpoint(self) -> str:
        """The address of the leader; empty without one."""
        return "" if self._client is None else self._client.endpoint

    def start(self) -> None:
        """Start to search for the leader, and continue until closed."""
        self._following = asyncio.get_running_loop().create_task(self._follow())

    async def connect(self, timeout_s: float) -> None:
        """Start the search for the leading master, and wait for the first session with it.

        Raises: PermissionDeniedError, UnsupportedError, ConflictError when all masters refuse;
            PeerLostError or DeadlineError when nobody leads in time.
        """
        self.start()
        try:
            await self.wait_connected(timeout_s)
        except BaseException:
            last = self._last_error
            await self.aclose()
            if self._failure is None and isinstance(last, PeerLostError):
                raise PeerLostError(last.where, last.what, field=last.field) from None
            raise

    async def wait_connected(self, timeout_s: float) -> object:
        """Wait for a session with a leader.

        Raises: DeadlineError (nobody leads in time); the refusal, if all masters refuse this
            process.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._settled.wait()
        except TimeoutError:
            raise DeadlineError(
                "store.leader", f"no master led within {timeout_s:g} s: {self._last_error}"
            ) from None
        if self._failure is not None:
            raise type(self._failure)(
                self._failure.where, self._failure.what, field=self._failure.field
            )
        return self._client

    async def call(
        self,
        method: str,
        request: object,
        response_type: type[T],
        *,
        timeout_s: float | None = None,
    ) -> T:
        """Call a method of the current leader. Raises PeerLostError without one."""
        client = self._client
        if client is None:
            raise PeerLostError("store.leader", f"no master leads: {self._last_error}")
        return await client.call(method, request, response_type, timeout_s=timeout_s)

    def begin_threadsafe(
        self, method: str, request: object, response_type: type[T], *, timeout_s: float
    ) -> BegunCall[T]:
        """Begin a call to the current leader from a thread other than the event loop's, which may
        wait for the answer; see ``Peer.begin_threadsafe``.
        """
        client = self._client
        if client is None:
            raise PeerLostError("store.leader", f"no master leads: {self._last_error}")
        return client.begin_threadsafe(method, request, response_type, timeout_s=timeout_s)

    async def aclose(self) -> None:
        """End the session and the search. May be repeated."""
        following, self._following = self._following, None
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        self._client = None
        clients, self._clients = list(self._clients.values()), {}
        await asyncio.gather(*(client.aclose() for client in clients))

    # The methods below search for the master that leads.

    async def _follow(self) -> None:
        while True:
            self._lost = asyncio.Event()
            try:
                client = await self._seek()
            except TandemError as error:
                # All masters have refused this process, and would refuse it again. Each call raises
                # the refusal, so an ERROR line here would report it twice.
                logger.info("event=search_given_up masters=%s error=%s", self._urls, error)
                self._failure = error
                self._settled.set()
                return
            if client.is_connected:
                self._client = client
                self._settled.set()
                logger.info("event=leader_found endpoint=%s", client.endpoint)
                if self._on_peer is not None:
                    self._on_peer(client.peer)
                await self._lost.wait()
                logger.info("event=leader_lost endpoint=%s", client.endpoint)
            await client.aclose()

    def _note_lost(self, client: RpcClient, error: TandemError) -> None:
        if client is not self._client:
            return
        self._client = None
        self._settled.clear()
        self._last_error = error
        self._lost.set()
        if self._on_peer_lost is not None:
            self._on_peer_lost()

    async def _seek(self) -> RpcClient:
        """Search for a master that says it leads, and return its connected client. The other
        clients are closed.

        Each master is asked by a task of its own, so that a silent one delays no other.
        """
        asking: dict[asyncio.Task[LeaderAnswer], str] = {}
        leaders: list[tuple[int, str]] = []
        refusals: dict[str, TandemError] = {}
        try:
            for url in self._urls:
                asking[asyncio.ensure_future(self._ask_after(0.0, url))] = url
            while not leaders:
                done, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    url = asking.pop(task)
                    hint = self._note_outcome(url, task, leaders, refusals)
                    if hint and hint not in asking.values():
                        asking[asyncio.ensure_future(self._ask_after(0.0, hint))] = hint
                    if url in self._urls and url not in asking.values():
                        asking[asyncio.ensure_future(self._ask_after(PAUSE_S, url))] = url
                if len(refusals) == len(self._urls):
                    raise refusals[self._urls[0]]
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
            chosen = max(leaders)[1] if leaders else None
            others = [client for url, client in self._clients.items() if url != chosen]
            await asyncio.gather(*(client.aclose() for client in others))
        return self._clients[max(leaders)[1]]

    def _note_outcome(
        self,
        url: str,
        task: "asyncio.Task[LeaderAnswer]",
        leaders: list[tuple[int, str]],
        refusals: dict[str, TandemError],
    ) -> str:
        """Record the outcome of asking one master. Return the address of the leader that it names;
        empty without one.
        """
        refusals.pop(url, None)
        try:
            answer = task.result()
        except TandemError as error:
            self._last_error = error
            if not isinstance(error, TRANSIENT) and url in self._urls:
                refusals[url] = error
            return ""
        if answer.is_leader:
            leaders.append((answer.epoch, url))
            return ""
        self._last_error = PeerLostError(
            "store.leader", f"{url} does not lead; {answer.address or 'nobody it knows'} does"
        )
        return answer.address

    async def _ask_after(self, pause_s: float, url: str) -> LeaderAnswer:
        await asyncio.sleep(pause_s)
        client = self._clients.get(url)
        if client is not None:
            await client.aclose()  # Close the session of the earlier question.
        return await self._ask(url)

    async def _ask(self, url: str) -> LeaderAnswer:
        client = self._clients.get(url)
        if client is None:
            client = self._clients[url] = self._open(url)
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await client.connect()
                return await client.call("leader", None, LeaderAnswer)
        except UnsupportedError as error:
            if error.field != "method":
                raise
            # A master without this method is of a release without elections, and is the only one of
            # its store, so it leads.
            return LeaderAnswer(is_leader=True)
        except DeadlineError:
            raise
        except TimeoutError:
            raise DeadlineError("store.leader", f"{url} was silent") from None

    def _open(self, url: str) -> RpcClient:
        try:
            client = self._make_client(url)
        except ConfigError as error:
            raise ConflictError(error.where, f"{url}: {error.what}") from None
        client.on_peer_lost(lambda _, error: self._note_lost(client, error))
        return client
