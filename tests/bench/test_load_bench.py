"""The loading benchmark's child process loads, answers and tells what that took."""

import ctypes
import json
import mmap
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tandem.bench.serving.load import drop_pages, make_cases
from tandem.core.errors import UnsupportedError


@pytest.mark.slow
def test_the_child_loads_and_tells(tmp_path):
    """As the benchmark starts it, without the rival, which takes ten minutes to install."""
    module = "tandem.bench.serving.load_child"
    command = [sys.executable, "-m", module, "demo", str(tmp_path), "5,6,7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["token"] == max(range(4096), key=outcome["logits"].__getitem__)
    assert outcome["seconds"] > 0
    assert outcome["num_progress_calls"] > 10
    assert 0 < outcome["layer_bytes"] < outcome["packed_bytes"]
    assert any(Path(tmp_path).rglob("*.packed"))
    assert {"plan", "load", "step", "user", "system"} == set(outcome["phases_s"])


def test_pages_are_dropped():
    """A file that was just written is in the page cache, and afterwards it is not."""
    folder = Path(__file__).parents[2] / "build"  # Not a file system in memory.
    folder.mkdir(exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(bytes(1 << 20))
        file.flush()
        assert count_resident(file) == 256
        drop_pages(Path(file.name))
        assert count_resident(file) == 0


def count_resident(file):
    """Return how many pages of a file are in memory, by mincore."""
    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        pages = (ctypes.c_ubyte * (len(mapped) // mmap.PAGESIZE))()
        first = ctypes.c_char.from_buffer(mapped)
        size = ctypes.c_size_t(len(mapped))
        assert libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), size, pages) == 0
        del first
        return sum(page & 1 for page in pages)


def test_without_a_rival_there_is_nothing_to_measure():
    with pytest.raises(UnsupportedError, match="--with-peers"):
        next(make_cases(quick=True))
