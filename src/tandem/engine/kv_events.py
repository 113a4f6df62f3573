"""Events about cached blocks (stored, removed, cleared) for routers of other projects.

The messages are those that vLLM and SGLang publish over ZeroMQ. A PUB socket sends [topic, sequence
number (8 bytes, big endian), msgpack payload]; a ROUTER socket replays remembered messages from a
given sequence number on and ends with the number -1. The payload is [time, events, rank]. vLLM
encodes an event as a map with the key ``type``; SGLang and older vLLM as an array that begins with
the name.

For a model with recurrent states or sliding windows, an event in map form names its group, as in
vLLM: 0 for KV, 1 for states, 2 for the KV of sliding-window layers. A prefix of a model with
windows is cached up to the last block before which the whole window is cached; a prefix of a model
with states, up to the last state all of whose blocks are cached. A state at the end of a block has
the block's hash; a state inside a block has its own hash, and the tokens after the last full block.
The array form has no groups; states and windows are left out there, because a removed state would
be taken for a removed block.

Events carry the tokens of prompts. So by default nothing is published. Without a secret, events are
published on loopback or a Unix socket only; elsewhere only over CURVE, to holders of the secret.

Threads: the engine reports under its lock and returns at once; sockets live on a thread of their
own. A subscriber that does not read loses messages and sees a gap in the sequence numbers.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from tandem.core.errors import ConfigError, PermissionDeniedError
from tandem.engine.config import KvEventConfig
from tandem.engine.groups.chain import TOKEN_BYTES
from tandem.engine.groups.snapshots import Snapshot
from tandem.engine.scheduling.prefix_index import PrefixNode
from tandem.rpc import Auth
from tandem.rpc.trust.gate import CurveGate
from tandem.rpc.wire.endpoint import Endpoint, parse_endpoint
from tandem.rpc.wire.pump import SocketPump

__all__ = ["KvEventPublisher"]

logger = logging.getLogger(__name__)

MEDIUM = "CPU"
"""Storage medium named in events."""
KV_GROUP, STATE_GROUP, WINDOW_GROUP = 0, 1, 2
STATE_KIND = "mamba"
"""vLLM's name for the kind of cache that holds recurrent states of any sort."""
WINDOW_KIND = "sliding_window"
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
STOP_TIMEOUT_S = 5.0
FLUSH_S = 0.01
"""Seconds for which events are collected into one message."""


