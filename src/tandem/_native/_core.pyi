"""
Native core of Tandem: machine topology, thread pool, aligned memory, probes, kernels.
"""

from collections.abc import Mapping, Sequence
import enum
from typing import Annotated, Final, overload

import numpy
import numpy.typing
from numpy.typing import NDArray


def error_codes() -> list[str]:
    """
    Codes that native errors carry, in the order of `tandem.core.errors.ERROR_CODES`.
    """

def raise_error(code: str, where: str, what: str, field: str = '') -> None:
    """
    Raise the error of this code as native code would; for tests of the translation.
    """

class CpuFeatures:
    """
    Instruction sets that kernels may use: in the CPU and enabled by the operating system.
    """

    @property
    def vendor(self) -> str: ...

    @property
    def brand(self) -> str: ...

    @property
    def avx2(self) -> bool: ...

    @property
    def fma(self) -> bool: ...

    @property
    def f16c(self) -> bool: ...

    @property
    def avx_vnni(self) -> bool: ...

    @property
    def avx512f(self) -> bool: ...

    @property
    def avx512bw(self) -> bool: ...

    @property
    def avx512vl(self) -> bool: ...

    @property
    def avx512dq(self) -> bool: ...

    @property
    def avx512_vnni(self) -> bool: ...

    @property
    def avx512_bf16(self) -> bool: ...

    @property
    def avx512_vbmi(self) -> bool: ...

    @property
    def avx512_fp16(self) -> bool: ...

    @property
    def amx_tile(self) -> bool: ...

    @property
    def amx_int8(self) -> bool: ...

    @property
    def amx_bf16(self) -> bool: ...

    @property
    def amx_blocker(self) -> str:
        """Why AMX is unusable although the CPU has it; empty otherwise."""

    @property
    def cap(self) -> str:
        """The level of `cap_isa` that hides wider ones; empty for none."""

def cpu_features() -> CpuFeatures:
    """
    Detect once; on a CPU with AMX this asks the kernel for the use of tiles.
    """

class NumaNode:
    """A NUMA node that this process may use."""

    @property
    def node_id(self) -> int: ...

    @property
    def cpus(self) -> list[int]:
        """Allowed CPUs; empty for a node of memory only."""

    @property
    def memory_total_bytes(self) -> int: ...

    @property
    def memory_free_bytes(self) -> int: ...

class HugepagePool:
    """One size of preallocated huge pages."""

    @property
    def page_size_bytes(self) -> int: ...

    @property
    def num_pages(self) -> int: ...

    @property
    def num_free(self) -> int: ...

class HugepageState:
    """Huge pages of this machine."""

    @property
    def transparent(self) -> str:
        """`always`, `madvise`, `never`, or empty where the kernel has none."""

    @property
    def pools(self) -> list[HugepagePool]: ...

class CacheSizes:
    """Cache sizes of the first allowed CPU; 0 = unknown."""

    @property
    def l1d_bytes(self) -> int: ...

    @property
    def l2_bytes(self) -> int: ...

    @property
    def l3_bytes(self) -> int: ...

class CgroupLimits:
    """The tightest limits of the control groups of this process."""

    @property
    def cpu_quota(self) -> float | None:
        """In CPUs; None = no quota."""

    @property
    def cpu_quota_source(self) -> str: ...

    @property
    def memory_limit_bytes(self) -> int | None: ...

    @property
    def memory_limit_source(self) -> str: ...

    @property
    def memory_left_bytes(self) -> int | None:
        """Left of the limits, reclaimable file pages included; None = no limit."""

class Topology:
    """The machine as this process may use it."""

    @property
    def num_online_cpus(self) -> int: ...

    @property
    def allowed_cpus(self) -> list[int]: ...

    @property
    def cores(self) -> list[list[int]]:
        """Allowed CPUs grouped by physical core."""

    @property
    def numa_nodes(self) -> list[NumaNode]: ...

    @property
    def num_packages(self) -> int:
        """Sockets with an allowed CPU."""

    @property
    def caches(self) -> CacheSizes: ...

    @property
    def hugepages(self) -> HugepageState: ...

    @property
    def memory_total_bytes(self) -> int: ...

    @property
    def memory_available_bytes(self) -> int: ...

    @property
    def limits(self) -> CgroupLimits: ...

class ThreadAdvice:
    """A number of compute threads and why."""

    @property
    def threads(self) -> int: ...

    @property
    def reason(self) -> str: ...

def read_topology(root: str = '') -> Topology:
    """
    Read /proc and /sys below `root` (empty = this machine). Never fails: what is missing has its plainest value.
    """

def read_free_memory(root: str = '') -> int | None:
    """
    Bytes that this process can have now, by the machine and by its control groups; None if neither says. Reads a dozen small files.
    """

def recommend_threads(topology: Topology) -> ThreadAdvice:
    """
    One thread per allowed physical core, at most the whole CPUs of the quota, at least 1.
    """

class WakeupTimes:
    """Medians of an empty job on all threads, from call to return."""

    @property
    def pool_ns(self) -> int: ...

    @property
    def condvar_ns(self) -> int:
        """The same by std::thread and CondVar, in alternating bursts."""

    @property
    def ratio(self) -> float:
        """Median of condvar / pool; above 1, ours is faster."""

class ThreadPool:
    """
    The compute threads of a process; kernels run on them.

    Any Python thread may call; calls run one after the other and release the GIL. In a forked child every call raises ConflictError.
    """

    def __init__(self, threads: int | None = None, *, pin: bool = False, oversubscribe: bool = False, spin_us: int = 30) -> None:
        """
        Start the threads.

        Args:
            threads: the calling thread included; None = `recommend_threads`. More than the
                allowed CPUs are clamped to them with a RuntimeWarning.
            pin: tie each worker to one CPU.
            oversubscribe: keep more threads than CPUs (they never poll).
            spin_us: the longest that an idle worker polls before it sleeps.
        Raises: ConfigError (range); CapacityError (the kernel refused a thread).
        """

    @property
    def num_threads(self) -> int: ...

    @property
    def threads_per_node(self) -> list[int]:
        """Threads of each sub-pool, one sub-pool per NUMA node."""

    @property
    def node_ids(self) -> list[int]:
        """NUMA node of each sub-pool."""

    @property
    def spin_us(self) -> int:
        """0 where polling is off."""

    def run_noop(self, num_tasks: int, chunk: int = 1) -> int:
        """
        Run empty tasks; returns how many ran. For measuring the cost of a task.
        """

    def trace_fixed(self, num_tasks: int) -> list[int]:
        """The thread that runs each task under the fixed schedule."""

    def parallel_sum(self, values: Annotated[NDArray, dict(writable=False)]) -> float:
        """
        Sum of a contiguous float32 vector in float64; bitwise independent of the threads.

        Raises: ShapeError (dtype, device, dimensions, stride).
        """

    def benchmark_wakeup(self, rounds: int = 1000, gap_us: int = 0) -> WakeupTimes:
        """Time the start and end of a job, with `gap_us` of rest before each."""

class PageKind(enum.Enum):
    """What a buffer stands on, best first."""

    HUGETLB = 0
    """Preallocated 2 MiB pages."""

    TRANSPARENT = 1
    """2 MiB pages requested; the kernel grants them as it can."""

    BASE = 2
    """Ordinary pages."""

class AlignedBuffer:
    """Zeroed, page-aligned memory; freed with the last array that views it."""

    def __init__(self, size_bytes: int, *, hugepages: bool = False, numa_node: int | None = None) -> None:
        """
        Allocate.

        Args:
            size_bytes: at least 1.
            hugepages: try preallocated huge pages, then transparent, then ordinary ones.
            numa_node: the node to prefer.
        Raises: ConfigError (size below 1); CapacityError (too large); NotFoundError (node).
        """

    @property
    def size_bytes(self) -> int: ...

    @property
    def capacity_bytes(self) -> int:
        """Whole pages taken from the machine."""

    @property
    def page_kind(self) -> PageKind: ...

    @property
    def reserved_bytes(self) -> int:
        """Bytes from the start whose pages are taken, so that no touch can fail."""

    def reserve(self, end_bytes: int) -> None:
        """
        Take the pages of the first `end_bytes` now; what was taken stays.

        One thread at a time. Raises: ConfigError (beyond the size); CapacityError (refused).
        """

    def array(self) -> numpy.typing.NDArray[numpy.uint8]:
        """A writable view of the bytes, no copy; keeps the memory alive."""

class ProbeResult:
    """Whether a service of the kernel is usable."""

    @property
    def is_available(self) -> bool: ...

    @property
    def detail(self) -> str:
        """What was found, or why it is not usable."""

class CudaDevice:
    """A device that the CUDA driver offers."""

    @property
    def name(self) -> str: ...

    @property
    def compute_major(self) -> int: ...

    @property
    def compute_minor(self) -> int: ...

    @property
    def memory_bytes(self) -> int: ...

class CudaProbe:
    """What the CUDA driver says."""

    @property
    def is_available(self) -> bool: ...

    @property
    def detail(self) -> str: ...

    @property
    def devices(self) -> list[CudaDevice]: ...

