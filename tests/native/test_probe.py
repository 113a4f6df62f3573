"""Goal: a probe says what is there, or why it is not; it never fails and leaves nothing open."""

import ctypes.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tandem import _native


@pytest.mark.parametrize("probe", [_native.probe_io_uring, _native.probe_cma])
def test_probe_answers_with_a_reason_and_leaks_no_descriptor(probe):
    before = os.listdir("/proc/self/fd")
    results = [probe() for _ in range(3)]
    assert os.listdir("/proc/self/fd") == before
    assert {result.is_available for result in results} in ({True}, {False})
    assert all(result.detail for result in results)


def test_cuda_without_a_driver_names_the_library():
    if ctypes.util.find_library("cuda") is not None:
        pytest.skip("this machine has libcuda.so.1")
    probe = _native.probe_cuda()
    assert not probe.is_available
    assert "libcuda.so.1" in probe.detail
    assert probe.devices == []


@pytest.mark.gpu
def test_cuda_devices_are_described():
    if ctypes.util.find_library("cuda") is None:
        pytest.skip("no libcuda.so.1 on this machine")
    probe = _native.probe_cuda()
    assert probe.is_available, probe.detail
    assert all(device.name and device.memory_bytes > 0 for device in probe.devices)
    assert all(device.compute_major >= 3 for device in probe.devices)


def test_cpu_features_agree_with_the_kernel():
    text = Path("/proc/cpuinfo").read_text()
    flags = next(
        (set(line.split()) for line in text.splitlines() if line.startswith("flags")), set()
    )
    # In a process of its own, without the cap of this run.
    code = "from tandem import _native; f = _native.cpu_features(); print(f.avx2, f.avx512_vnni)"
    env = {name: value for name, value in os.environ.items() if name != "TANDEM_MAX_ISA"}
    seen = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert seen.stdout.split() == [str("avx2" in flags), str("avx512_vnni" in flags)]
