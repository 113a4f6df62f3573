"""A CUDA GPU as a ``Device``: streams, events and graphs of torch, host functions of the driver.

This file holds all CUDA calls and no scheduling decisions. torch has no host functions, so
``cuLaunchHostFunc`` of the driver's library is called, which is opened at run time; the build needs
no CUDA. The driver calls host functions on a thread of its own, which takes the GIL. They must not
call CUDA. After an exception the stream skips its host functions until ``synchronize`` raises it.
Python's garbage collector runs in any thread and may free a graph, which calls CUDA: so it is
paused while host functions are queued, and during a capture, which it would abort.

``tools/hardware_check.py`` runs it on a GPU.
"""

import contextlib
import ctypes
import gc
import threading
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor

from tandem.core.errors import CapacityError, InternalError, UnsupportedError
from tandem.kernels.device import Event, Graph, Stream

__all__ = ["CudaDevice", "Driver"]

LIBRARY = "libcuda.so.1"
HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Driver:
    """Calls of the CUDA driver's library that torch does not offer.

    Args:
        library: name or path of the library.

    Raises: UnsupportedError (the library is missing, too old, or finds no device; the text says
        which).
    """

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            opened = ctypes.CDLL(library)
            self._launch_host = opened.cuLaunchHostFunc
            self._name_error = opened.cuGetErrorName
            init = opened.cuInit
        except (OSError, AttributeError) as error:
            what = f"{library} cannot be used ({error}): install a driver of CUDA 10 or later"
            raise UnsupportedError("kernels.open_cuda", what) from error
        self._launch_host.argtypes = (ctypes.c_void_p, HOST_FUNCTION, ctypes.c_void_p)
        self._launch_host.restype = ctypes.c_int
        self._name_error.argtypes = (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))
        self._name_error.restype = ctypes.c_int
        init.argtypes, init.restype = (ctypes.c_uint,), ctypes.c_int
        status = init(0)
        if status != 0:
            what = f"{library} found no device it can use: {self._find_name(status)}"
            raise UnsupportedError("kernels.open_cuda", what)

    def launch_host(self, stream: int, function: Any) -> None:
        """Queue a ``HOST_FUNCTION``, on a stream; the caller keeps it alive until it has run.

        Args:
            stream: handle of a stream.
            function: called with a null argument.

        Raises: InternalError (the driver refuses).
        """
        status = self._launch_host(stream, function, None)
        if status != 0:
            what = f"cuLaunchHostFunc: {self._find_name(status)}"
            raise InternalError("kernels.cuda", what)

    def _find_name(self, status: int) -> str:
        name = ctypes.c_char_p()
        self._name_error(status, ctypes.byref(name))
        return f"error {status}" if name.value is None else f"{name.value.decode()} ({status})"


class _CollectionPause:
    """A counter that pauses Python's garbage collector while it is above zero; one per process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._was_enabled = False

    def acquire(self) -> None:
        """Pause Python's garbage collector until ``release``; calls are counted."""
        with self._lock:
            if self._count == 0:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._count += 1

    def release(self) -> None:
        """End one pause; Python's garbage collector resumes when no other caller has paused it."""
        with self._lock:
            self._count -= 1
            if self._count == 0 and self._was_enabled:
                gc.enable()


_pause = _CollectionPause()


class CudaStream:
    """A CUDA stream with the host functions that it may still call.

    Args:
        stream: torch's stream.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.kept: list[Any] = []
        """Host functions that the driver may still call, kept alive until ``synchronize``."""
        self.captured: list[Any] | None = None
        """Host functions of the graph that is being captured; None outside of a capture."""
        self.failure: BaseException | None = None
        self._is_paused = False

    def wait(self, event: Event) -> None:
        """Let later work of this stream wait for an event."""
        assert isinstance(event, CudaEvent), "an event of another device"
        self.stream.wait_event(event.event)

    def synchronize(self) -> None:
        """Wait until all queued work is done; raise the first error of a host function."""
        try:
            self.stream.synchronize()
        finally:
            self._resume_collection()
        self.kept.clear()
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    @contextlib.contextmanager
    def pausing_collection(self) -> Generator[None]:
        """Pause the garbage collector until ``synchronize``: the block queues host functions, or
        raises and queues none.
        """
        # A capture pauses it by itself, and queues nothing.
        if self._is_paused or self.captured is not None:
            yield
            return
        self._is_paused = True
        _pause.acquire()
        try:
            yield
        except BaseException:
            self._resume_collection()
            raise

    def _resume_collection(self) -> None:
        if self._is_paused:
            self._is_paused = False
            _pause.release()

    def __del__(self) -> None:
        self._resume_collection()

    @contextlib.contextmanager
    def wrap(self, function: Callable[[], None]) -> Generator[Any]:
        """Wrap a Python function for the driver to call. The wrapper is kept alive here, unless the
        block raises, which gives it to the driver.
        """

        def call(_: int | None) -> None:
            if self.failure is not None:
                return
            try:
                function()
            except BaseException as error:  # noqa: BLE001 - raised by synchronize.
                self.failure = error

        wrapped = HOST_FUNCTION(call)
        kept = self.kept if self.captured is None else self.captured
        kept.append(wrapped)
        try:
            yield wrapped
        except BaseException:
            kept.remove(wrapped)
            raise


class CudaEvent:
    """A CUDA event as an ``Event``: a point in the work of a stream."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event()

    def record(self, stream: Stream) -> None:
        """Record the event after the work that the stream has queued."""
        self.event.record(_as_own(stream).stream)

    def is_done(self) -> bool:
        """Return True if the work before the event is done."""
        return self.event.query()

    def synchronize(self) -> None:
        """Wait until the work before the event is done."""
        self.event.synchronize()