def probe_io_uring() -> ProbeResult:
    """Set up a ring and close it."""

def probe_cma() -> ProbeResult:
    """Read own memory by process_vm_readv."""

def probe_cuda() -> CudaProbe:
    """
    Ask the CUDA driver, loaded at run time. A process that forks afterwards cannot use CUDA in the child.
    """

class DirectReader:
    """
    Reads ranges of files past the page cache, many at a time, into memory of its own.

    The place of a read must not be reused before the read is over, even if its caller gave up.
    Thread-safe; calls that wait release the GIL.
    """

    def __init__(self, memory_bytes: int, *, depth: int = 16, part_bytes: int = 524288, backend: str = 'auto') -> None:
        """
        Reserve the memory; pages are taken as reads write to them.

        Args:
            memory_bytes: of all places together.
            depth: operations that the kernel has at a time.
            part_bytes: of one operation, a multiple of ALIGNMENT.
            backend: `auto`, `io_uring` or `threads`.

        Raises: ConfigError; CapacityError (memory, threads); UnsupportedError (io_uring).
        """

    ALIGNMENT: Final[int] = ...
    """Places, and the ranges that are read, are whole multiples of it."""

    @staticmethod
    def count_span(offset: int, length: int) -> int:
        """
        Bytes of the place that a read of a range needs; its first byte comes to
        offset % ALIGNMENT of it.
        """

    def add_file(self, path: str, may_change: bool = False) -> int:
        """
        Open a file and return its number.

        Args:
            path: of the file, whose length stays.
            may_change: True if its contents may be written while it is read, by an owner who
                does not read a range while it writes it.

        Raises: NotFoundError; PermissionDeniedError; CapacityError; ConfigError (no regular
            file, no bytes).
        """

    def begin(self, file: int, offset: int, length: int, at: int) -> int:
        """
        Begin to read a range to the place `at`, an aligned offset of the memory; return the
        read's number.

        Raises: NotFoundError (file); ConfigError (beyond the file or the memory, not aligned).
        """

    def is_done(self, read: int) -> bool:
        """Return True if `finish` would not wait; hands over what was begun."""

    def finish(self, read: int, timeout_ms: int) -> None:
        """
        Wait for a read; its number is then unknown.

        Raises: CorruptionError (the file ends too soon, or was written since it was added,
            unless it may change); InternalError (the disk fails); NotFoundError (no such read);
            DeadlineError (the read goes on, and can be waited for again).
        """

    def direct_refusal(self, file: int) -> str:
        """
        Return why a file is read through the page cache; empty where it is not.
        """

    @property
    def backend(self) -> str: ...

    @property
    def bytes_read(self) -> int:
        """Bytes that all reads so far brought."""

    def array(self) -> numpy.typing.NDArray[numpy.uint8]:
        """The memory, no copy; keeps it alive."""

class FenceLedger:
    """
    Connections that were given up with WRITEs unconfirmed, by epoch.

    Thread-safe. Every carrier of slices sends what `take_due` gives ahead
    of them; copies wait while it says that a debt is left.
    """

    def __init__(self) -> None: ...

    def next_carrier(self) -> int: ...

    def add(self, epoch: int, session: bytes, connection: int, *, may_write: bool = True) -> None:
        """Raises: ConfigError (a session has 16 bytes)."""

    def take_due(self, epoch: int, carrier: int) -> tuple[bool, list[tuple[bytes, int]]]:
        """
        Return whether copies must wait, and what this carrier has not sent yet.
        """

    def settle(self, epoch: int, debts: Sequence[tuple[bytes, int]]) -> None:
        """The peer has closed these connections."""

    def owes(self, epoch: int) -> bool:
        """Whether copies to this peer must wait."""

    def __len__(self) -> int: ...

class RailState(enum.Enum):
    """Whether a rail may carry slices."""

    HEALTHY = 0

    PAUSED = 1
    """Errors or slow slices; a probe will decide."""

    CLOSED = 2
    """No connection; one will be tried."""

    TERMINATED = 3
    """For good: the peer is gone or refused us."""

