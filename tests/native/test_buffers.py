"""Goal: buffers are aligned, zeroed and alive while viewed; impossible ones are errors."""

import gc
import os

import numpy as np
import pytest

from tandem._native import AlignedBuffer, PageKind
from tandem.core.errors import CapacityError, ConfigError, NotFoundError

HUGE = 2 * 1024**2


@pytest.mark.parametrize("hugepages", [False, True])
@pytest.mark.parametrize("size_bytes", [1, 63, 4096, HUGE, HUGE + 1])
def test_buffer_is_aligned_zeroed_and_writable(size_bytes: int, hugepages: bool):
    buffer = AlignedBuffer(size_bytes, hugepages=hugepages)
    view = buffer.array()
    assert (view.shape, view.dtype) == ((size_bytes,), np.uint8)
    assert view.ctypes.data % (HUGE if hugepages else 64) == 0
    assert not view.any()
    view[:] = 255
    assert buffer.capacity_bytes >= buffer.size_bytes == size_bytes
    assert hugepages or buffer.page_kind == PageKind.BASE


def test_views_share_the_memory_and_keep_it_alive():
    buffer = AlignedBuffer(HUGE)
    first, second = buffer.array(), buffer.array()
    first[123] = 7
    del buffer
    gc.collect()
    assert second[123] == 7
    floats = second.view(np.float32)
    del first, second
    gc.collect()
    floats[:] = 1.5  # A freed mapping would be a crash.
    assert float(floats.sum()) == 1.5 * HUGE / 4


def test_memory_returns_when_the_last_view_goes():
    def resident_bytes() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident_bytes()
    for _ in range(20):
        AlignedBuffer(16 * HUGE, hugepages=True).array()[:] = 1
    gc.collect()
    assert resident_bytes() - before < 2 * 16 * HUGE


@pytest.mark.parametrize("hugepages", [False, True])
@pytest.mark.parametrize(
    ("size_bytes", "error"),
    [(0, ConfigError), (-1, ConfigError), (2**50, CapacityError), (2**63 - 1, CapacityError)],
)
def test_impossible_sizes(size_bytes: int, error: type[Exception], hugepages: bool):
    with pytest.raises(error) as caught:
        AlignedBuffer(size_bytes, hugepages=hugepages)
    assert caught.value.field == "size_bytes"


def test_unknown_numa_node_names_the_known_ones():
    with pytest.raises(NotFoundError, match="choose one of 0"):
        AlignedBuffer(64, numa_node=4096)
    assert AlignedBuffer(64, numa_node=0).size_bytes == 64
