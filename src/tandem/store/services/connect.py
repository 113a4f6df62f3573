"""Connections between a store's processes: addresses, secrets, versions, sessions, engines."""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec

from tandem.core.errors import TandemError, UnsupportedError
from tandem.rpc import (
    Auth,
    Identity,
    LaneRouter,
    MethodTable,
    Peer,
    RpcClient,
    RpcConfig,
    generate_secret,
    make_identity,
    make_runtime_dir,
    read_secret,
    write_secret,
)
from tandem.rpc.wire.endpoint import parse_endpoint
from tandem.store.config import StoreConfig
from tandem.store.election import PROBE_TIMEOUT_S
from tandem.store.messages import StoreStatus
from tandem.transfer import TransferConfig, TransferEngine

__all__ = [
    "LOOPBACK",
    "auth_for",
    "check_version",
    "choose_host_address",
    "choose_master_address",
    "default_folder",
    "find_endpoints",
    "identify",
    "make_client_maker",
    "make_engine",
    "make_file_name",
    "make_rpc_config",
    "read_transfer_secret",
    "state_folder",
    "watch_master",
]

logger = logging.getLogger(__name__)

STORE_VERSION = 1
"""Version of the messages. Versions that differ by one are compatible, since a new version only
adds.
"""
MAX_RECONNECT_MS = 250
"""Longest pause in milliseconds between reconnects, so that hosts find a restarted master soon."""
LOOPBACK = "127.0.0.1:0"
STATUS_EVERY_S = 2.0
"""Seconds between two status requests, the interval at which a server's page reads the status."""


def default_folder() -> Path:
    """Return the folder of this user's store on this machine, for socket, secret and epoch."""
    return Path(f"/tmp/tandem-store-{os.geteuid()}")  # noqa: S108 - made 0700 and checked


def find_endpoints(config: StoreConfig) -> list[str]:
    """Return the addresses of the masters. The data path's secret is in the folder of the first
    one.

    Raises: ConfigError (an address is invalid).
    """
    listed = [url.strip() for url in config.master.split(",") if url.strip()]
    listed = [url if "://" in url else f"tcp://{url}" for url in listed]
    for url in listed:
        parse_endpoint(url)  # Refuse an invalid address before anything is opened.
    return listed or [f"ipc://{make_runtime_dir(default_folder())}/master.sock"]


def state_folder(url: str) -> Path:
    """Return the folder for the durable state (epoch, list of hosts) of the master at ``url``: its
    Unix socket's folder, else the default folder.
    """
    path = parse_endpoint(url).path
    return make_runtime_dir(default_folder()) if path is None else path.parent


def auth_for(config: StoreConfig, url: str) -> Auth:
    """Return the credentials of this process for the master at an address."""
    return Auth.for_endpoint(url, config.secret)