class SliceChoice:
    """The next slice: its rail, length and ticket."""

    @property
    def ticket(self) -> int: ...

    @property
    def rail(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...

class RailSet:
    """
    The slice-spraying decider: pure, time is an argument (nanoseconds).

    Not thread-safe. Tickets end in exactly one of complete, fail, forget or
    on_disconnect; an unknown ticket is an error of the caller.
    """

    def __init__(self, *, min_slice_bytes: int = 65536, max_slice_bytes: int = 4194304, slice_ns: int = 1000000, window_ns: int = 4000000, stall_floor_ns: int = 200000000) -> None:
        """Raises: ConfigError (range)."""

    def add_rail(self, bandwidth_bytes_per_s: float, penalty: float = 1.0) -> int:
        """Add a rail, closed until on_connect; returns its index."""

    def choose(self, now_ns: int, remaining: int, total: int, location: int = 0) -> SliceChoice | None:
        """Give the next slice of a transfer to a rail, or None: wait."""

    def set_penalty(self, rail: int, location: int, penalty: float) -> None:
        """P of the prediction for memory there."""

    def hold(self, rail: int, until_ns: int) -> None:
        """No slice for this rail before then."""

    def use_round_robin(self) -> None:
        """A baseline: rails in turn."""

    def complete(self, ticket: int, now_ns: int) -> None: ...

    def fail(self, ticket: int, now_ns: int) -> None: ...

    def forget(self, ticket: int) -> None:
        """The slice was cancelled: learn nothing."""

    def on_progress(self, rail: int, now_ns: int) -> None: ...

    def is_look_due(self, rail: int, now_ns: int) -> bool: ...

    def on_look(self, rail: int, now_ns: int, owes: bool, heard_ns: int) -> None:
        """Whether its host owes acknowledgements, and when it was last heard of."""

    def is_connect_due(self, rail: int, now_ns: int) -> bool: ...

    def begin_connect(self, rail: int) -> None: ...

    def on_connect(self, rail: int, now_ns: int, answer_ns: int = 0) -> None:
        """`answer_ns`: how long the other host took to answer the attempt."""

    def patience_ns(self, rail: int) -> int:
        """How long an attempt to connect may stay without that answer."""

    def on_disconnect(self, rail: int, now_ns: int) -> list[int]:
        """Returns the tickets it held."""

    def terminate(self, rail: int) -> None: ...

    def is_stalled(self, rail: int, now_ns: int) -> bool: ...

    def state(self, rail: int) -> RailState: ...

    def in_flight_bytes(self, rail: int) -> int: ...

    def effective_bandwidth(self, rail: int) -> float:
        """Learnt, bytes per second."""

    def next_event_ns(self, has_waiting: bool = True) -> int: ...

def split_capacity(capacity: float, claims: Sequence[tuple[float, float]]) -> list[float]:
    """Weighted max-min shares of (weight, demand) claims."""

class HostMemory:
    """The bytes of an array, tensor or buffer; keeps the object alive."""

    def __init__(self, object: object) -> None:
        """
        Raises: UnsupportedError (no host memory); ShapeError (not contiguous).
        """

    @property
    def size_bytes(self) -> int: ...

    @property
    def is_readonly(self) -> bool: ...

    @property
    def address(self) -> int: ...

    def array(self) -> numpy.typing.NDArray[numpy.uint8]:
        """A view of the bytes, no copy; keeps the object alive."""

class SharedArray:
    """
    Zeroed memory that processes of the same user on this host can map.

    Freed with the last array that views it, here and there.
    """

    def __init__(self, size_bytes: int, reserved_bytes: int | None = None) -> None:
        """
        Allocate.

        Args:
            size_bytes: at least 1.
            reserved_bytes: of these, from the start, that may be touched until `reserve` is
                called; a touch beyond ends the process. None = all.
        Raises: ConfigError (size below 1); CapacityError (too large).
        """

    @property
    def size_bytes(self) -> int: ...

    @property
    def reserved_bytes(self) -> int: ...

    def reserve(self, end_bytes: int) -> None:
        """
        Reserve the first `end_bytes`; what was reserved stays so. Any thread.

        Raises: ConfigError (beyond the size); CapacityError (refused).
        """

    def array(self) -> numpy.typing.NDArray[numpy.uint8]:
        """A writable view of the bytes, no copy; keeps the memory alive."""

class CoreOptions:
    """Settings of an engine; see TransferConfig."""

    def __init__(self) -> None: ...

    @property
    def name(self) -> str: ...

    @name.setter
    def name(self, arg: str, /) -> None: ...

    @property
    def secret(self) -> bytes: ...

    @secret.setter
    def secret(self, arg: bytes, /) -> None: ...

    @property
    def listen(self) -> list[str]: ...

    @listen.setter
    def listen(self, arg: Sequence[str], /) -> None: ...

    @property
    def advertise(self) -> list[str]: ...

    @advertise.setter
    def advertise(self, arg: Sequence[str], /) -> None: ...

    @property
    def local_addresses(self) -> list[str]: ...

    @local_addresses.setter
    def local_addresses(self, arg: Sequence[str], /) -> None: ...

    @property
    def bandwidths_bytes_per_s(self) -> list[float]: ...

    @bandwidths_bytes_per_s.setter
    def bandwidths_bytes_per_s(self, arg: Sequence[float], /) -> None: ...

    @property
    def lanes(self) -> int: ...

    @lanes.setter
    def lanes(self, arg: int, /) -> None: ...

    @property
    def transports(self) -> list[str]: ...

    @transports.setter
    def transports(self, arg: Sequence[str], /) -> None: ...

    @property
    def io_threads(self) -> int: ...

    @io_threads.setter
    def io_threads(self, arg: int, /) -> None: ...

    @property
    def copy_threads(self) -> int: ...

    @copy_threads.setter
    def copy_threads(self, arg: int, /) -> None: ...

    @property
    def spin_us(self) -> int: ...

    @spin_us.setter
    def spin_us(self, arg: int, /) -> None: ...

    @property
    def lease_ms(self) -> int: ...

    @lease_ms.setter
    def lease_ms(self, arg: int, /) -> None: ...

    @property
    def handshake_timeout_ms(self) -> int: ...

    @handshake_timeout_ms.setter
    def handshake_timeout_ms(self, arg: int, /) -> None: ...

    @property
    def stall_ms(self) -> int: ...

    @stall_ms.setter
    def stall_ms(self, arg: int, /) -> None: ...

    @property
    def min_slice_bytes(self) -> int: ...

    @min_slice_bytes.setter
    def min_slice_bytes(self, arg: int, /) -> None: ...

    @property
    def max_slice_bytes(self) -> int: ...

    @max_slice_bytes.setter
    def max_slice_bytes(self, arg: int, /) -> None: ...

    @property
    def max_connections(self) -> int: ...

    @max_connections.setter
    def max_connections(self, arg: int, /) -> None: ...

    @property
    def max_notifications(self) -> int: ...

    @max_notifications.setter
    def max_notifications(self, arg: int, /) -> None: ...

    @property
    def socket_buffer_bytes(self) -> int: ...

    @socket_buffer_bytes.setter
    def socket_buffer_bytes(self, arg: int, /) -> None: ...

    @property
    def checksum(self) -> bool: ...

    @checksum.setter
    def checksum(self, arg: bool, /) -> None: ...

    @property
    def tags(self) -> str: ...

    @tags.setter
    def tags(self, arg: str, /) -> None: ...

    @property
    def file_backend(self) -> str: ...

    @file_backend.setter
    def file_backend(self, arg: str, /) -> None: ...

    @property
    def penalties(self) -> dict[str, list[float]]: ...

    @penalties.setter
    def penalties(self, arg: Mapping[str, Sequence[float]], /) -> None: ...

    @property
    def quota_boards(self) -> list[str]: ...

    @quota_boards.setter
    def quota_boards(self, arg: Sequence[str], /) -> None: ...

    @property
    def quota_weight(self) -> float: ...

    @quota_weight.setter
    def quota_weight(self, arg: float, /) -> None: ...

class RemoteBufferInfo:
    """A buffer that a segment offers."""

    @property
    def offset(self) -> int: ...

    @property
    def length(self) -> int: ...

    @property
    def can_read(self) -> bool: ...

    @property
    def can_write(self) -> bool: ...

    @property
    def is_shared(self) -> bool: ...

    @property
    def name(self) -> str: ...

    @property
    def location(self) -> str: ...

class SegmentDescription:
    """What a segment says of itself."""

    @property
    def name(self) -> str: ...

    @property
    def addresses(self) -> list[str]: ...

    @property
    def buffers(self) -> list[RemoteBufferInfo]: ...

class RailStatus:
    """A rail to a segment, as it is now."""

    @property
    def local(self) -> str: ...

    @property
    def remote(self) -> str: ...

    @property
    def state(self) -> RailState: ...

    @property
    def bytes_moved(self) -> int: ...

    @property
    def num_resent(self) -> int:
        """Slices it had that went elsewhere."""

    @property
    def in_flight_bytes(self) -> int: ...

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Learnt."""

    @property
    def tags(self) -> str:
        """Kind of the tags of its connection, gmac or hmac; empty: it has none."""

    @property
    def predicted_s(self) -> float:
        """Until what it has now would be moved."""

    @property
    def latency_sum_s(self) -> float: ...

    @property
    def latency_buckets(self) -> list[tuple[float, int]]:
        """
        Slices by latency: (upper bound in seconds, count), rising, no empty ones.
        """

class FileInfo:
    """A file that is open as a segment."""

    @property
    def path(self) -> str: ...

    @property
    def length(self) -> int: ...

    @property
    def is_direct(self) -> bool: ...

    @property
    def direct_refusal(self) -> str: ...

class PreparedTransfers:
    """Requests in native form; see tandem.transfer.PreparedBatch."""

    def __len__(self) -> int: ...

class BatchCounters:
    """Batches of an engine since it was made."""

    @property
    def num_running(self) -> int: ...

    @property
    def num_done(self) -> int: ...

    @property
    def num_failed(self) -> dict[str, int]:
        """By error code."""

    @property
    def latency_sum_s(self) -> float: ...

    @property
    def latency_buckets(self) -> list[tuple[float, int]]: ...

class CoreBatch:
    """A submitted batch; see tandem.transfer.Batch."""

    @property
    def is_finished(self) -> bool: ...

    def wait(self, deadline_s: float | None) -> None: ...

    def check(self) -> None:
        """Raise what a finished batch ended with, if it failed."""

    def cancel(self) -> None: ...

    def bytes_done(self, index: int) -> int: ...

    def completion_fd(self) -> int: ...

class CallInbox:
    """Where calls that have ended are collected."""

    def __init__(self) -> None: ...

    def fileno(self) -> int:
        """Readable while something is in it."""

    def take(self) -> list[int]:
        """The tags of the calls that have ended since the last call."""

class CoreCall:
    """A call that was begun; see TransferEngine.call_async."""

    def wait(self, deadline_s: float) -> bytes:
        """
        Wait for the answer of one begun without an inbox, without the GIL. Once.
        """

    def take_answer(self) -> bytes:
        """What it ended with, once; raises the error."""

    def abandon(self) -> None:
        """Wait no longer: it was executed once or not at all."""

class CoreIncomingCall:
    """A peer's call; see tandem.transfer.Call."""

    @property
    def peer(self) -> str: ...

    @property
    def payload(self) -> bytes: ...

    def answer(self, answer: bytes | tuple[str, str, str]) -> bool:
        """
        Send bytes, or (code, where, what) of an error; False: answered before, or in vain.
        """

class CallSource:
    """Calls of an engine's peers, for an event loop."""

    def fileno(self) -> int:
        """Readable while there are calls, and once the engine is closed."""

    def take(self) -> list[CoreIncomingCall] | None:
        """The calls that have come. None: the engine is closed."""

def answer_calls(answers: list[tuple[CoreIncomingCall, bytes | tuple[str, str, str]]]) -> None:
    """
    Send bytes, or (code, where, what) of errors; those of a connection in one go.
    """

def poll_sources(sources: Sequence[CallSource], fd: int, limit_s: float) -> bool:
    """
    Poll, without the GIL, for what peers send to these engines, until `fd` is readable,
    for as long as polling pays. True: it is readable.
    """

def has_gmac() -> bool:
    """Whether a libcrypto was found whose GMAC is right."""

def list_interfaces() -> list[tuple[str, str]]:
    """Name and address of each network interface that has one."""

class TransferCore:
    """The native engine; see tandem.transfer."""

    def __init__(self, options: CoreOptions) -> None: ...

    def register_host(self, memory: HostMemory, *, name: str, location: str, remote_read: bool, remote_write: bool, fd: int = -1, file_offset: int = 0) -> int: ...

    def register_shared(self, memory: SharedArray, *, name: str, location: str, remote_read: bool, remote_write: bool) -> int: ...

    def unregister(self, base: int, deadline_s: float) -> None: ...

    def open(self, address: str, deadline_s: float) -> int: ...

    def close_segment(self, segment: int) -> None: ...

    def describe(self, segment: int, deadline_s: float) -> SegmentDescription: ...

    def rails(self, segment: int) -> list[RailStatus]: ...

    def refusals(self, segment: int) -> dict[str, str]: ...

    def segment_epoch(self, segment: int) -> int: ...

    def submit(self, requests: Sequence[tuple[int, int, int, int, int, int]], deadline_s: float, transport: str | None) -> CoreBatch: ...

    def prepare(self, requests: Sequence[tuple[int, int, int, int, int, int]], transport: str | None) -> PreparedTransfers: ...

    def submit_prepared(self, prepared: PreparedTransfers, deadline_s: float) -> CoreBatch: ...

    def open_file(self, path: str, *, writable: bool, create_bytes: int, direct: bool) -> int: ...

    def sync_file(self, segment: int) -> None: ...

    def file_info(self, segment: int) -> FileInfo: ...

    @property
    def file_backend(self) -> tuple[str, str]:
        """(io_uring or threads, why not io_uring); empty before the first file."""

    def counters(self, segment: int | None) -> dict[tuple[str, str, str], int]:
        """What moved to a segment, or (None) inside this process and to files."""

    @property
    def quota_rates(self) -> list[float]:
        """Bytes per second that each NIC gives us now; infinity: not held."""

    @property
    def num_refused_records(self) -> int:
        """Of peers' records: altered on the way. Each ended its connection."""

    @property
    def batch_counters(self) -> BatchCounters: ...

    def set_faults(self, transport: str, *, seed: int, drop: float, corrupt: float, duplicate: float, reorder: float, delay: float, delay_s: float, is_dead: bool) -> None: ...

    def clear_faults(self, transport: str) -> int:
        """Return how many chunks went wrong since set_faults."""

    def use_round_robin(self, segment: int) -> None:
        """Give slices to rails in turn, whatever their speed: a baseline."""

    def call(self, segment: int, payload: bytes, deadline_s: float) -> bytes: ...

    def begin_call(self, segment: int, payload: bytes, inbox: CallInbox | None = None, tag: int = 0) -> CoreCall: ...

    def serve_calls(self) -> None: ...

    def serve_calls_on_fd(self) -> CallSource:
        """As serve_calls, for an event loop."""

    def wait_calls(self) -> list[CoreIncomingCall] | None:
        """Wait for calls of peers, without the GIL. None: the engine is closed."""

    def notify(self, segment: int, name: str, payload: bytes, deadline_s: float) -> None: ...

    def notifications(self, deadline_s: float) -> list[tuple[str, str, bytes]]: ...

    def close(self, deadline_s: float) -> None: ...

    @property
    def addresses(self) -> list[str]: ...

    @property
    def epoch(self) -> int: ...

    @property
    def is_forked(self) -> bool: ...

    def bytes_copied(self, transport: str) -> int: ...

def cap_isa(isa: str) -> None:
    """
    Use no kernels, and report no CPU features, above an instruction set; before the first use.

    Args:
        isa: `plain`, `avx2`, `avx512_bw`, `avx512_vnni`, `avx512_bf16` or `amx`.

    Raises: ConfigError (unknown); UnsupportedError (neither of this machine nor of this build);
        ConflictError (features were read under another cap).
    """

def kernel_isas() -> list[str]:
    """
    Variants of the kernels that this machine can run, ascending; the last is the default,
    or the one before `amx`, which has to be named.
    """

def count_expert_bytes(*, bits: int, group_size: int, has_minimum: bool, num_experts: int, hidden_size: int, intermediate_size: int, is_float: bool = False, scale_bits: int = 0, table: int = 0, has_zeros: bool = False, down_format: tuple[int, int, bool, bool, int, int, bool] | None = None) -> int:
    """
    Bytes that an `ExpertBank` of these sizes takes.

    Raises: as `ExpertBank`.
    """

class ExpertBank:
    """
    Packed gated experts of one layer; `tandem.kernels.cpu.experts` is their face.

    Calls release the GIL.
    """

    def __init__(self, *, bits: int, group_size: int, has_minimum: bool, num_experts: int, hidden_size: int, intermediate_size: int, isa: str = '', storage: object | None = None, is_float: bool = False, scale_bits: int = 0, table: int = 0, has_zeros: bool = False, activation: str = 'silu', alpha: float = 1.0, limit: float = float('inf'), up_offset: float = 0.0, has_bias: bool = False, num_parts: int = 1, part_nodes: Sequence[int] = [], down_format: tuple[int, int, bool, bool, int, int, bool] | None = None, is_apart: bool = False) -> None:
        """
        Reserve the memory, where weights are zero until packed, or take `storage`: uint8,
        `count_expert_bytes` of them, 64-byte aligned; read-only ones cannot be packed.
        `part_nodes` are the NUMA nodes that the parts' own memory should lie on.
        `down_format` has the fields of another integer format for the down projections.
        `is_apart`: no memory; `forward_apart` is told where weights are.

        Raises: UnsupportedError (format, ISA, storage for several parts); ShapeError (not
            whole groups); ConfigError (unknown ISA or activation, a size below 1, more parts
            than column blocks, nodes for another number of parts); CapacityError (memory);
            NotFoundError (no such node for this process).
        """

    @property
    def isa(self) -> str: ...

    @property
    def expert_bytes(self) -> int:
        """Packed bytes of one expert, scales included."""

    def pack_codes(self, pool: ThreadPool, expert_id: int, gate: tuple[object, object, object | None], up: tuple[object, object, object | None], down: tuple[object, object, object | None]) -> None:
        """
        Lay out the codes of one expert: of each matrix codes, scales and minima; see
        `tandem.kernels.weights.formats.QuantizedMatrix`.

        Raises: ShapeError; NotFoundError (expert); ConflictError (read-only storage);
            UnsupportedError (what is no code of the format, or a scale that is not finite).
        """

    def pack_blocks(self, pool: ThreadPool, expert_id: int, gate: tuple[list[tuple[str, object]], object | None], up: tuple[list[tuple[str, object]], object | None], down: tuple[list[tuple[str, object]], object | None]) -> None:
        """
        Lay out one expert that is blocks; see `tandem.kernels.weights.blocks.BlockMatrix`.

        Raises: ShapeError; NotFoundError (expert); ConflictError (read-only storage);
            UnsupportedError (a kind that the format does not hold, or a scale that is not
            finite in it).
        """

    def pack(self, pool: ThreadPool, expert_id: int, gate: object, up: object, down: object) -> None:
        """
        Code one expert: gate and up [intermediate, hidden], down [hidden, intermediate].

        Raises: ShapeError; NotFoundError (expert); ConflictError (read-only storage);
            UnsupportedError (weights that the format cannot hold).
        """

    @property
    def num_parts(self) -> int:
        """Shares of the intermediate dimension."""

    @property
    def inner_columns(self) -> int:
        """Columns of gate and up in whole blocks."""

    @property
    def is_bound(self) -> bool:
        """Whether the kernel granted every part the node that was asked for."""

    def find_part_nodes(self) -> list[int]:
        """
        The NUMA node of each part's first page, once it is packed.

        Raises: UnsupportedError (the kernel does not say).
        """

    def load(self, pool: ThreadPool, packed: object) -> None:
        """
        Copy what a bank of one part packed, uint8, into these parts.

        Raises: ShapeError (size); ConflictError (read-only storage).
        """

    def set_bias(self, expert_id: int, gate: object, up: object, down: object) -> None:
        """
        Copy the biases of one expert, float32 vectors.

        Raises: ShapeError; NotFoundError (expert); ConflictError (made without biases).
        """

    @overload
    def forward(self, pool: ThreadPool, x: TensorView, expert_ids: TensorView, weights: TensorView, out: TensorView) -> None:
        """As below, with tensors that were viewed before; ids are int64."""

    @overload
    def forward(self, pool: ThreadPool, x: object, expert_ids: object, weights: object, out: object, delta: object = None, kept: object = None) -> None:
        """
        Write each token's weighted sum over its experts to `out`, float32 [tokens, hidden].

        `delta`, float32 [pairs, 2 * inner_columns], is added to gate and up of each token and
        expert, sorted by expert; `kept`, bfloat16, takes what their activation sees.

        Raises: ShapeError (array or expert id; `out` is then untouched).
        """

    def forward_apart(self, pool: ThreadPool, x: TensorView, expert_ids: TensorView, weights: TensorView, out: TensorView, memory: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], places: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], first_expert: int, end_expert: int, is_added: bool) -> None:
        """
        As `forward` with views, of a bank that is apart.

        Args:
            pool, x, expert_ids, weights, out: as of `forward`.
            memory: holds packed experts.
            places: of each expert, its offset in the memory, or -1.
            first_expert: ids below add nothing.
            end_expert: ids from here on add nothing.
            is_added: add to `out`; over ascending ranges the sum is bitwise that of one call.

        Raises: ShapeError (array, expert id or place); ConflictError (an expert without a
            place). `out` is then untouched.
        """

    def backward(self, pool: ThreadPool, x: object, expert_ids: object, weights: object, d_out: object, d_x: object, d_weights: object, kept: object = None, delta: object = None, extra: object = None, d_gate_up: object = None) -> None:
        """
        Write the gradients with respect to `x` and `weights`, float32.

        `kept` and `delta` are as of `forward`; without `kept`, gate and up are computed again
        from `x`. `extra`, float32 [pairs, inner_columns], is added to the weighted gradient of
        the intermediate; `d_gate_up`, bfloat16 [pairs, 2 * inner_columns], takes those of gate
        and up.

        Raises: ShapeError (array or expert id; outputs are then untouched).
        """

    def read_weights(self, pool: ThreadPool, num_experts: int) -> None:
        """
        Read the packed bytes of the first experts: a ceiling for benchmarks.

        Raises: NotFoundError (more than there are).
        """

    def multiply_registers(self, pool: ThreadPool, num_macs: int) -> None:
        """
        Perform as many multiply-adds as the format's unit can: a ceiling for benchmarks.
        """

    def array(self) -> numpy.typing.NDArray[numpy.uint8]:
        """
        The packed bytes of each expert, no copy; keeps the memory alive.

        Raises: UnsupportedError (several parts).
        """

