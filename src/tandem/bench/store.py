"""`tandem bench store`: a master, a host and this client on one machine; the directory; the
allocator.

Cases ``path=samehost|tcp op=put|get api=bytes|zerocopy size=BYTES batch=COUNT`` give microseconds
per batch, against a memcpy of as many bytes. Gets are measured with a client that asks the master
for the locations each time (``cache=no``) and with the default client, which caches them
(``cache=yes``). Puts are also measured with ``cores=near``: our client and host on one core and our
master on another; otherwise, and always for rivals, the system chooses the cores. ``op=exists``
gives keys per second, over the wire and in the directory; another case the memory of a directory;
``op=allocate`` nanoseconds of a put with its eviction; ``op=find clients=8`` the 99th percentile of
a metadata call with a million objects; ``op=first_put`` the time from starting a host of 16 GiB to
its first put. With peers the baseline is Mooncake (over TCP, its only path between processes) and,
in separate cases (``against=redis-...``), Redis. Values and answers are compared before a time
counts. ``python -m tandem.bench.store`` prints the curve of the allocator over a million puts. All
memory is touched before it is timed.
"""

import contextlib
import os
import random
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tandem._native import SegmentAllocator, fill_rows, locate_rows
from tandem.bench.children import start_child
from tandem.bench.harness import BenchCase, time_call
from tandem.bench.placement import on_cores
from tandem.bench.rivals.store_rivals import MooncakeStore, Redis, Rival
from tandem.core.errors import PeerLostError
from tandem.rpc import make_runtime_dir
from tandem.store import Part, PutOptions, PutResult, StoreClient, StoreConfig
from tandem.store.formats import layout
from tandem.store.master.state.index import Directory, Passes, Replica

__all__ = ["KV_BLOCK_BYTES", "make_cases", "trace_allocator"]

SEGMENT_BYTES = 2**30
QUICK_HOST_BYTES, HOST_BYTES = 2**30, 2**34
"""Segment of the host whose start is timed until its first put."""
SIZES = (4096, 65_536, 2**20, 2**24)
QUICK_SIZES = (4096, 2**20)
BATCHES = (1, 64)
MAX_BATCH_BYTES = 2**28
MEASURE_S = 0.05
NUM_DIRECTORY_KEYS = 1_000_000
NUM_WIRE_KEYS = 10_000
KV_BLOCK_BYTES = {
    "llama-3.1-8b": 32 * 2 * 8 * 128 * 2 * 64,
    "llama-3.1-70b": 80 * 2 * 8 * 128 * 2 * 64,
    "qwen3-30b-a3b": 48 * 2 * 4 * 128 * 2 * 64,
    "deepseek-v3": 61 * (512 + 64) * 2 * 64,
    "qwen2.5-7b": 28 * 2 * 4 * 128 * 2 * 64,
}
"""Bytes by model of a block of 64 tokens in bf16, all layers, from published shapes."""

MEMORY_PROGRAM = """
import resource, sys
from tandem.bench.store import fill_directory
def read_rss():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
before = read_rss()
directory = fill_directory(int(sys.argv[1]))
print((read_rss() - before) / len(directory))
"""


NUM_CLIENTS = 8
LATENCY_S = 3.0
LATENCY_PROGRAM = """
import random, sys, time
from tandem.store import StoreClient, StoreConfig
count, seconds, times = int(sys.argv[2]), float(sys.argv[3]), []
with StoreClient(StoreConfig(master=sys.argv[1])) as client:
    client.exists("0")
    print("ready", flush=True)
    sys.stdin.readline()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        key = f"{random.randrange(count):064}"
        begin = time.perf_counter()
        if len(times) % 2:
            assert client.exists(key)
        else:
            assert client.size(key) == 0
        times.append(time.perf_counter() - begin)
    print(*times)
"""