def make_rpc_config(rpc: RpcConfig, config: StoreConfig) -> RpcConfig:
    """Return the control channel's settings, adjusted to what a store needs."""
    longest = min(rpc.reconnect_max_ms, MAX_RECONNECT_MS)
    lease_ms = rpc.lease_ms
    if config.election.backend != "none" or "," in config.master:
        # Shorten the session lease to the election's, so that hosts and clients notice a stopped
        # leader when another is elected.
        lease_ms = min(lease_ms, 1000 * config.election.ttl_s)
    return msgspec.structs.replace(
        rpc,
        reconnect_max_ms=longest,
        reconnect_initial_ms=min(rpc.reconnect_initial_ms, longest),
        lease_ms=lease_ms,
        heartbeat_interval_ms=min(rpc.heartbeat_interval_ms, lease_ms // 4),
    )


def identify(name: str, role: str) -> Identity:
    """Return the identity that a process introduces itself with: name, role, version."""
    return make_identity(name, role, {"store": str(STORE_VERSION)})


def check_version(theirs: Identity, ours: Identity) -> None:
    """Refuse a peer whose store version differs by more than one, or that is not a store.

    Raises: UnsupportedError naming both versions.
    """
    version = theirs.compat.get("store", "")
    if not version.isdecimal() or abs(int(version) - int(ours.compat["store"])) > 1:
        raise UnsupportedError(
            "store.handshake",
            f"{theirs.name} speaks store version {version or 'none'!r}, {ours.name} "
            f"{ours.compat['store']}: they may differ by one",
            field="compat.store",
        )


def read_transfer_secret(config: StoreConfig, url: str) -> str:
    """Return the secret of the data path. Without a configured one, processes of one machine share
    a secret file beside the master's socket.
    """
    if config.secret is not None:
        return config.secret
    path = state_folder(url) / "secret"
    with contextlib.suppress(FileExistsError):
        write_secret(path, generate_secret())
    return read_secret(path)


async def watch_master(
    config: StoreConfig, rpc: RpcConfig, note_status: Callable[[StoreStatus], None]
) -> str:
    """Wait until the session with the master is lost, and return the reason.

    The session with a stopped master is lost when its lease ends, with a killed one at once.

    Args:
        config: has the master's address.
        rpc: the control channel's settings.
        note_status: called with the master's status every few seconds.

    Raises: TandemError if no session can be opened.
    """
    url = find_endpoints(config)[0]
    client = RpcClient(
        url,
        identity=identify("watcher", "store_watcher"),
        auth=auth_for(config, url),
        config=make_rpc_config(rpc, config),
        check_compat=check_version,
    )
    lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def note_lost(_: Peer, error: TandemError) -> None:
        if not lost.done():
            lost.set_result(error.what)

    client.on_peer_lost(note_lost)
    async with client:
        asking = asyncio.create_task(_ask_status(client, note_status))
        try:
            return await lost
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)


async def _ask_status(client: RpcClient, note_status: Callable[[StoreStatus], None]) -> None:
    while True:
        with contextlib.suppress(TandemError):  # The session notes the loss of the master.
            note_status(await client.call("status", None, StoreStatus, timeout_s=STATUS_EVERY_S))
        await asyncio.sleep(STATUS_EVERY_S)


def make_client_maker(
    config: StoreConfig,
    rpc: RpcConfig,
    identity: Identity,
    table: MethodTable,
    lanes: LaneRouter,
) -> Callable[[str], RpcClient]:
    """Return a function that makes the RPC client of the master at an address."""
    timeout_ms = min(rpc.connect_timeout_ms, int(PROBE_TIMEOUT_S * 1e3))
    one_try = msgspec.structs.replace(rpc, connect_timeout_ms=timeout_ms)

    def make(url: str) -> RpcClient:
        return RpcClient(
            url,
            identity=identity,
            auth=auth_for(config, url),
            config=one_try,
            methods=table,
            check_compat=check_version,
            lanes=lanes,
        )

    return make


def choose_master_address(url: str) -> str:
    """Return where a master listens for bytes and calls by lanes unless settings say it: the
    interface of its endpoint ``url``, at a free port.
    """
    endpoint = parse_endpoint(url)
    if endpoint.is_local_socket:
        return LOOPBACK
    if endpoint.host in ("*", "0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        # None of its interfaces is the one that others reach it by.
        logger.warning(
            "event=lanes_on_loopback endpoint=%s: callers on other machines use the socket, which "
            "is slower: give --store.listen HOST:0",
            url,
        )
        return LOOPBACK
    return _join(endpoint.host, 0)


def choose_host_address(url: str) -> str:
    """Return where a host listens for bytes unless settings say it: the interface by which this
    machine reaches the master at ``url``, at a free port. Sends nothing.
    """
    endpoint = parse_endpoint(url)
    if endpoint.is_local_socket or endpoint.is_loopback:
        return LOOPBACK
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            endpoint.host, endpoint.port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return _join(probe.getsockname()[0], 0)
    except OSError:
        return LOOPBACK  # The connection to the master will tell what is wrong with the address.


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def make_engine(
    config: StoreConfig, url: str, name: str, listen: tuple[str, ...]
) -> TransferEngine:
    """Return the transfer engine by which this process of a store moves values. The caller closes
    it.
    """
    return TransferEngine(
        TransferConfig(
            name=name,
            secret=read_transfer_secret(config, url),
            listen=listen,
            transports=config.transports,
            deadline_ms=config.deadline_ms,
        )
    )


def make_file_name(name: str) -> str:
    """Return a name with all characters replaced that a file name may not contain."""
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in name)