def count_linear_bytes(*, bits: int, group_size: int, has_minimum: bool, is_float: bool, scale_bits: int = 0, table: int = 0, has_zeros: bool = False, in_features: int, out_features: int) -> int:
    """
    Bytes that a `PackedMatrix` of these sizes takes.

    Raises: as `PackedMatrix`.
    """

def decode_blocks(pool: ThreadPool | None, blocks: tuple[list[tuple[str, object]], object | None], out: object) -> None:
    """
    Write the values of blocks to `out`, float32 or bfloat16 [rows, inputs], contiguous.
    Products are in float32, as llama.cpp has them, rounded once. Without a pool in this
    thread.

    Raises: ShapeError; UnsupportedError (a kind that is not known).
    """

def list_codebook(kind: str) -> bytes:
    """
    Magnitudes plus 128, a byte each, of the entries of a type's codebook; empty without one.

    Raises: UnsupportedError (a kind that is not known).
    """

class PackedMatrix:
    """
    One matrix with packed weights; `tandem.kernels.cpu.linear` is its face.

    Calls release the GIL.
    """

    def __init__(self, *, bits: int, group_size: int, has_minimum: bool, is_float: bool, scale_bits: int = 0, table: int = 0, has_zeros: bool = False, in_features: int, out_features: int, isa: str = '', storage: object | None = None, share_nodes: Sequence[int] = []) -> None:
        """
        Reserve the memory, where weights are zero until packed, or take `storage`: uint8,
        `count_linear_bytes` of them, 64-byte aligned; read-only ones cannot be packed.
        `share_nodes` are the NUMA nodes that equal shares of the outputs should lie on.

        Raises: UnsupportedError (format, ISA); ShapeError (not whole groups); ConfigError
            (unknown ISA, a size below 1, nodes for storage); CapacityError (memory);
            NotFoundError (node).
        """

    @property
    def is_bound(self) -> bool:
        """Whether the kernel granted every share its NUMA node."""

    def find_share_nodes(self) -> list[int]:
        """
        NUMA node of a page of each share, once weights are packed.

        Raises: UnsupportedError (the kernel does not say).
        """

    @property
    def isa(self) -> str: ...

    @property
    def size_bytes(self) -> int:
        """Packed bytes, scales included."""

    def pack_codes(self, pool: ThreadPool, codes: object, scales: object, minima: object | None) -> None:
        """
        Lay out the codes of all rows; see `tandem.kernels.weights.formats.QuantizedMatrix`.

        Raises: ShapeError; ConflictError (read-only storage); UnsupportedError (what is no
            code of the format, or a scale that is not finite).
        """

    def pack_blocks(self, pool: ThreadPool, blocks: tuple[list[tuple[str, object]], object | None]) -> None:
        """
        Lay out the blocks of all rows; see `tandem.kernels.weights.blocks.BlockMatrix`.

        Raises: ShapeError; ConflictError (read-only storage); UnsupportedError (a kind that the
            format does not hold, or a scale that is not finite in it).
        """

    def pack(self, pool: ThreadPool, weights: object, first_row: int = 0) -> None:
        """
        Code rows of the matrix from `first_row` on, whole blocks of 128 or up to the last.

        Raises: ShapeError; ConflictError (read-only storage); UnsupportedError (weights that
            the format cannot hold).
        """

    def set_bias(self, bias: object) -> None:
        """
        Copy the bias, a float32 vector.

        Raises: ShapeError.
        """

    @overload
    def forward(self, pool: ThreadPool, x: TensorView, out: TensorView, is_added: bool = False, first_column: int | None = None) -> None:
        """
        As below, with tensors that were viewed before; leading dimensions count as one row.
        """

    @overload
    def forward(self, pool: ThreadPool, x: object, out: object, is_added: bool = False, first_column: int | None = None) -> None:
        """
        Write x W^T + bias to `out`, or add it to what `out` holds.
        With `first_column` to the columns of a wider `out` from there on.

        Raises: ShapeError (`out` is then untouched).
        """

    def backward(self, pool: ThreadPool, d_out: object, d_x: object, is_added: bool = False) -> None:
        """
        Write d_out W, the gradient with respect to x, to `d_x`, float32, or add it.

        Raises: ShapeError (`d_x` is then untouched).
        """

    def forward_heads(self, pool: ThreadPool, x: TensorView, out: TensorView) -> None:
        """
        out[t, h] = x[t, h] W_h^T, where W_h is the h-th of equal shares of the outputs.

        Args:
            pool: threads.
            x: [rows, heads, in_features]; any strides of rows and heads.
            out: [rows, heads, columns], written; a share is `columns` in whole panels of 64.
        The matrix has no bias. Raises: ShapeError (`out` is then untouched).
        """

    def unpack(self, pool: ThreadPool, out: object) -> None:
        """
        Write the weights as numbers to `out`, float32 [out_features, in_features].

        Raises: ShapeError.
        """

    def take_rows(self, pool: ThreadPool, outputs: object, out: object) -> None:
        """
        Write the weights of `outputs`, int64, as numbers to `out`, float32 or bfloat16
        [outputs, inputs].

        Raises: ShapeError (also for an output that is not there).
        """

    def read_weights(self, pool: ThreadPool) -> None:
        """Read the packed bytes: a ceiling for benchmarks."""

    def multiply_registers(self, pool: ThreadPool, num_macs: int) -> None:
        """
        Perform as many multiply-adds as the format's unit can: a ceiling for benchmarks.
        """

    def array(self) -> numpy.typing.NDArray[numpy.uint8]:
        """The packed bytes, no copy; keeps the memory alive."""

