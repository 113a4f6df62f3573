"""The instances whose blocks may be read from here, opened and checked.

All of it runs on one event loop; connecting itself waits on another thread.
"""

import asyncio
import contextlib
import logging
from dataclasses import dataclass

from tandem.core.errors import (
    ConflictError,
    NotFoundError,
    PeerLostError,
    PermissionDeniedError,
    TandemError,
)
from tandem.core.wire import KvPeer
from tandem.engine.disaggregation.compat import check_peer
from tandem.engine.disaggregation.head_slices import ByteRange, HeldHeads, map_blocks
from tandem.transfer import Segment, TransferEngine

__all__ = ["KvPeers", "OpenPeer"]

logger = logging.getLogger(__name__)

OPEN_DEADLINE_S = 10.0
WHERE = "kv_peer.open"


@dataclass(slots=True, eq=False)
class OpenPeer:
    """An instance that can be read."""

    facts: KvPeer
    segment: Segment
    start: int
    """Where its blocks begin in the segment's address space."""
    layer_ranges: list[list[ByteRange]]
    """By layer: which bytes of its block fill which of ours."""
    is_lost: bool = False
    """Its connection is gone; it is opened again before the next read."""

    def list_ranges(self, layers: range) -> list[ByteRange]:
        """Return the ranges of some layers of a block, merged where they follow each other."""
        merged: list[ByteRange] = []
        for layer in layers:
            for each in self.layer_ranges[layer]:
                last = merged[-1] if merged else each
                distance = last.length if merged else -1
                if each.source - last.source == distance == each.target - last.target:
                    merged[-1] = ByteRange(last.source, last.target, distance + each.length)
                else:
                    merged.append(each)
        return merged


class KvPeers:
    """Opened instances by name.

    Args:
        transfer: that connects; borrowed.
        own: what our blocks hold.
    """

    def __init__(self, transfer: TransferEngine, own: KvPeer) -> None:
        self._transfer = transfer
        self._own = own
        self._peers: dict[str, OpenPeer] = {}
        self._lock = asyncio.Lock()

    async def open(self, facts: KvPeer) -> None:
        """Open an instance, or again if it has restarted or was lost.

        Raises: UnsupportedError (names what differs); PeerLostError; DeadlineError;
            PermissionDeniedError (secrets differ; its blocks are not offered); NotFoundError.
        """
        check_peer(self._own, facts)
        async with self._lock:
            await self._open(facts)

    async def find(self, name: str) -> OpenPeer:
        """Return an instance that was opened, connected again if that is necessary.

        Raises: NotFoundError (never opened, or closed); as ``open``.
        """
        peer = self._peers.get(name)
        if peer is not None and not peer.is_lost:
            return peer
        async with self._lock:
            peer = self._peers.get(name)
            if peer is None:
                raise NotFoundError("kv_peer.find", f"instance {name} was not opened here")
            return await self._open(peer.facts)

    async def close(self, name: str) -> None:
        """Forget an instance; reads under way end with an error."""
        async with self._lock:
            self._drop(name)

    async def close_all(self) -> None:
        """Forget every instance."""
        async with self._lock:
            for name in list(self._peers):
                self._drop(name)

    async def _open(self, facts: KvPeer) -> OpenPeer:
        known = self._peers.get(facts.name)
        if known is not None and known.facts == facts and not known.is_lost:
            return known
        # The cancelled task of one request must not leave a segment without an owner.
        opening = asyncio.get_running_loop().run_in_executor(None, self._connect, facts)
        try:
            segment = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_unwanted)
            raise
        self._drop(facts.name)
        layers = range(self._own.layout.num_layers)
        source = HeldHeads(facts.layout, facts.first_head)
        target = HeldHeads(self._own.layout, self._own.first_head)
        peer = self._peers[facts.name] = OpenPeer(
            facts,
            segment,
            segment.buffer(facts.buffer).offset,
            [map_blocks(source, target, range(layer, layer + 1)) for layer in layers],
        )
        logger.info("event=kv_peer_opened peer=%s epoch=%d", facts.name, facts.epoch)
        return peer

    def _connect(self, facts: KvPeer) -> Segment:
        error: TandemError = PeerLostError(WHERE, f"{facts.name} tells no address")
        for address in facts.addresses:
            try:
                segment = self._transfer.open(address, deadline_s=OPEN_DEADLINE_S)
            except TandemError as failure:
                error = failure
                continue
            try:
                self._check_segment(segment, facts)
            except TandemError:
                segment.close()
                raise
            return segment
        raise error

    def _check_segment(self, segment: Segment, facts: KvPeer) -> None:
        epoch = self._transfer.core.segment_epoch(segment.id)
        if epoch != facts.epoch:
            raise ConflictError(
                WHERE,
                f"at {segment.address} is a run {epoch} of {segment.name}, not the run "
                f"{facts.epoch} of {facts.name}: it has restarted",
                field="epoch",
            )
        offered = segment.buffer(facts.buffer)
        if not offered.can_read or offered.length < facts.num_blocks * facts.block_bytes:
            raise PermissionDeniedError(
                WHERE, f"{facts.name} does not offer {facts.num_blocks} blocks to be read"
            )

    def _drop(self, name: str) -> None:
        peer = self._peers.pop(name, None)
        if peer is not None:
            with contextlib.suppress(TandemError):  # Its engine may be closed.
                peer.segment.close()


def _close_unwanted(opening: "asyncio.Future[Segment]") -> None:
    if not opening.cancelled() and opening.exception() is None:
        with contextlib.suppress(TandemError):
            opening.result().close()
