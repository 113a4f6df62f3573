"""A TCP proxy that does to a path what networks do: delay, throttle, corrupt, drop, stall, die.

Goal: the product's own sockets, frames and timers meet each fault. Faults are drawn from a seeded
generator and can be switched while connections live. Bytes that are dropped leave a hole in the
stream, as no TCP would; that is the hardest form of corruption.
"""

import contextlib
import random
import selectors
import socket
import threading
import time


class FaultProxy:
    """Listens on loopback and forwards to ``target``; one thread.

    Attributes may be changed at any time: ``corrupt`` and ``drop`` are probabilities per chunk,
    ``delay_s`` holds each chunk back, ``rate`` is bytes per second (0 = unlimited), ``is_stalled``
    swallows nothing and moves nothing, ``is_dead`` refuses and cuts.
    """

    def __init__(self, seed: int = 0, target: str = "") -> None:
        self.rng = random.Random(seed)
        self.target = target
        self.corrupt = self.drop = self.delay_s = self.rate = 0.0
        self.is_stalled = self.is_dead = False
        self.num_connections = self.num_faults = self.num_bytes = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.pairs: dict[socket.socket, socket.socket] = {}
        self.queue: dict[socket.socket, list[tuple[float, bytearray]]] = {}
        self.ending: set[socket.socket] = set()
        self.budget = 0.0
        self.budget_at = time.monotonic()
        self.is_stopping = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def cut(self) -> None:
        """Reset all connections; new ones are accepted unless ``is_dead``."""
        self._wants_cut = True

    _wants_cut = False

    def close(self) -> None:
        self.is_stopping = True
        self.thread.join(10)
        self._drop_all()
        self.listener.close()
        self.selector.close()

    def __enter__(self) -> "FaultProxy":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self.is_stopping:
            if self._wants_cut or self.is_dead:
                self._wants_cut = False
                self._drop_all()
            for key, _ in self.selector.select(0.002 if self._has_queued() else 0.02):
                if key.fileobj is self.listener:
                    self._accept()
                elif key.fileobj in self.pairs and not self.is_stalled:
                    self._forward(key.fileobj)
            self._flush()

    def _has_queued(self) -> bool:
        return any(self.queue.values())

    def _accept(self) -> None:
        near, _ = self.listener.accept()
        if self.is_dead or not self.target:
            near.close()
            return
        host, port = self.target.rsplit(":", 1)
        try:
            far = socket.create_connection((host, int(port)), timeout=2)
        except OSError:
            near.close()
            return
        self.num_connections += 1
        for a, b in ((near, far), (far, near)):
            a.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            a.setblocking(False)
            self.pairs[a] = b
            self.queue[a] = []
            self.selector.register(a, selectors.EVENT_READ)

    def _forward(self, source: socket.socket) -> None:
        target = self.pairs[source]
        if sum(len(chunk) for _, chunk in self.queue[target]) > 1 << 20:
            return
        if self.rate and not self._take_budget():
            return
        try:
            data = source.recv(
                min(1 << 18, max(4096, int(self.rate * 0.002))) if self.rate else 1 << 18
            )
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            # What was read before still goes out, as from a router that knows nothing of the end.
            self.ending.add(target)
            self.selector.unregister(source)
            return
        self.budget -= len(data)
        self.num_bytes += len(data)
        chunk = bytearray(data)
        if self.corrupt and self.rng.random() < self.corrupt:
            self.num_faults += 1
            chunk[self.rng.randrange(len(chunk))] ^= 1 << self.rng.randrange(8)
        if self.drop and self.rng.random() < self.drop:
            self.num_faults += 1
            begin = self.rng.randrange(len(chunk))
            del chunk[begin : begin + self.rng.randint(1, 4096)]
        self.queue[target].append((time.monotonic() + self.delay_s, chunk))

    def _take_budget(self) -> bool:
        now = time.monotonic()
        self.budget = min(self.budget + (now - self.budget_at) * self.rate, self.rate * 0.02)
        self.budget_at = now
        return self.budget > 0

    def _flush(self) -> None:
        now = time.monotonic()
        for target, chunks in list(self.queue.items()):
            while chunks and chunks[0][0] <= now and not self.is_stalled:
                chunk = chunks[0][1]
                try:
                    sent = target.send(chunk) if chunk else 0
                except BlockingIOError:
                    break
                except OSError:
                    self._drop(target)
                    break
                if sent < len(chunk):
                    del chunk[:sent]
                    break
                chunks.pop(0)
            if not chunks and target in self.ending:
                self._drop(target)

    def _drop(self, one: socket.socket) -> None:
        other = self.pairs.get(one)
        for end in (one, other):
            if end is None or end not in self.pairs:
                continue
            del self.pairs[end]
            self.queue.pop(end, None)
            self.ending.discard(end)
            with contextlib.suppress(KeyError, ValueError):
                self.selector.unregister(end)
            end.close()

    def _drop_all(self) -> None:
        for one in list(self.pairs):
            self._drop(one)