class KvPool:
    """Blocks of keys and values that attention reads in place."""

    @staticmethod
    def grouped(tensor: TensorView) -> KvPool:
        """
        Of [blocks, layers, 2, kv_heads, block_size, head_dim], float32 or bfloat16.

        Raises: ShapeError.
        """

    @staticmethod
    def coded(tensor: TensorView, format: str, num_kv_heads: int, block_size: int, head_dim: int) -> KvPool:
        """
        Of uint8 [blocks, layers, bytes]: in each layer codes [2, kv_heads, block_size,
        head_dim], int8 or fp8 (e4m3), then fp16 scales [2, kv_heads, block_size].

        Raises: ShapeError; ConfigError (format).
        """

    @staticmethod
    def coded_latent(tensor: TensorView, format: str, block_size: int, key_dim: int, value_dim: int) -> KvPool:
        """
        Of uint8 [blocks, layers, bytes]: in each layer codes [block_size, key_dim], int8
        or fp8 (e4m3), then fp16 scales [block_size]; values as in `latent`.

        Raises: ShapeError; ConfigError (format).
        """

    @staticmethod
    def latent(tensor: TensorView, value_dim: int) -> KvPool:
        """
        Of [blocks, layers, block_size, key_dim], float32 or bfloat16 (MLA): all heads
        share a key, whose first `value_dim` items are the value. Raises: ShapeError.
        """

    @staticmethod
    def placed(tensor: TensorView, format: str, block_size: int, key_dim: int, value_dim: int, layer_offsets: Sequence[int]) -> KvPool:
        """
        Of [blocks, items], float32 or bfloat16, or uint8 [blocks, bytes] of codes.

        At each of `layer_offsets`, in bytes, a block has rows [block_size, key_dim] of
        one layer and, of codes, fp16 scales [block_size]; values as in `latent`.

        Args:
            tensor: the blocks; held.
            format: int8 or fp8 (e4m3); empty: the items are no codes.
            block_size: tokens of a block.
            key_dim: items of a token.
            value_dim: how many of them, from the first, are the value.
            layer_offsets: one for each layer.
        Raises: ShapeError; ConfigError (format).
        """

    def read(self, layer_idx: int, pool: ThreadPool | None = None) -> None:
        """
        Read a layer of all blocks and do nothing: a ceiling for benchmarks.

        Raises: ShapeError.
        """

