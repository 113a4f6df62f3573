"""Goal: host functions reach the driver, keep their order, and raise what they raise.

Method: a stand-in of libcuda.so with the calls that we make, compiled here; it calls back on
threads of its own, as the driver does. No GPU. `make sanitize-driver` runs this file again with
the stand-in and the whole process under ASan and UBSan (``TANDEM_SHIM_SANITIZE``).
"""

import ctypes
import gc
import os
import shutil
import subprocess
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from tandem.core.errors import InternalError, UnsupportedError
from tandem.kernels.cuda.device import CudaDevice, CudaStream, Driver

SHIM = Path(__file__).parent / "libcuda_shim.c"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    path = tmp_path_factory.mktemp("cuda") / "libcuda.so.1"
    flags = ["-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
    if sanitizers := os.environ.get("TANDEM_SHIM_SANITIZE"):
        flags += [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-g"]
    subprocess.run([compiler, *flags, "-o", path, SHIM], check=True, timeout=60)
    return str(path)


class ShimStream:
    """The part of torch's stream that is used."""

    def __init__(self, library, handle):
        self.cuda_stream = handle
        self._wait = ctypes.CDLL(library).shim_wait

    def synchronize(self):
        self._wait(ctypes.c_ssize_t(self.cuda_stream))


@pytest.fixture
def device(library):
    return CudaDevice("cuda:0", Driver(library))


def test_functions_run_in_order_on_the_drivers_thread(library, device):
    stream, seen = CudaStream(ShimStream(library, 1)), []
    for i in range(200):
        device.call_host(stream, lambda i=i: seen.append((i, threading.get_ident())))
    stream.synchronize()
    assert [i for i, _ in seen] == list(range(200))
    assert {thread for _, thread in seen}.isdisjoint({threading.get_ident()})
    assert stream.kept == []


def test_streams_do_not_wait_for_each_other(library, device):
    first, second = (CudaStream(ShimStream(library, handle)) for handle in (2, 3))
    gate = threading.Event()
    seen = []
    device.call_host(first, lambda: seen.append(gate.wait(60)))
    device.call_host(second, gate.set)
    second.synchronize()
    first.synchronize()
    assert seen == [True]


def test_no_cycle_is_collected_on_the_drivers_thread(library, device):
    """Freeing a graph there calls CUDA, which a host function must not: the process would abort."""

    class Cycle:
        def __init__(self):
            self.own = self

        def __del__(self):
            freed.append(threading.get_ident())

    def make_cycles():
        for _ in range(2000):
            Cycle()

    freed, stream = [], CudaStream(ShimStream(library, 6))
    for _ in range(20):
        device.call_host(stream, make_cycles)
        make_cycles()
    assert not gc.isenabled()
    stream.synchronize()
    assert gc.isenabled()
    make_cycles()
    gc.collect()
    assert len(freed) == 41 * 2000
    assert set(freed) == {threading.get_ident()}


def test_what_a_function_raises_is_raised_once(library, device):
    stream, seen = CudaStream(ShimStream(library, 4)), []

    def fail():
        raise ValueError("broken")

    device.call_host(stream, fail)
    device.call_host(stream, lambda: seen.append("after"))
    with pytest.raises(ValueError, match="broken"):
        stream.synchronize()
    stream.synchronize()
    device.call_host(stream, lambda: seen.append("again"))
    stream.synchronize()
    assert seen == ["again"]


def test_what_the_driver_refuses_has_its_name(library, device):
    stream = CudaStream(ShimStream(library, 99))
    with pytest.raises(InternalError, match=r"cuLaunchHostFunc: CUDA_ERROR_INVALID_HANDLE \(400\)"):
        device.call_host(stream, lambda: None)
    assert gc.isenabled(), "nothing is queued"
    assert stream.kept == []
    shim = ctypes.CDLL(library)
    shim.shim_set_init(100)
    try:
        with pytest.raises(UnsupportedError, match="no device it can use: CUDA_ERROR_NO_DEVICE"):
            Driver(library)
        shim.shim_set_init(7)
        with pytest.raises(UnsupportedError, match="error 7"):
            Driver(library)
    finally:
        shim.shim_set_init(0)
        Driver(library)


def test_no_library_or_another_one_is_told(tmp_path):
    with pytest.raises(UnsupportedError, match="install a driver"):
        Driver(str(tmp_path / "libcuda.so.1"))
    with pytest.raises(UnsupportedError, match="cuLaunchHostFunc"):
        Driver("libc.so.6")


def test_a_captured_function_is_kept_with_its_graph(library, device, monkeypatch):
    """torch's capture is replaced; the driver's node is what counts here."""
    stream, kept = CudaStream(ShimStream(library, 5)), []

    class Capture:
        def __init__(self, graph, stream, capture_error_mode):
            assert capture_error_mode == "thread_local"
            kept.append((graph, stream))

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

    monkeypatch.setattr(torch.cuda, "graph", Capture)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: "graph")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 0)
    graph = device.capture(stream, lambda: device.call_host(stream, lambda: None))
    assert len(graph.functions) == 1
    assert kept == [("graph", stream.stream)]
    assert stream.kept == []
    assert stream.captured is None
    stream.synchronize()
    with pytest.raises(InternalError, match="captured already"):
        device.capture(stream, lambda: device.capture(stream, lambda: None))