class CudaGraph:
    """A captured CUDA graph.

    Args:
        graph: torch's graph.
        functions: host functions that the graph calls, kept alive.
    """

    def __init__(self, graph: Any, functions: list[Any]) -> None:
        self.graph = graph
        self.functions = functions


class CudaMemory:
    """GPU memory, all of which is allocated from the start.

    Args:
        tensor: the memory as bytes.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.reserved_bytes = tensor.nbytes

    def reserve(self, end_bytes: int) -> None:
        """Check that ``end_bytes`` lie within the memory, which is all allocated already."""
        assert end_bytes <= self.reserved_bytes, "beyond the memory"


class CudaDevice:
    """A CUDA GPU as a ``Device``.

    Args:
        name: device name as torch writes it, such as ``cuda:0``.
        driver: calls of the driver; None opens the library.

    Raises: UnsupportedError (there is no such device).
    """

    is_host = False
    has_native_kernels = False

    def __init__(self, name: str = "cuda", driver: Driver | None = None) -> None:
        self.torch_device = torch.device(name)
        self._driver = Driver() if driver is None else driver

    def name_arithmetic(self) -> str:
        """Return the GPU's name, since CUDA libraries choose the order of sums by the chip."""
        return torch.cuda.get_device_name(self.torch_device)

    def count_free_bytes(self) -> int:
        """Return the GPU's free memory in bytes."""
        free_bytes, _ = torch.cuda.mem_get_info(self.torch_device)
        return free_bytes

    def allocate(self, size_bytes: int) -> Tensor:
        """Return zeroed GPU memory. Raises: CapacityError (the GPU has too little free memory)."""
        try:
            return torch.zeros(size_bytes, dtype=torch.uint8, device=self.torch_device)
        except torch.OutOfMemoryError as error:
            what = f"{size_bytes} bytes on {self.torch_device}: {error}"
            raise CapacityError("kernels.allocate", what) from error

    def map_memory(self, size_bytes: int) -> CudaMemory:
        """Allocate GPU memory, all of it at once."""
        return CudaMemory(self.allocate(size_bytes))

    def allocate_staging(self, size_bytes: int) -> Tensor:
        """Return pinned host memory, which the GPU copies from and to asynchronously."""
        return torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, source: Tensor, target: Tensor, stream: Stream | None = None) -> None:
        """Copy a tensor, at once or asynchronously on a stream."""
        if stream is None:
            target.copy_(source)
            return
        with torch.cuda.stream(_as_own(stream).stream):
            target.copy_(source, non_blocking=True)

    def make_stream(self) -> CudaStream:
        """Return a new stream."""
        return CudaStream(torch.cuda.Stream(self.torch_device))

    def follow(self, stream: Stream) -> None:
        """Let a stream wait for the work that torch has queued on its current stream."""
        _as_own(stream).stream.wait_stream(torch.cuda.current_stream(self.torch_device))

    def wait(self, event: Event) -> None:
        """Let torch's current stream wait for an event."""
        assert isinstance(event, CudaEvent), "an event of another device"
        torch.cuda.current_stream(self.torch_device).wait_event(event.event)

    def make_event(self) -> CudaEvent:
        """Return a new event."""
        return CudaEvent()

    def run(self, stream: Stream, work: Callable[[], None], name: str = "") -> None:
        """Run ``work``, whose torch operators are queued on the stream."""
        del name
        with torch.cuda.stream(_as_own(stream).stream), torch.inference_mode():
            work()

    def call_host(self, stream: Stream, function: Callable[[], None], name: str = "") -> None:
        """Queue a host function on the stream, by the driver."""
        del name
        own = _as_own(stream)
        with own.pausing_collection(), own.wrap(function) as wrapped:
            self._driver.launch_host(own.stream.cuda_stream, wrapped)

    def capture(self, stream: Stream, work: Callable[[], None]) -> CudaGraph:
        """Capture the work that ``work`` queues on a stream, as a CUDA graph.

        Raises: InternalError (the stream is being captured already).
        """
        own, graph = _as_own(stream), torch.cuda.CUDAGraph()
        if own.captured is not None:
            raise InternalError("kernels.capture", "the stream is being captured already")
        with torch.cuda.stream(own.stream):
            # The first matrix product of a stream creates the cuBLAS handle, which is not allowed
            # during a capture.
            torch.cuda.current_blas_handle()
        own.captured = functions = []
        # Garbage collection is paused: freeing a CUDA object, such as another graph, would abort
        # the capture.
        _pause.acquire()
        try:
            # In thread_local mode other threads may pin memory and query events during the capture.
            with torch.cuda.graph(graph, stream=own.stream, capture_error_mode="thread_local"):
                work()
        finally:
            _pause.release()
            own.captured = None
        return CudaGraph(graph, functions)

    def launch(self, graph: Graph, stream: Stream) -> None:
        """Launch a captured graph on a stream."""
        assert isinstance(graph, CudaGraph), "a graph of another device"
        own = _as_own(stream)
        pausing = own.pausing_collection() if graph.functions else contextlib.nullcontext()
        with torch.cuda.stream(own.stream), pausing:
            graph.graph.replay()


def _as_own(stream: Stream) -> CudaStream:
    assert isinstance(stream, CudaStream), "a stream of another device"
    return stream