class PlannedAttention:
    """Attention of one step's tokens, planned once for all layers."""

    def __init__(self, kv: KvPool, block_table: object, query_start: Sequence[int], context_lens: Sequence[int], pool: ThreadPool | None = None, isa: str = '') -> None:
        """
        Plan a step.

        Args:
            kv: the blocks; held.
            block_table: int64 [sequences, width]; held.
            query_start: sequences + 1 row numbers: whose tokens are which; at least one each.
            context_lens: tokens of each sequence, this step's included.
            pool: threads for steps large enough to share; None runs on the caller's.
            isa: a variant by name; empty is the widest here.
        Raises: ShapeError (shape, type, a block or length out of bounds); ConfigError or
            UnsupportedError (isa).
        """

    def attend(self, layer_idx: int, q: TensorView, out: TensorView, scale: float, window: int = 0, soft_cap: float = 0.0, sinks: TensorView | None = None, chunk: int = 0, chosen: TensorView | None = None) -> None:
        """
        Attend each token to its sequence's context up to itself.

        Args:
            layer_idx: whose keys and values; this step's were stored before.
            q: [tokens, heads, key_dim]; heads beyond those of `out` are not read.
            out: [tokens, heads, value_dim], written.
            scale: on the products.
            window: a token sees itself and window - 1 before it; 0 is all.
            soft_cap: a score becomes cap * tanh(score / cap); 0 is none.
            sinks: float32 [heads], a logit that takes weight and adds nothing.
            chunk: no key before the last multiple of it up to the token is seen; 0 is all.
            chosen: int32 [tokens, n], positions, ascending, of the keys that a token sees;
                None is all. A token before position n sees all in any case.
        A token's result is bitwise the same alone and in company, prefilled whole or in
        chunks or decoded, for any number of threads. Raises: ShapeError.
        """

    def store(self, layer_idx: int, rows: TensorView, first_head: int = 0) -> None:
        """
        Write the step's keys and values to their slots, in the type of the pool.

        `rows` [tokens, heads, key_dim] holds keys of all KV heads from `first_head` on, then
        values (a latent pool has keys only). Raises: ShapeError.
        """

    def choose(self, layer_idx: int, q: TensorView, weights: TensorView, scale: float, chosen: TensorView) -> None:
        """
        Choose the keys of an index that score best with each token, up to its own.

        A score is the sum over heads, in float32, of scale * weight * max(q . key, 0); of
        equal ones the lowest position is chosen.

        Args:
            layer_idx: whose index keys; this step's were stored before.
            q: [tokens, heads, key_dim].
            weights: float32 [tokens, heads].
            scale: on the weights.
            chosen: int32 [tokens, n], written: positions, ascending. A token that sees no
                more than n keys gets all their positions, and then zeros.
        As invariant as `attend`. Raises: ShapeError.
        """

class TensorView:
    """
    A CPU tensor as the row and attention operators take it.

    Converting a tensor costs as much as a small operator, so it is done
    once. The memory is shared and kept alive.
    """

    def __init__(self, tensor: object) -> None:
        """View a tensor of any shape, strides and type. Raises: TypeError."""

def rms_norm(x: TensorView, weight: TensorView, out: TensorView, eps: float, residual: TensorView | None = None, pool: ThreadPool | None = None, isa: str = '', weight_offset: float = 0.0) -> None:
    """
    out = x / sqrt(mean(x^2) + eps) * (weight_offset + weight), per row of [rows, size].

    With `residual`, first `residual += x` in place, and the sum is normed; `x` may then
    have another type. `out` may be `x`. Bitwise the same alone and in company.
    Raises: ShapeError; ConfigError or UnsupportedError (isa).
    """

def rotate_heads(x: TensorView, cos: TensorView, sin: TensorView, num_q_heads: int, num_k_heads: int, q_weight: TensorView | None = None, k_weight: TensorView | None = None, eps: float = 0.0, pool: ThreadPool | None = None, isa: str = '', weight_offset: float = 0.0) -> None:
    """
    Norm and rotate the first heads of `x` [rows, heads, head_dim], in place.

    Query heads come first, then key heads; a weight [head_dim], to which
    `weight_offset` is added, norms them, None does not. `cos` and `sin` [rows, r] rotate the first r items, halves by halves; only
    their first half is read. Raises: ShapeError; ConfigError or UnsupportedError (isa).
    """

def place_latents(q: TensorView, kv: TensorView, weight: TensorView, eps: float, cos: TensorView, sin: TensorView, out: TensorView, pool: ThreadPool | None = None, isa: str = '') -> None:
    """
    Write what multi-head latent attention attends with, but for the absorbed parts.

    Args:
        q: [rows, heads, head_dim]; the last `rotated` items of each head are read.
        kv: [rows, rank + rotated]; rank is the size of `weight`.
        weight: [rank], of the RMSNorm of the latent, with `eps`.
        cos, sin: [rows, rotated]; rotate halves by halves; the first half is read.
        out: [rows, heads + 1, rank + rotated]. Of each query only the rotated end is
            written; behind the queries comes the key: normed latent, rotated end.
    Raises: ShapeError; ConfigError or UnsupportedError (isa).
    """

def gate(gate_up: TensorView, out: TensorView, activation: str = 'silu', row_gate: TensorView | None = None, pool: ThreadPool | None = None, isa: str = '', up: TensorView | None = None) -> None:
    """
    out = f(gate) * up, where `gate_up` [rows, 2 * size] holds the gate first.

    `activation` is silu, gelu (erf), gelu_tanh or sigmoid. `row_gate` [rows, 1] multiplies
    each row by its sigmoid. With `up` [rows, size], which may be `out`, `gate_up` is the
    gate alone, [rows, size]. Raises: ShapeError; ConfigError or UnsupportedError (isa).
    """

def soft_cap(x: TensorView, cap: float, pool: ThreadPool | None = None, isa: str = '') -> None:
    """
    x = cap * tanh(x / cap), in place, on float32 [rows, size].

    Raises: ShapeError; ConfigError (cap, isa); UnsupportedError (isa).
    """

def route(logits: TensorView, weights: TensorView, ids: TensorView, scoring: str, bias: TensorView | None = None, num_groups: int = 1, num_top_groups: int = 1, weight_scale: float = 1.0, pool: ThreadPool | None = None, isa: str = '', num_group_choices: int = 2) -> None:
    """
    Choose each row's top experts, best first; of equals the lower id.

    Args:
        logits: [rows, experts].
        weights: [rows, top_k], written.
        ids: int64 [rows, top_k], written; 0, 1, ... with NaN weights for a row with NaN.
        scoring: softmax or sigmoid, over all experts or, `_normalised`, the chosen.
        bias: float32 [experts] added for the choice, not to the weights.
        num_groups: equal groups of experts, of which only the `num_top_groups` with the
            largest sum of their best choices count.
        weight_scale: on the weights.
        num_group_choices: how many of a group's best are summed, 1 or 2.
    Raises: ShapeError; ConfigError (scoring, isa); UnsupportedError (isa).
    """

class GatedDelta:
    """
    The gated delta rule of a layer, between its projections. Calls that use
    other slots may run meanwhile.
    """

    def __init__(self, conv: TensorView, decay_rate: TensorView, decay_bias: TensorView, norm: TensorView, num_k_heads: int, key_dim: int, norm_eps: float, beta_scale: float = 1.0, gate: str = 'silu') -> None:
        """
        Keep a layer's weights, all float32 and contiguous.

        Args:
            conv: [width, channels] of the short convolution, the oldest input first; channels
                are the queries and keys of all key heads, then the values of all value heads.
            decay_rate: [value heads]: a decay is exp(-rate * softplus(a + bias)).
            decay_bias: [value heads], or [value heads * key_dim]: each item of a key has a decay.
            norm: [value_dim], of the RMSNorm of each head's output, with `norm_eps`.
            num_k_heads: each serves as many consecutive value heads.
            key_dim: of a head.
            beta_scale: beta is this times sigmoid(b).
            gate: of z on the normed output, silu or sigmoid.
        Raises: ShapeError; ConfigError (gate).
        """

    @property
    def state_shape(self) -> list[int]:
        """
        Of a sequence's state: [value heads, panels, key_dim, columns of a panel].
        """

    @property
    def carried_shape(self) -> list[int]:
        """Of a sequence's last inputs: [width - 1, channels]."""

    def run(self, x: TensorView, z: TensorView, a: TensorView, b: TensorView, out: TensorView, states: TensorView, carried: TensorView, query_start: Sequence[int], slots: Sequence[int], pool: ThreadPool | None = None, isa: str = '') -> None:
        """
        Compute the rows of all sequences, and move their slots on.

        A row's result is bitwise the same in any chunk, batch and number of threads.

        Args:
            x: [rows, channels], before the convolution.
            z: [rows, value heads * value_dim], of the type of x.
            a: as `decay_bias` in each row.
            b: [rows, value heads], of the type of a.
            out: of the shape and type of z, written; may be z.
            states: float32 [slots, *state_shape], zero before a sequence's first row.
            carried: [slots, *carried_shape] of the type of x, likewise.
            query_start: the first row of each sequence, and the number of rows.
            slots: of the sequences, no two alike.
        Raises: ShapeError; ConfigError or UnsupportedError (isa); CapacityError.
        """

def scan_delta(queries: TensorView, keys: TensorView, values: TensorView, decay: TensorView, beta: TensorView, state: TensorView, out: TensorView, pool: ThreadPool | None = None, isa: str = '') -> None:
    """
    The recurrence of the gated delta rule alone, over a sequence's tokens; for training.

    All contiguous float32.

    Args:
        queries, keys: [tokens, key heads, key_dim], normed; queries scaled.
        values: [tokens, value heads, value_dim].
        decay: [tokens, value heads], or [tokens, value heads, key_dim].
        beta: [tokens, value heads].
        state: as of `GatedDelta.state_shape`; moved on.
        out: of the shape of `values`, written.
    Raises: ShapeError; ConfigError or UnsupportedError (isa); CapacityError.
    """

