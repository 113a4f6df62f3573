"""Clients that may write to a host: opened and closed by orders to the host."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tandem.core.errors import PeerLostError, TandemError
from tandem.store.master.state.ledger import ExtentEvent, SpaceLedger
from tandem.store.master.state.orders import RETRY_S, OrderLine
from tandem.store.messages import Ack, CloseWriter, Opened, OpenWriter

__all__ = ["Writers"]

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Writer:
    """A client's right to write into the memory of a host: ``base`` is its write address, once the
    host has answered.
    """

    base: asyncio.Future[int]
    held: dict[int, Sequence[int]] = field(default_factory=dict[int, Sequence[int]])
    """Offsets of the extents of the client's unfinished puts, by grant."""


class Writers:
    """The writers of one host: clients with the right to write into its memory.

    Args:
        line: sends orders to the host; borrowed.
        ledger: the uses of the host's space; borrowed.
        on_space: called when space has become free.
    """

    def __init__(
        self,
        line: OrderLine,
        ledger: SpaceLedger,
        on_space: Callable[[], None],
    ) -> None:
        self._line = line
        self._ledger = ledger
        self._on_space = on_space
        self._writers: dict[str, _Writer] = {}

    def __contains__(self, client: str) -> bool:
        return client in self._writers

    def end(self) -> None:
        """Note that the session with the host has ended, and forget its writers (clients that may
        write). The host revokes their rights itself before it next lists its objects to a master.
        """
        for writer in self._writers.values():
            writer.base.cancel()
        self._writers.clear()

    async def open(self, client: str) -> int:
        """Return the address where the segment begins for this client's writes. The host is asked
        once, however often this is called in a session.

        Raises: PeerLostError (the host was lost, or the client was shut out); DeadlineError (the
            host does not answer).
        """
        writer = self._writer(client)
        try:
            return await asyncio.shield(writer.base)
        except asyncio.CancelledError:
            if writer.base.cancelled():  # The session ended, or the client was fenced.
                raise PeerLostError(
                    "store.write", f"host {self._line.host} was lost, or the client was shut out"
                ) from None
            raise

    def find(self, client: str) -> int:
        """Return the client's write address if the host has opened it; else -1."""
        writer = self._writers.get(client)
        if writer is None or not writer.base.done() or writer.base.cancelled():
            return -1
        return -1 if writer.base.exception() is not None else writer.base.result()

    def begin_writing(self, client: str, grant: int, offsets: Sequence[int]) -> None:
        """Note that an unfinished put of the client, with this grant (number), may write to the
        extents (ranges) at these offsets.
        """
        self._writer(client).held[grant] = offsets

    def end_writing(self, client: str, grant: int) -> bool:
        """Note that the client has finished writing a put. Return False if its right to write was
        revoked (``fence``) before.
        """
        writer = self._writers.get(client)
        return writer is not None and writer.held.pop(grant, None) is not None

    def fence(self, client: str) -> None:
        """Revoke a client's right to write. The ranges reserved for its puts are freed once it is
        proven that it can write there no more.
        """
        writer = self._writers.pop(client, None)
        if writer is None:
            return
        for offsets in writer.held.values():
            self._ledger.move(ExtentEvent.FENCE, offsets)
        self._line.spawn(self._prove_gone(client, writer))

    def _writer(self, client: str) -> _Writer:
        writer = self._writers.get(client)
        if writer is None:
            writer = _Writer(asyncio.get_running_loop().create_future())
            writer.base.add_done_callback(_retrieve)
            self._writers[client] = writer
            self._line.spawn(self._ask_writer(client, writer))
        return writer

    async def _ask_writer(self, client: str, writer: _Writer) -> None:
        # Repeat after a timeout: the host may have given the client a write address, and
        # withdrawing it needs that address.
        while not writer.base.done():
            try:
                opened = await self._line.order("open_writer", OpenWriter, Opened, client=client)
            except PeerLostError as error:
                if not writer.base.done():
                    writer.base.set_exception(error)
                return
            except TandemError as error:
                logger.debug("event=open_writer_failed host=%s reason=%s", self._line.host, error)
                await asyncio.sleep(RETRY_S)
                continue
            if not writer.base.done():
                writer.base.set_result(opened.write_base)

    async def _prove_gone(self, client: str, writer: _Writer) -> None:
        try:
            base = await asyncio.shield(writer.base)
        except (TandemError, asyncio.CancelledError):
            return  # The session is over. The host closes all writers before its next inventory.
        while True:
            try:
                closed = await self._line.order("close_writer", CloseWriter, Ack, write_base=base)
            except TandemError as error:
                logger.debug("event=close_writer_failed host=%s reason=%s", self._line.host, error)
            else:
                if closed.ok:
                    break
                logger.warning("event=writer_lingers host=%s client=%s", self._line.host, client)
            await asyncio.sleep(RETRY_S)
        for offsets in writer.held.values():
            self._ledger.move(ExtentEvent.PROVE, offsets)
        self._on_space()


def _retrieve(future: "asyncio.Future[int]") -> None:
    if not future.cancelled():
        future.exception()  # The exception is stored in the future, which may have no waiter.
