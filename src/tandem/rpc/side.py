"""The part that both sides of a control channel share: identity, methods, limits, callbacks."""

import logging
from collections.abc import Callable
from typing import Required, TypedDict, Unpack

from tandem.core.clock import Clock, MonotonicClock
from tandem.core.errors import TandemError
from tandem.rpc.config import RpcConfig
from tandem.rpc.counters import RpcCounters
from tandem.rpc.handshake import CompatCheck, check_compat_equal
from tandem.rpc.lane import LaneRouter
from tandem.rpc.methods import MethodTable
from tandem.rpc.peer import Peer
from tandem.rpc.transport import PeerContext
from tandem.rpc.trust.auth import Auth
from tandem.rpc.wire.endpoint import parse_endpoint
from tandem.rpc.wire.frames import Identity

__all__ = ["RpcSide", "SideOptions"]

logger = logging.getLogger(__name__)


class SideOptions(TypedDict, total=False):
    """The arguments that ``RpcServer`` and ``RpcClient`` have in common."""

    identity: Required[Identity]
    """The name of this process; see ``make_identity``."""
    auth: Required[Auth]
    """The credentials of this side, and the check of peers; must fit the endpoint."""
    config: RpcConfig | None
    """Limits and intervals; None for the defaults."""
    methods: MethodTable | None
    """Methods for peers, and the listener of their events; None for an empty table."""
    check_compat: CompatCheck
    """Accepts or refuses each peer by its handshake."""
    clock: Clock | None
    """Clock of the leases; None for the monotonic one."""
    lanes: LaneRouter | None
    """Lanes of this process for calls beside the socket; borrowed. None for no lanes."""


class RpcSide:
    """One side of a control channel: the base of ``RpcServer`` and ``RpcClient``.

    Args:
        endpoint: ``ipc:///absolute/path`` or ``tcp://host:port``.
        options: see ``SideOptions``.
    """

    def __init__(self, endpoint: str, **options: Unpack[SideOptions]) -> None:
        self.identity = options["identity"]
        self.address = parse_endpoint(endpoint)
        self.auth = options["auth"]
        self.check_compat = options.get("check_compat", check_compat_equal)
        self.counters = RpcCounters()
        config, methods, clock = options.get("config"), options.get("methods"), options.get("clock")
        self._config = RpcConfig() if config is None else config
        self._methods = MethodTable() if methods is None else methods
        self.peer_context = PeerContext(
            self._config,
            self._methods,
            self.counters,
            MonotonicClock() if clock is None else clock,
            options.get("lanes"),
        )
        self.register = self._methods.register
        """Registers the handler of a method that peers may call; see ``MethodTable.register``."""
        self.on_event = self._methods.listen
        """Passes the events (one-way messages) of all peers to a callback; see
        ``MethodTable.listen``.
        """
        self._on_peer: Callable[[Peer], None] | None = None
        self._on_peer_lost: Callable[[Peer, TandemError], None] | None = None

    def on_peer(self, callback: Callable[[Peer], None]) -> None:
        """Have ``callback(peer)`` called whenever a session with another process begins."""
        self._on_peer = callback

    def on_peer_lost(self, callback: Callable[[Peer, TandemError], None]) -> None:
        """Have ``callback(peer, error)`` called once when a session ends, by either side."""
        self._on_peer_lost = callback

    def note_joined(self, peer: Peer) -> None:
        """Count and report that a session has begun."""
        self.counters.peers_joined += 1
        logger.info(
            "event=peer_joined peer=%s id=%s epoch=%d", peer.name, peer.instance_id, peer.epoch
        )
        if self._on_peer is not None:
            self._tell(self._on_peer, peer)

    def note_lost(self, peer: Peer, error: TandemError) -> None:
        """Count and report that a session has ended because of ``error``."""
        self.counters.peers_lost += 1
        logger.info("event=peer_lost peer=%s id=%s reason=%s", peer.name, peer.instance_id, error)
        if self._on_peer_lost is not None:
            self._tell(self._on_peer_lost, peer, error)

    def _tell(self, callback: Callable[..., None], peer: Peer, *more: object) -> None:
        try:
            callback(peer, *more)
        except Exception:
            self.counters.callback_errors += 1
            logger.exception("event=peer_callback_failed peer=%s", peer.name)