def scan_delta_backward(queries: TensorView, keys: TensorView, values: TensorView, decay: TensorView, beta: TensorView, state: TensorView, d_out: TensorView, d_queries: TensorView, d_keys: TensorView, d_values: TensorView, d_decay: TensorView, d_beta: TensorView, pool: ThreadPool | None = None, isa: str = '') -> None:
    """
    The gradients of `scan_delta`; no gradient of the last state comes in.

    Computes the states again, and keeps one in 32 of a head's panel. The same for any
    number of threads.

    Args:
        queries, keys, values, decay, beta: as of `scan_delta`.
        state: that it began with; only read.
        d_out: of the shape of `values`.
        d_queries, d_keys: [tokens, value heads, key_dim], written: each value head's part.
        d_values, d_decay, d_beta: of the shapes of their own, written.
    Raises: ShapeError; ConfigError or UnsupportedError (isa); CapacityError.
    """

class ShortConv:
    """
    The short convolution of a layer, between its projections. Calls that use
    other slots may run meanwhile.
    """

    def __init__(self, conv: TensorView, bias: TensorView | None = None) -> None:
        """
        Keep a layer's weights, all float32 and contiguous.

        Args:
            conv: [width, channels], the oldest product first.
            bias: [channels]; None is none.
        Raises: ShapeError.
        """

    @property
    def carried_shape(self) -> list[int]:
        """Of a sequence's last products: [width - 1, channels]."""

    def run(self, x: TensorView, out: TensorView, carried: TensorView, query_start: Sequence[int], slots: Sequence[int], pool: ThreadPool | None = None, isa: str = '') -> None:
        """
        Compute C * conv(B * x) of the rows of all sequences, and move their slots on.

        A row's result is bitwise the same in any chunk, batch and number of threads.

        Args:
            x: [rows, 3 * channels]: B, C and x.
            out: [rows, channels] of the type of x, written.
            carried: [slots, *carried_shape] of the type of x, zero before a sequence's first row.
            query_start: the first row of each sequence, and the number of rows.
            slots: of the sequences, no two alike.
        Raises: ShapeError; ConfigError or UnsupportedError (isa); CapacityError.
        """

class Mamba2:
    """
    The state space of a layer, between its projections. Calls that use other
    slots may run meanwhile.
    """

    def __init__(self, conv: TensorView, decay_rate: TensorView, dt_bias: TensorView, skip: TensorView, norm: TensorView, num_groups: int, state_dim: int, norm_eps: float, dt_min: float, dt_max: float, conv_bias: TensorView | None = None) -> None:
        """
        Keep a layer's weights, all float32 and contiguous.

        Args:
            conv: [width, channels] of the short convolution, the oldest input first; channels
                are x of all heads, then B and C of all groups.
            decay_rate: [heads]: a decay is exp(-rate * dt).
            dt_bias: [heads]: dt is softplus(dt + bias), at least dt_min and at most dt_max.
            skip: [heads], the factor of x that is added to what is read.
            norm: [heads * head_dim], of the RMSNorm of each group, with `norm_eps`.
            num_groups: each serves as many consecutive heads.
            state_dim: of B and C.
            conv_bias: [channels]; None is none.
        Raises: ShapeError.
        """

    @property
    def state_shape(self) -> list[int]:
        """Of a sequence's state: [heads, panels, state_dim, columns of a panel]."""

    @property
    def carried_shape(self) -> list[int]:
        """Of a sequence's last inputs: [width - 1, channels]."""

    def run(self, x: TensorView, z: TensorView, dt: TensorView, mixed: TensorView, out: TensorView, states: TensorView, carried: TensorView, query_start: Sequence[int], slots: Sequence[int], pool: ThreadPool | None = None, isa: str = '') -> None:
        """
        Compute the rows of all sequences, and move their slots on.

        A row's result is bitwise the same in any chunk, batch and number of threads.

        Args:
            x: [rows, channels], before the convolution.
            z: [rows, heads * head_dim], of the type of x.
            dt: [rows, heads].
            mixed: float32 of the shape of z, contiguous scratch.
            out: of the shape and type of z, written; may be z.
            states: float32 [slots, *state_shape], zero before a sequence's first row.
            carried: [slots, *carried_shape] of the type of x, likewise.
            query_start: the first row of each sequence, and the number of rows.
            slots: of the sequences, no two alike.
        Raises: ShapeError; ConfigError or UnsupportedError (isa); CapacityError.
        """

class LoraRows:
    """Which rows of a step belong to which adapter. One thread."""

    def __init__(self, num_rows: int) -> None: ...

    def add(self, slot: int, rows: Sequence[int]) -> None:
        """Name the rows of the adapter of a slot. Raises: ShapeError."""

class LoraBank:
    """
    The low-rank changes of one matrix, by slot of their adapter. A slot is written while no
    call uses it; calls that use others may run meanwhile.
    """

    def __init__(self, num_slots: int) -> None: ...

    def add_part(self, slot: int, down: TensorView, up: TensorView, scale: float, first_output: int, out_size: int, head: int = 0) -> None:
        """
        Add scale * (x down^T) up to some outputs, for the rows of a slot.

        Args:
            down: [rank, inputs], contiguous, float32 or bfloat16; kept.
            up: [panels, rank, 64] of the same type: column c of the outputs is at
                [c / 64, :, c % 64], and zero beyond them; kept.
        Raises: ShapeError.
        """

    def clear(self, slot: int) -> None:
        """Forget the parts of a slot."""

    def is_needed(self, rows: LoraRows) -> bool:
        """Whether a step has rows of a slot with parts."""

    def run(self, x: TensorView, sums: TensorView, rows: LoraRows, out: TensorView | None = None, is_added: bool = False, pool: ThreadPool | None = None, isa: str = '') -> None:
        """
        Add the changes to `sums`, then round all of these once to `out`.

        Args:
            x: [rows, inputs] or [rows, heads, inputs of a head], of the parts' type.
            sums: float32 [rows, outputs] or [rows, heads, outputs of a head], the product
                without adapters; says whether there are heads.
            rows: of the step.
            out: of the shape of `sums`; None leaves the sums where they are.
            is_added: add to what `out` holds.
        Raises: ShapeError; ConfigError or UnsupportedError (isa).
        """

class SamplingRule:
    """
    What a request asks of its tokens, and which it has had.

    One thread at a time.
    """

    def __init__(self, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, repetition_penalty: float = 1.0, frequency_penalty: float = 0.0, presence_penalty: float = 0.0, min_tokens: int = 0, prompt_ids: Sequence[int] = [], biases: Sequence[tuple[int, float]] = [], stop_ids: Sequence[int] = []) -> None:
        """
        Take a request's parameters; `prompt_ids` count for the repetition penalty, and
        `stop_ids` are not chosen before `min_tokens`. Ids outside of the vocabulary are
        passed over. Raises: ConfigError.
        """

    def note_token(self, token_id: int) -> None:
        """Count a chosen token, for the penalties."""

def sample_tokens(logits: TensorView, rules: Sequence[SamplingRule], draws: Sequence[float], positions: Sequence[int], pool: ThreadPool | None = None, isa: str = '') -> list[int]:
    """
    Choose a token for each row of `logits` [rows, vocabulary], float32, not modified.

    Args:
        rules: one a row; no other thread may use them meanwhile.
        draws: in [0, 1), one a row.
        positions: of the token in its request's output, one a row.
        pool: shares the rows where they are many; None runs them here.
    Returns: ids; -1 for a row whose logits hold NaN, or whose largest is not finite.
    Raises: ShapeError; ConfigError or UnsupportedError (isa).
    """

def gather_logprobs(logits: TensorView, token_ids: Sequence[int], num_top: int = 0, pool: ThreadPool | None = None, isa: str = '') -> tuple[list[float], list[int], list[float]]:
    """
    Natural log-probabilities of each row's token and of its `num_top` likeliest.

    Returns: [rows]; ids [rows * num_top], best first, of equals the lower id; and
    theirs. NaN for a row without a distribution, as `sample_tokens` has it.
    Raises: ShapeError; ConfigError or UnsupportedError (isa).
    """

class SegmentAllocator:
    """
    Where objects lie in a segment. Pure: it sees offsets, never memory. Not thread-safe.
    """

    def __init__(self, capacity_bytes: int, *, granule_bytes: int = 512, chunk_bytes: int = 1048576) -> None:
        """
        Args:
            chunk_bytes: what the runs of one size class are cut from, at most.
        Raises: ConfigError (no granule, or more than 2^30).
        """

    def allocate(self, sizes: Sequence[int]) -> list[int] | None:
        """
        Offsets of free runs of these sizes (bytes), or None and nothing is taken.
        """

    def release(self, offset: int, size_bytes: int) -> None:
        """Raises: ConflictError if no such run is allocated."""

    def release_many(self, offsets: Sequence[int], sizes: Sequence[int]) -> None:
        """As ``release`` of each; those before one that is wrong are free."""

    def rebuild(self, offsets: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], sizes: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
        """
        Forget all and take these ranges, sorted by offset.

        Raises: CorruptionError (overlap, beyond the end, not aligned): all is free then.
        """

    def grow(self, capacity_bytes: int) -> None:
        """Raises: ConfigError if smaller than before."""

    @property
    def capacity_bytes(self) -> int: ...

    @property
    def used_bytes(self) -> int:
        """In whole granules."""

    @property
    def num_classes(self) -> int:
        """Sizes that recur."""

    def find_largest_free_bytes(self) -> int:
        """The largest request that would succeed now."""

