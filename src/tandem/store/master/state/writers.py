"""Clients that may write to a host: let in by the host, and shut out by it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.core.errors import PeerLostError, TandemError
from tandem.store.master.state.ledger import ExtentEvent, SpaceLedger
from tandem.store.messages import Ack, CloseWriter, Opened, OpenWriter

__all__ = ["Writers"]

logger = logging.getLogger(__name__)

RETRY_S = 0.25


@dataclass(slots=True, eq=False)
class _Writer:
    """A client's right to write to a host: asked for, or given (``base``)."""

    base: asyncio.Future[int]
    held: dict[int, Sequence[int]] = field(default_factory=dict[int, Sequence[int]])
    """By grant, of its unfinished puts: where the extents begin."""


class Writers:
    """The writers of one host.

    Args:
        host: its name.
        ledger: of its space; borrowed.
        order: has the host do something, as ``HostSpace.order``.
        spawn: runs a coroutine that ends with the session.
        on_space: called when space has become free.
    """

    def __init__(
        self,
        host: str,
        ledger: SpaceLedger,
        order: Callable[..., Awaitable[Any]],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        on_space: Callable[[], None],
    ) -> None:
        self._host = host
        self._ledger = ledger
        self._order = order
        self._spawn = spawn
        self._on_space = on_space
        self._writers: dict[str, _Writer] = {}

    def __contains__(self, client: str) -> bool:
        return client in self._writers

    def end(self) -> None:
        """Note that the session is over: the next inventory begins with closing all writers."""
        for writer in self._writers.values():
            writer.base.cancel()
        self._writers.clear()

    async def open(self, client: str) -> int:
        """Return where the segment begins for that client's writes, asking the host once.

        Raises: PeerLostError, DeadlineError.
        """
        writer = self._writer(client)
        try:
            return await asyncio.shield(writer.base)
        except asyncio.CancelledError:
            if writer.base.cancelled():  # Not we: the session ended, or the client was fenced.
                raise PeerLostError(
                    "store.write", f"host {self._host} was lost, or the client was shut out"
                ) from None
            raise

    def find(self, client: str) -> int:
        """Return what ``open`` would, if that is known already; else -1."""
        writer = self._writers.get(client)
        if writer is None or not writer.base.done() or writer.base.cancelled():
            return -1
        return -1 if writer.base.exception() is not None else writer.base.result()

    def begin_writing(self, client: str, grant: int, offsets: Sequence[int]) -> None:
        """Note that an unfinished put of ``client`` may write there."""
        self._writer(client).held[grant] = offsets

    def end_writing(self, client: str, grant: int) -> bool:
        """Note that the client says that it writes there no more. False: it was shut out before."""
        writer = self._writers.get(client)
        return writer is not None and writer.held.pop(grant, None) is not None

    def fence(self, client: str) -> None:
        """Revoke a client's right to write; its space is free once it provably writes no more."""
        writer = self._writers.pop(client, None)
        if writer is None:
            return
        for offsets in writer.held.values():
            self._ledger.move(ExtentEvent.FENCE, offsets)
        self._spawn(self._prove_gone(client, writer))

    def _writer(self, client: str) -> _Writer:
        writer = self._writers.get(client)
        if writer is None:
            writer = _Writer(asyncio.get_running_loop().create_future())
            writer.base.add_done_callback(_retrieve)
            self._writers[client] = writer
            self._spawn(self._ask_writer(client, writer))
        return writer

    async def _ask_writer(self, client: str, writer: _Writer) -> None:
        # Not given up on a time-out: the host may have opened one, and only its base can close it.
        while not writer.base.done():
            try:
                opened = await self._order("open_writer", OpenWriter, Opened, client=client)
            except PeerLostError as error:
                if not writer.base.done():
                    writer.base.set_exception(error)
                return
            except TandemError as error:
                logger.debug("event=open_writer_failed host=%s reason=%s", self._host, error)
                await asyncio.sleep(RETRY_S)
                continue
            if not writer.base.done():
                writer.base.set_result(opened.write_base)

    async def _prove_gone(self, client: str, writer: _Writer) -> None:
        try:
            base = await asyncio.shield(writer.base)
        except (TandemError, asyncio.CancelledError):
            return  # The session is over; the next inventory begins with closing all writers.
        while True:
            try:
                closed = await self._order("close_writer", CloseWriter, Ack, write_base=base)
            except TandemError as error:
                logger.debug("event=close_writer_failed host=%s reason=%s", self._host, error)
            else:
                if closed.ok:
                    break
                logger.warning("event=writer_lingers host=%s client=%s", self._host, client)
            await asyncio.sleep(RETRY_S)
        for offsets in writer.held.values():
            self._ledger.move(ExtentEvent.PROVE, offsets)
        self._on_space()


def _retrieve(future: "asyncio.Future[int]") -> None:
    if not future.cancelled():
        future.exception()  # The exception is stored in the future, which may have no waiter.