class _Store:
    """A master and a host as child processes, and a client in this process."""

    def __init__(
        self, transports: tuple[str, ...], segment_bytes: int = 0, *, touch: bool = True
    ) -> None:
        self.folder = make_runtime_dir()
        self.segments = Path("/dev/shm") / self.folder.name  # noqa: S108 - made 0700 by its owner
        self.children: list[subprocess.Popen[str]] = []
        self.endpoint = f"ipc://{self.folder}/m.sock"
        self.host_started_s = 0.0
        settings = {
            "store.master": self.endpoint,
            "store.transports": ",".join(transports),
            "store.segment-dir": str(self.segments),
            "store.segment-bytes": str(segment_bytes or SEGMENT_BYTES),
            "store.lease-ms": "1000",
            "store.recovery-ms": "0",
        }
        flags = [part for key, value in settings.items() for part in (f"--{key}", value)]
        try:
            for role, more in (("master", []), ("host", ["--store.name", "bench"])):
                self.host_started_s = time.monotonic()
                self._start(role, [*flags, *more])
            config = StoreConfig(
                master=settings["store.master"],
                transports=transports,  # type: ignore[arg-type]
                lease_ms=1000,
            )
            self.client = StoreClient(config)
            try:
                # This client caches no locations, so each of its lookups asks the master.
                self.asking = StoreClient(msgspec.structs.replace(config, location_cache=0))
            except BaseException:
                self.client.close()
                raise
        except BaseException:
            self._end()
            raise
        if touch:
            self._touch()

    def _start(self, role: str, flags: Sequence[str]) -> None:
        child = start_child(
            [sys.executable, "-m", "tandem", "store", role, "--log-level", "error", *flags],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.children.append(child)
        assert child.stdout is not None
        if not child.stdout.readline():
            raise PeerLostError("bench.start", f"the store's {role} did not start")

    def _touch(self) -> None:
        """Write to every page once, so that no measured case touches memory for the first time."""
        value = np.zeros(2**24, np.uint8)
        options = PutOptions(wait_s=5)
        for i in range(int(SEGMENT_BYTES * 0.9) // len(value)):
            self.client.put(f"touch/{i}", value, options)
        self.client.remove_prefix("")

    def close(self) -> None:
        """End the clients and processes; remove their files."""
        self.asking.close()
        self.client.close()
        self._end()

    def _end(self) -> None:
        for child in self.children:
            child.terminate()
        for child in self.children:
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait(10)
            assert child.stdout is not None
            child.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(self.segments, ignore_errors=True)


def make_cases(*, quick: bool, with_peers: bool = False) -> Iterator[BenchCase]:
    """Yield the cases; the processes for a path live as long as its cases.

    Args:
       quick: few sizes.
       with_peers: the baseline is a rival, which is installed if need be.
    """
    yield from _make_allocator_cases(quick=quick)
    yield from _make_directory_cases(quick=quick)
    yield _make_first_put_case(QUICK_HOST_BYTES if quick else HOST_BYTES)
    yield _make_latency_case(20_000 if quick else 1_000_000)
    with contextlib.ExitStack() as stack:
        mooncake = MooncakeStore(stack, SEGMENT_BYTES) if with_peers else None
        for path, transports in (("samehost", ("local", "shm", "cma")), ("tcp", ("local", "tcp"))):
            store = _Store(transports)
            with contextlib.closing(store), contextlib.ExitStack() as inner:
                socket = "unix" if path == "samehost" else "tcp"
                redis = Redis(inner, socket, SEGMENT_BYTES) if with_peers else None
                for size in QUICK_SIZES if quick else SIZES:
                    for batch in BATCHES:
                        if size * batch > MAX_BATCH_BYTES:
                            continue
                        for api in ("bytes", "zerocopy"):
                            case = _ObjectCase(store, path, api, size, batch)
                            yield from case.compare(mooncake)
                            if redis is not None and api == "bytes":
                                yield from case.compare(redis)
                if path == "samehost":
                    yield _make_wire_exists_case(store.client, mooncake)


class _ObjectCase:
    """A batch of objects that is put into the store and got from it; prepared by its first
    check.
    """

    def __init__(self, store: _Store, path: str, api: str, size: int, batch: int) -> None:
        self._store = store
        self._path, self._api, self._size, self._batch = path, api, size, batch
        self._keys = [f"{path}/{api}/{size}/{i:032}" for i in range(batch)]
        self._source = self._target = np.zeros(0, np.uint8)

    def compare(self, rival: Rival | None) -> Iterator[BenchCase]:
        """Yield the cases of puts (also with chosen cores, if there are several) and of gets
        (without and with cached locations), against a rival's store if one is given.
        """
        against = "" if rival is None or rival.name == "mooncake tcp" else rival.name
        suffix = f" against={against.replace(' ', '-')}" if against else ""
        near = [("put", " cores=near", self._measure_near_put)]
        for op, more, ours in (
            ("put", "", self._measure_put),
            *(near if len(os.sched_getaffinity(0)) > 1 and not against else []),
            ("get", " cache=no", lambda: _measure_us(self._get_asking)),
            ("get", " cache=yes", lambda: _measure_us(self._get)),
        ):
            yield BenchCase(
                name=f"path={self._path} op={op} api={self._api} size={self._size} "
                f"batch={self._batch}{more}{suffix}",
                unit="us",
                ours=ours,
                check=lambda: self._check(rival),
                baseline=None if rival is None else _bind(rival, op),
                baseline_name=None if rival is None else rival.name,
                ceiling=lambda: _measure_us(self._copy),
            )

    def _check(self, rival: Rival | None) -> str:
        if not self._source.size:
            random_bytes = np.random.default_rng(self._size)
            count = self._size * self._batch
            self._source = random_bytes.integers(0, 256, count, dtype=np.uint8)
            self._target = np.zeros_like(self._source)
            memory = self._source, self._target
            store = self._store
            self._put, self._get = _make_calls(store.client, self._api, self._keys, *memory)
            _, self._get_asking = _make_calls(store.asking, self._api, self._keys, *memory)
        self._store.client.remove_prefix("")
        results = self._put()
        if any(result is not PutResult.CREATED for result in results):
            return f"put: {results[0]}"
        # The first get asks the master; the others use cached locations.
        for get in (self._get_asking, self._get, self._get):
            self._target[:] = 0
            get()
            if not np.array_equal(self._source, self._target):
                return "bytes differ"
        if rival is not None:
            rival.prepare(self._api, self._size, self._batch)
        return "ok"

    def _measure_put(self) -> float:
        # Each put is of keys that the store does not hold: the keys are removed before it, outside
        # of the measured time.
        return _measure_us(self._put, before=lambda: self._store.client.remove_many(self._keys))

    def _measure_near_put(self) -> float:
        master, host = (child.pid for child in self._store.children)
        first, second, *_ = sorted(os.sched_getaffinity(0))
        with on_cores({os.getpid(): first, host: first, master: second}):
            return self._measure_put()

    def _copy(self) -> None:
        np.copyto(self._target, self._source)


def _bind(rival: Rival, op: str) -> Callable[[], float]:
    return lambda: rival.measure_us(op)


def _make_calls(
    client: StoreClient,
    api: str,
    keys: Sequence[str],
    source: "np.ndarray[Any, Any]",
    target: "np.ndarray[Any, Any]",
) -> tuple[Callable[[], Sequence[Any]], Callable[[], object]]:
    size = len(source) // len(keys)
    if api == "bytes":
        values = [source[i * size : (i + 1) * size].tobytes() for i in range(len(keys))]

        def get() -> None:
            for i, value in enumerate(client.get_many(keys)):
                if isinstance(value, Exception):
                    raise value
                if not target[i * size]:  # Only the check reads the buffer, and clears it before.
                    target[i * size : (i + 1) * size] = np.frombuffer(value, np.uint8)

        return lambda: client.put_many(keys, values), get
    from_buffer, to_buffer = client.register(source), client.register(target)
    sources = [Part(from_buffer, i * size, size) for i in range(len(keys))]
    targets = [Part(to_buffer, i * size, size) for i in range(len(keys))]

    def get_into() -> None:
        for result in client.get_into_many(keys, targets):
            if isinstance(result, Exception):
                raise result

    return lambda: client.put_from_many(keys, sources), get_into


def _make_wire_exists_case(client: StoreClient, mooncake: MooncakeStore | None) -> BenchCase:
    keys = [f"{i:064}" for i in range(NUM_WIRE_KEYS)]

    def check() -> str:
        client.remove_prefix("")
        client.put_many(keys[::2], [b""] * len(keys[::2]))
        expected = [i % 2 == 0 for i in range(len(keys))]
        return "ok" if client.exists_many(keys) == expected else "wrong answers"

    return BenchCase(
        name=f"op=exists over=wire keys={len(keys)} key_bytes=64",
        unit="keys/s",
        ours=lambda: len(keys) / time_call(lambda: client.exists_many(keys)),
        check=check,
        baseline=None if mooncake is None else lambda: mooncake.measure_exists(len(keys)),
        baseline_name=None if mooncake is None else mooncake.name,
        higher_is_better=True,
    )


def _make_first_put_case(segment_bytes: int) -> BenchCase:
    """Return the case of the time from starting a host's process until its first put is
    acknowledged.
    """
    store: _Store | None = None

    def measure() -> float:
        nonlocal store
        with contextlib.closing(_Store(("local", "cma"), segment_bytes, touch=False)) as store:
            if store.client.put("first", b"value") is not PutResult.CREATED:
                raise PeerLostError("bench.put", "the first put was not a new one")
            return time.monotonic() - store.host_started_s

    return BenchCase(
        name=f"op=first_put segment={segment_bytes}", unit="s", ours=measure, check=lambda: "ok"
    )


def _make_latency_case(num_objects: int) -> BenchCase:
    """Return the case of the 99th percentile of metadata calls, ``exists`` and ``size`` in turn, by
    8 processes.
    """

    def measure() -> float:
        with contextlib.closing(_Store(("local", "cma"), touch=False)) as store:
            for begin in range(0, num_objects, 10_000):
                keys = [f"{i:064}" for i in range(begin, min(begin + 10_000, num_objects))]
                store.client.put_many(keys, [b""] * len(keys))
            children = [
                start_child(
                    [
                        *(sys.executable, "-c", LATENCY_PROGRAM, store.endpoint),
                        *(str(num_objects), str(LATENCY_S)),
                    ],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                for _ in range(NUM_CLIENTS)
            ]
            return _collect_p99_us(children)

    return BenchCase(
        name=f"op=find clients={NUM_CLIENTS} objects={num_objects}",
        unit="us P99",
        ours=measure,
        check=lambda: "ok",
    )


def _collect_p99_us(children: "Sequence[subprocess.Popen[str]]") -> float:
    """Start all children at once; return the 99th percentile in microseconds over all
    their calls.
    """
    try:
        for child in children:
            assert child.stdout is not None
            if child.stdout.readline() != "ready\n":
                raise PeerLostError("bench.start", "a client did not start")
        times: list[float] = []
        outputs = []
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        for child in children:
            output, _ = child.communicate(timeout=120)
            outputs.append(output)
        for output in outputs:
            times += map(float, output.split())
        if not times:
            raise PeerLostError("bench.run", "no client has measured anything")
        return sorted(times)[len(times) * 99 // 100] * 1e6
    finally:
        for child in children:
            child.kill()
            child.wait(10)


def fill_directory(count: int) -> Directory:
    """Return a directory of ``count`` objects with keys of 64 characters and one replica each."""
    directory = Directory(Passes(fill_rows, locate_rows))
    for i in range(count):
        directory.insert(
            f"{i:064}", size=4096, checksum=i, version=i, replicas=[Replica(0, i * 4608)]
        )
    return directory


def _make_directory_cases(*, quick: bool) -> Iterator[BenchCase]:
    count = NUM_DIRECTORY_KEYS // 10 if quick else NUM_DIRECTORY_KEYS
    yield _make_exists_case(count)

    def measure_memory() -> float:
        command = [sys.executable, "-c", MEMORY_PROGRAM, str(count)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        return float(result.stdout)

    yield BenchCase(
        name=f"op=memory objects={count} key_bytes=64",
        unit="bytes/object",
        ours=measure_memory,
        check=lambda: "ok",
    )


def _make_exists_case(count: int) -> BenchCase:
    directory = fill_directory(count)
    keys = [f"{i * 7919 % (2 * count):064}" for i in range(100_000)]
    plain = dict.fromkeys(directory.list_keys())

    def check() -> str:
        expected = bytes(key in plain for key in keys)
        return "ok" if directory.exists_many(keys) == expected else "wrong answers"

    return BenchCase(
        name=f"op=exists over=directory objects={count} key_bytes=64",
        unit="keys/s",
        ours=lambda: len(keys) / time_call(lambda: directory.exists_many(keys)),
        check=check,
        ceiling=lambda: len(keys) / time_call(lambda: [key in plain for key in keys]),
        higher_is_better=True,
    )


def _make_allocator_cases(*, quick: bool) -> Iterator[BenchCase]:
    num_puts = 50_000 if quick else 1_000_000
    for distribution in DISTRIBUTIONS:

        def check(distribution: str = distribution) -> str:
            first, *_ = trace_allocator(distribution, 50_000)
            return "ok" if first.used_share >= 0.93 else f"{first.used_share:.3f} used when full"

        def measure(distribution: str = distribution) -> float:
            return trace_allocator(distribution, num_puts)[-1].mean_ns

        yield BenchCase(
            name=f"op=allocate mix={distribution} puts={num_puts}",
            unit="ns",
            ours=measure,
            check=check,
        )


DISTRIBUTIONS: dict[str, Callable[[random.Random], int]] = {
    "kv5": lambda rng: rng.choice(tuple(KV_BLOCK_BYTES.values())),
    "4k": lambda rng: 4096,
    "small": lambda rng: int(512 * 2 ** rng.uniform(0, 7)),
    "wide": lambda rng: int(512 * 2 ** rng.uniform(0, 14)),
}
"""Distributions of value sizes, by name; each returns one random size in bytes."""


class AllocatorPoint:
    """Part of a trace: how full the segment was when puts found no room, and the time of a put."""

    def __init__(self) -> None:
        self.num_puts = 0
        self.used_share = 1.0
        """Used share of the segment, averaged over the part's refused puts; in the first point, at
        the first refusal.
        """
        self.lowest_share = 1.0
        self.mean_ns = 0.0
        """Mean nanoseconds per put of native calls: allocating, and freeing evicted objects."""


def trace_allocator(distribution: str, num_puts: int, *, points: int = 10) -> list[AllocatorPoint]:
    """Put ``num_puts`` objects into 4 GiB, evicting the oldest 5 % when full.

    Returns: points; the first covers the filling, the others are equal parts of the whole trace.
    """
    rng = random.Random(1)  # noqa: S311 - sizes, not secrets
    capacity = 4 * 2**30
    space = SegmentAllocator(capacity)
    drawn = [layout.extent_bytes(64, DISTRIBUTIONS[distribution](rng)) for _ in range(100_000)]
    live: deque[tuple[int, int]] = deque()
    filling = AllocatorPoint()
    trace = [filling]
    shares: list[float] = []
    stretch, spent_ns = max(1, num_puts // points), 0
    for i in range(num_puts):
        size = drawn[i % len(drawn)]
        begin_ns = time.perf_counter_ns()
        offsets = space.allocate([size])
        spent_ns += time.perf_counter_ns() - begin_ns
        while offsets is None:
            share = space.used_bytes / capacity
            if not filling.num_puts:
                filling.num_puts, filling.used_share, filling.lowest_share = i, share, share
            shares.append(share)
            freed = 0
            while freed < capacity // 20 and live:
                offset, length = live.popleft()
                begin_ns = time.perf_counter_ns()
                space.release(offset, length)
                spent_ns += time.perf_counter_ns() - begin_ns
                freed += length
            begin_ns = time.perf_counter_ns()
            offsets = space.allocate([size])
            spent_ns += time.perf_counter_ns() - begin_ns
        live.append((offsets[0], size))
        if (i + 1) % stretch == 0:
            point = AllocatorPoint()
            point.num_puts = i + 1
            if shares:
                point.used_share = sum(shares) / len(shares)
                point.lowest_share = min(shares)
            point.mean_ns = spent_ns / stretch
            trace.append(point)
            spent_ns = 0
            shares.clear()
    return trace


def _measure_us(
    function: Callable[[], object], before: Callable[[], object] | None = None
) -> float:
    times: list[float] = []
    end_s = time.monotonic() + MEASURE_S
    while not times or time.monotonic() < end_s:
        if before is not None:
            before()
        times.append(time_call(function))
    return sorted(times)[len(times) // 2] * 1e6


def main() -> None:
    """Print the curve of the allocator for each distribution, as a table in Markdown."""
    write = sys.stdout.write
    write("| mix | puts | used when a put found no room, mean | lowest | ns a put |\n")
    write("|---|---|---|---|---|\n")
    for distribution in DISTRIBUTIONS:
        for point in trace_allocator(distribution, 1_000_000):
            write(
                f"| {distribution} | {point.num_puts} | {point.used_share:.4f} | "
                f"{point.lowest_share:.4f} | {point.mean_ns:.0f} |\n"
            )


if __name__ == "__main__":
    main()