def measure_extents(keys: Sequence[str], sizes: Sequence[int]) -> list[int]:
    """
    Bytes that objects take in a segment, whole granules.

    Raises: ConfigError (a value beyond 2^40); TypeError (negative, or no text).
    """

def locate_values(keys: Sequence[str], sizes: Sequence[int]) -> list[int]:
    """
    Where values begin in their extents, bytes; as ``layout.value_offset``.
    """

def seal_objects(marks: object, data: object, usable_bytes: int, home: int, *, keys: list[str], offsets: list[int], sizes: list[int], versions: list[int], checksums: list[int], wanted: list[int], hard_pins: list[bool], soft_pin_ms: list[int], tables: bytes | None, values: bytes | None) -> None:
    """
    Make all of these objects ones that survive, or none; without the GIL.

    Args:
        marks: of the segment, uint8, one a granule.
        data: its extents, uint8.
        usable_bytes: of them.
        home: of the segment, for its headers.
        tables: to be written before, one after the other; None if they are there, or follow
            from the values.
        values: the same of values; None if they are there.

    Raises: ConfigError (leaves the segment); ConflictError (other objects lie there);
    CorruptionError (a checksum; the length of the blob or a column).
    """

def pack_header(key: str, size: int, version: int, checksum: int, wanted: int, hard_pin: bool, soft_pin_ms: int, home: int, position: int) -> bytes:
    """
    Return the header of an object, and its key, as they are stored.

    Raises: ConfigError (a field beyond its bits).
    """

def parse_header(memory: object, at: int, home: int, position: int) -> tuple[str, int, int, int, int, bool, int] | None:
    """
    Read the header that stands in ``memory`` from ``at`` on; the fields of
    ``pack_header`` up to the pins. None if it is damaged, or belongs to another place.
    """

def fill_rows(rows: Sequence[int], columns: Sequence[tuple[object, int | Sequence[int]]]) -> None:
    """
    Write values to the same rows of many columns, in all of them or in none.

    Args:
        columns: each an array of integers (int64, int32, uint32, uint16, uint8), and what its
            rows get: one value for all, or one each.

    Raises: ConfigError (a value does not fit its column); ShapeError (a row beyond the end).
    """

def populate_pages(memory: object) -> bool:
    """
    Map the pages of some memory now, for writing, instead of one by one when they are touched;
    their contents stay. Without the GIL. False where the kernel cannot.
    """

def crc32c(data: object, crc: int = 0) -> int:
    """CRC-32C of contiguous bytes, continuing from `crc`. Without the GIL."""

def checksum_chunks(data: object, chunk_bytes: int) -> bytes:
    """
    CRC-32C of each chunk, as little-endian uint32; `data` is contiguous bytes. Without the GIL.
    """

def checksum_blob(blob: bytes, sizes: list[int], chunk_bytes: int) -> list[int]:
    """
    As `checksum_values`, of values that lie one after the other; without their tables.

    Raises: ShapeError (a value leaves the blob).
    """

def checksum_values(memory: object, places: object, sizes: object, chunk_bytes: int) -> tuple[list[int], bytes]:
    """
    Checksums of many values: value i is `sizes[i]` bytes of `memory` from `places[i]` (uint64).
    Without the GIL.

    Returns: of each the checksum of its table (0 if empty); all tables, one after the other.
    Raises: ShapeError (a value leaves the memory).
    """

class LocationCache:
    """
    Where objects lay when their master was last asked, while their leases hold. Bounded: what
    was noted longest ago goes first. Guarded by the GIL.
    """

    def __init__(self, max_locations: int) -> None: ...

    def __len__(self) -> int: ...

    @property
    def generation(self) -> int:
        """How often it was cleared."""

    def forget(self, keys: Sequence[str]) -> None: ...

    def forget_endpoint(self, endpoint: int) -> None: ...

    def clear(self) -> None:
        """Forget all, and what is being asked for just now."""

class BatchRead:
    """
    The arithmetic of one request for many whole objects; see native/store/reads/batch_read.h. Places
    are found in a cache or told by a master, then read endpoint by endpoint: `plan`, the checks,
    `finish`.
    """

    def __init__(self, keys: Sequence[str], direct_bytes: int) -> None:
        """
        Values of `direct_bytes` or more are read to where they shall be, not by scratch memory.
        """

    def aim(self, offsets: Sequence[int], rooms: Sequence[int], memory_bytes: int) -> None:
        """
        Where values shall be in a memory of so many bytes, and how much room each has.

        Raises: ShapeError (a target leaves the memory).
        """

    def place_known(self, cache: LocationCache, now_s: float) -> int:
        """Place what is remembered; how many."""

    def list_unplaced(self) -> list[int]:
        """Indexes of the keys that their master is to be asked for."""

    def place(self, asked: Sequence[int], columns: bytes, versions: bytes, hosts: Sequence[tuple[int, int, int]], lease_end_s: float, cache: LocationCache, generation: int) -> None:
        """
        Take the answer for these keys; what is not simple is given up.

        Args:
            columns: int64 of all keys: sizes, checksums, hosts, offsets.
            versions: int64; empty where the master tells none, so that nothing is remembered.
            hosts: number in the columns, of the endpoint, and where its segment begins.
            generation: of the cache, when the master was asked.

        Raises: CorruptionError (numbers that no object has; the length of a column).
        """

    def take_given_up(self) -> list[int]:
        """
        Indexes of what has been given up since the last time: these are done, unless they are
        placed anew.
        """

    def list_endpoints(self) -> list[int]:
        """Those with something to read."""

    def plan(self, endpoint: int) -> tuple[int, float, list[tuple[int, int, int]], list[tuple[int, int, int]]]:
        """
        What to read of an endpoint.

        Returns: bytes of scratch memory; when the first of the leases ends; pieces (offset in
        the scratch memory, address there, length); direct values (index, address, length).
        """

    def check_headers(self, scratch: object) -> None:
        """Drop what was remembered and is that version of that object no more."""

    def check_values(self, scratch: object, memory: object | None) -> None:
        """
        Drop what differs from its checksum, without the GIL. Direct values are looked at in
        `memory`, if there is one; else see `check_direct`.
        """

    def check_direct(self, index: int, checksum: int) -> None:
        """Drop a direct value if its checksum is not this one."""

    def finish(self, values: list[bytes | None], scratch: object, now_s: float, cache: LocationCache) -> list[int]:
        """
        Set the values that are good and whose leases hold; forget the places of the others.

        Returns: the direct ones among the good, whose values are the caller's to set.
        """

    def finish_into(self, sizes: list[int], scratch: object, memory: object, now_s: float, cache: LocationCache) -> None:
        """As `finish`: copy values to their targets, and set their sizes."""

    def fail(self, cache: LocationCache) -> None:
        """Nothing of the plan came."""

def locate_rows(rows: list[int], is_here: bytes, until_ms: int, last_tick: int, sizes: object, versions: object, checksums: object, lease_until_ms: object, used_ticks: object, num_disks: object, first_copy: object, copy_hosts: object, copy_offsets: object, next_copy: object) -> tuple[bytes, bytes, list[int], list[tuple[int, int, int]]]:
    """
    One pass over the columns of a directory: find the only copy of each row (-1: none),
    lease it until then, note a use.

    Args:
        is_here: a byte for each host: 1 if it can be read from.

    Returns: sizes, checksums, hosts and offsets, int64, one after the other, -1 where
    there is none; versions; indexes of rows with several copies, or one on a disk, whose
    host is not chosen; of each host its number, the bytes it is read for, and how many.
    """

class BytesPool:
    """
    Memory of large results: ``bytes`` that are filled again when nobody else
    has them any more. Fresh memory costs more to touch than a copy does.
    """

    def __init__(self, limit_bytes: int) -> None: ...

    def take(self, sizes: Sequence[int]) -> list[bytes]:
        """
        Objects of these sizes; what is in them is anything. The caller fills them (see
        ``view_new_bytes``) before anybody else sees them.
        """

    def keep(self, values: Sequence[bytes]) -> None:
        """
        Note objects that were taken and filled, for another time; the oldest are forgotten.
        """

    def clear(self) -> None:
        """Forget all."""

    @property
    def kept_bytes(self) -> int:
        """Of all that are noted, in use or not."""

def view_new_bytes(value: bytes) -> numpy.typing.NDArray[numpy.uint8]:
    """
    A writable view of what ``BytesPool.take`` has given, for him who fills it. Gone before the
    object is shown to anybody.
    """