class KvEventPublisher:
    """The publisher of changes of a prefix index, as vLLM's KV events; an ``IndexObserver``. Close
    it after the engine.

    Args:
        config: settings, with an endpoint.
        block_size: tokens per block.
        kv_kind: vLLM's name for the kind of KV in full blocks, for a model with states or windows;
            otherwise empty.
        window: size in tokens of the sliding window, if its layers have blocks of their own.
        now: returns wall-clock time in seconds, for the messages.

    Raises: ConfigError (an address cannot be bound); PermissionDeniedError (others could read an
        address without the secret).
    """

    def __init__(
        self,
        config: KvEventConfig,
        *,
        block_size: int,
        now: Callable[[], float],
        kv_kind: str = "",
        window: int = 0,
    ) -> None:
        self._config = config
        self._kv_kind, self._window = kv_kind, window
        self._block_size = block_size
        self._now = now
        self._auth = None if config.secret is None else Auth.cluster(config.secret)
        self._endpoints = [
            self._check(url) for url in (config.endpoint, config.replay_endpoint) if url
        ]
        self._events: list[Any] = []
        self._lock = threading.Lock()
        self._sequence = 0
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._encoder = msgspec.msgpack.Encoder()
        self._failure: BaseException | None = None
        self._pump: SocketPump | None = None
        self._bound: list[str] = []
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            raise self._failure

    @property
    def addresses(self) -> list[str]:
        """Addresses of the ZeroMQ PUB socket and, if there is one, of the replay socket, with
        actual ports.
        """
        return list(self._bound)

    def close(self) -> None:
        """Send the remaining events and close the sockets."""
        if self._loop is not None and self._stopping is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(STOP_TIMEOUT_S)

    # These methods are called by the prefix index, on the engine's thread.

    def note_stored(self, node: PrefixNode) -> None:
        """Publish that a full block can be found in the prefix index."""
        self._add_stored(node, **self._name_group(KV_GROUP, self._kv_kind))

    def _add_stored(self, node: PrefixNode, **group: Any) -> None:
        assert node.key is not None, "a partial block has no key"
        parent = node.parent
        parent_hash = None
        # The first block's parent is the root of the index, which is not a block and has no hash.
        if parent is not None and parent.parent is not None and parent.key is not None:
            parent_hash = self._hash(parent.key)
        self._add(
            "BlockStored",
            block_hashes=[self._hash(node.key)],
            parent_block_hash=parent_hash,
            token_ids=_unpack_tokens(node.tokens),
            block_size=self._block_size,
            lora_id=int(node.adapter[:8], 16) if node.adapter else None,
            medium=MEDIUM,
            lora_name=node.adapter or None,
            **group,
        )

    def note_removed(self, key: bytes) -> None:
        """Publish that the block with this key can no longer be found in the prefix index."""
        group = self._name_group(KV_GROUP, self._kv_kind)
        self._add("BlockRemoved", block_hashes=[self._hash(key)], medium=MEDIUM, **group)

    def note_cleared(self) -> None:
        """Publish that the prefix index was emptied."""
        self._add("AllBlocksCleared")

    def note_state_kept(self, snapshot: Snapshot) -> None:
        """Publish that a snapshot (a saved recurrent state) is cached."""
        if self._config.encoding != "map":
            return
        tokens = _unpack_tokens(snapshot.tail)
        self._add(
            "BlockStored",
            block_hashes=[self._hash(snapshot.key)],
            parent_block_hash=self._hash(snapshot.parent_key) if tokens else None,
            token_ids=tokens,
            block_size=len(tokens) or self._block_size,
            lora_id=None,
            medium=MEDIUM,
            lora_name=None,
            **self._name_group(STATE_GROUP, STATE_KIND),
        )

    def note_state_removed(self, snapshot: Snapshot) -> None:
        """Publish that a snapshot (a saved recurrent state) is no longer cached."""
        if self._config.encoding == "map":
            group = self._name_group(STATE_GROUP, STATE_KIND)
            hashes = [self._hash(snapshot.key)]
            self._add("BlockRemoved", block_hashes=hashes, medium=MEDIUM, **group)

    def note_window_kept(self, node: PrefixNode) -> None:
        """Publish that a block's KV of the sliding-window layers is cached."""
        if self._config.encoding == "map":
            group = self._name_group(WINDOW_GROUP, WINDOW_KIND)
            self._add_stored(node, **group, kv_cache_spec_sliding_window=self._window)

    def note_window_removed(self, key: bytes) -> None:
        """Publish that a block's KV of the sliding-window layers is no longer cached."""
        if self._config.encoding == "map":
            group = self._name_group(WINDOW_GROUP, WINDOW_KIND)
            self._add("BlockRemoved", block_hashes=[self._hash(key)], medium=MEDIUM, **group)

    def _name_group(self, number: int, kind: str) -> dict[str, Any]:
        """Return the fields by which vLLM's events name a group (one kind of block: full, window or
        state); empty if the model has only full blocks or the encoding has no fields.
        """
        has_groups = self._kv_kind and self._config.encoding == "map"
        return {"group_idx": number, "kv_cache_spec_kind": kind} if has_groups else {}

    def _hash(self, key: bytes) -> bytes | int:
        # SGLang represents block hashes as 64-bit integers.
        is_map = self._config.encoding == "map"
        return key if is_map else int.from_bytes(key[:8], "big", signed=True)

    def _add(self, name: str, **fields: Any) -> None:
        if self._config.encoding == "map":
            event: Any = {"type": name, **fields}
        else:
            fields.pop("lora_name", None)
            event = [name, *fields.values()]
        with self._lock:
            is_first = not self._events
            self._events.append(event)
        if is_first and self._loop is not None:
            self._loop.call_soon_threadsafe(self._schedule)

    # The methods below run on the publishing thread.

    def _check(self, url: str) -> Endpoint:
        endpoint = parse_endpoint(url)
        if self._auth is not None and not endpoint.is_local_socket:
            self._auth.check_bind(endpoint)
        elif endpoint.is_local_socket:
            Auth.local().check_bind(endpoint)
        elif not endpoint.is_loopback:
            raise PermissionDeniedError(
                "kv_events.bind",
                f"{url} is reachable from other machines and KV events carry prompts: set "
                "kv_events.secret, or publish on 127.0.0.1",
                field="kv_events.endpoint",
            )
        return endpoint

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        gate = None
        sockets: list[zmq.Socket[bytes]] = []
        try:
            if self._auth is not None:
                gate = CurveGate(context, self._auth)
            for kind, endpoint in zip((zmq.PUB, zmq.ROUTER), self._endpoints, strict=False):
                sockets.append(self._open(context, kind, endpoint))
            self._publish_to = sockets[0]
            if len(sockets) > 1:
                replay = sockets[1]
                self._pump = SocketPump(replay, lambda: self._replay(replay))
            self._loop = asyncio.get_running_loop()
            self._stopping = asyncio.Event()
            self._started.set()
            await self._stopping.wait()
            self._publish()
        except BaseException as error:
            self._failure = error
            if self._started.is_set():
                raise
        finally:
            self._started.set()
            if self._pump is not None:
                self._pump.close()
            for socket in sockets:
                socket.close(linger=0)
            if gate is not None:
                gate.close()
            context.destroy(linger=0)

    def _open(
        self, context: "zmq.Context[zmq.Socket[bytes]]", kind: int, endpoint: Endpoint
    ) -> "zmq.Socket[bytes]":
        socket = context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, self._config.max_unsent)
        if self._auth is not None and not endpoint.is_local_socket:
            self._auth.secure_server(socket)
        url = endpoint.url
        if not endpoint.is_local_socket:
            host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
            url = f"tcp://{host}:{endpoint.port or '*'}"
        try:
            socket.bind(url)
        except zmq.ZMQError as error:
            socket.close()
            raise ConfigError(
                "kv_events.bind", f"cannot bind {url}: {error}", field="kv_events.endpoint"
            ) from None
        self._bound.append(socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0"))
        return socket

    def _schedule(self) -> None:
        assert self._loop is not None
        self._loop.call_later(FLUSH_S, self._publish)

    def _publish(self) -> None:
        with self._lock:
            events, self._events = self._events, []
        if not events:
            return
        payload = self._encoder.encode([self._now(), events, None])
        if self._config.replay_endpoint:
            self._sent.append((self._sequence, payload))
        self._publish_to.send_multipart(
            [self._config.topic.encode(), self._sequence.to_bytes(8, "big"), payload]
        )
        self._sequence += 1

    def _replay(self, socket: "zmq.Socket[bytes]") -> None:
        """Answer one subscriber's replay request: send again every remembered message from the
        number that it asks for, then the end mark.
        """
        client, *rest = socket.recv_multipart(zmq.NOBLOCK)
        if not rest or len(rest[-1]) != 8:
            logger.info("event=kv_replay_refused frames=%d", len(rest))
            return
        start = int.from_bytes(rest[-1], "big")
        topic = self._config.topic.encode()
        messages = [
            [number.to_bytes(8, "big"), payload]
            for number, payload in self._sent
            if number >= start
        ]
        for message in [*messages, [END_OF_REPLAY, b""]]:
            try:
                socket.send_multipart([client, b"", topic, *message], zmq.NOBLOCK)
            except zmq.ZMQError:
                break  # Stop the replay: the subscriber has disconnected or does not read.
        if self._pump is not None:
            self._pump.note_sent()


def _unpack_tokens(packed: bytes) -> list[int]:
    return [
        int.from_bytes(packed[i : i + TOKEN_BYTES], "little")
        for i in range(0, len(packed), TOKEN_BYTES)
    ]
