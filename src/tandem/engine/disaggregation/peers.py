"""The instances whose blocks this instance reads: connected, and checked to be compatible.

All of it runs on one event loop.
"""

import asyncio
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
from tandem.engine.disaggregation.ports import PeerPort, PoolKind, RemotePool

__all__ = ["KvPeers", "OpenPeer"]

logger = logging.getLogger(__name__)

OPEN_DEADLINE_S = 5.0
"""Time limit in seconds of connecting to an instance; a lost message costs no more than that."""
WHERE = "kv_peer.open"


@dataclass(slots=True, eq=False)
class OpenPeer:
    """An instance that was connected and whose blocks can be read."""

    facts: KvPeer
    pool: RemotePool
    layer_ranges: list[list[ByteRange]]
    """For each layer, the byte ranges of the peer's block that fill ours."""
    is_lost: bool = False
    """True if the connection is lost; it is opened again before the next read."""

    def list_ranges(self, layers: range) -> list[ByteRange]:
        """Return the byte ranges of some layers of a block, merged where they are adjacent."""
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
    """The connected instances by name.

    Args:
        port: makes the connections; not owned.
        own: description of this instance's KV.
    """

    def __init__(self, port: PeerPort, own: KvPeer) -> None:
        self._port = port
        self._own = own
        self._peers: dict[str, OpenPeer] = {}
        self._lock = asyncio.Lock()

    async def open(self, facts: KvPeer) -> None:
        """Connect to an instance, again if it was restarted or lost, and check that its KV is
        usable here.

        Raises: UnsupportedError (its KV differs; names the facts); PeerLostError (it cannot be
            reached); DeadlineError (it does not answer in time); PermissionDeniedError (the secrets
            differ, or its blocks may not be read); NotFoundError (it offers no buffer of a name
            that ``facts`` has); ConflictError (it has been restarted, so that ``facts`` are of an
            earlier run).
        """
        check_peer(self._own, facts)
        async with self._lock:
            await self._open(facts)

    async def find(self, name: str) -> OpenPeer:
        """Return a connected instance, reconnecting if necessary.

        Raises: NotFoundError (never opened, or closed); errors of ``open``.
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
        """Close the connection to an instance; reads in progress end with an error."""
        async with self._lock:
            self._drop(name)

    async def close_all(self) -> None:
        """Close the connections to all instances."""
        async with self._lock:
            for name in list(self._peers):
                self._drop(name)

    async def _open(self, facts: KvPeer) -> OpenPeer:
        known = self._peers.get(facts.name)
        if known is not None and known.facts == facts and not known.is_lost:
            return known
        pool = await self._connect(facts)
        self._drop(facts.name)
        layers = range(self._own.layout.num_layers)
        source = HeldHeads(facts.layout, facts.first_head)
        target = HeldHeads(self._own.layout, self._own.first_head)
        peer = self._peers[facts.name] = OpenPeer(
            facts,
            pool,
            [map_blocks(source, target, range(layer, layer + 1)) for layer in layers],
        )
        logger.info("event=kv_peer_opened peer=%s epoch=%d", facts.name, facts.epoch)
        return peer

    async def _connect(self, facts: KvPeer) -> RemotePool:
        error: TandemError = PeerLostError(WHERE, f"{facts.name} tells no address")
        for address in facts.addresses:
            try:
                pool = await self._port.open(
                    address, _list_buffers(facts), deadline_s=OPEN_DEADLINE_S
                )
            except TandemError as failure:
                error = failure
                continue
            try:
                _check_pool(pool, facts)
            except TandemError:
                pool.close()
                raise
            return pool
        raise error

    def _drop(self, name: str) -> None:
        peer = self._peers.pop(name, None)
        if peer is not None:
            peer.pool.close()


def _list_buffers(facts: KvPeer) -> dict[PoolKind, str]:
    names: dict[PoolKind, str] = {
        "kv": facts.buffer,
        "states": facts.state_buffer,
        "windows": facts.window_buffer,
    }
    return {kind: name for kind, name in names.items() if name}


def _check_pool(pool: RemotePool, facts: KvPeer) -> None:
    if pool.epoch != facts.epoch:
        raise ConflictError(
            WHERE,
            f"at {facts.addresses} is a run {pool.epoch} of {pool.name}, not the run "
            f"{facts.epoch} of {facts.name}: it has restarted",
            field="epoch",
        )
    if not pool.can_read or pool.length < facts.num_blocks * facts.block_bytes:
        raise PermissionDeniedError(
            WHERE, f"{facts.name} does not offer {facts.num_blocks} blocks to be read"
        )
