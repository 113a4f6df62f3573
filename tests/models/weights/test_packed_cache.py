"""Goal: packed weights on disk are used when they are right, and built again when they are not.

Method: a checkpoint is loaded twice over one cache, with every kind of damage in between; outputs
must stay bitwise the same. Conversions are cut short by a signal at a seeded moment.
"""

import errno
import fcntl
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from forks import fork
from loading import load_checkpoint

from tandem._native import ThreadPool
from tandem.core.errors import CapacityError, ConfigError, CorruptionError
from tandem.models.convert import convert_model
from tandem.models.loading import packed_cache
from tandem.models.loading.packed_cache import choose_root

IDS = list(range(3, 40))
SIZES = {"hidden_size": 64, "moe_intermediate_size": 64, "dtype": "bfloat16"}


@pytest.fixture
def folder(checkpoint, edit_weights):
    folder = checkpoint("qwen3_moe", **SIZES)
    # Stored as the configuration says: what is packed then does not depend on the dtype it runs in.
    edit_weights(folder, lambda t: t.update({name: w.bfloat16() for name, w in t.items()}))
    return folder


@pytest.fixture
def cache_root(tmp_path):
    return tmp_path / "packed"


def find_files(root):
    return sorted(path for path in root.rglob("*.packed"))


def load(folder, root=None, expert_format="int8g32", **options):
    cache = "off" if root is None else str(root)
    return load_checkpoint(
        folder, dtype="float32", expert_format=expert_format, packed_cache=cache, **options
    )


def run(folder, open_session, root=None, expert_format="int8g32", **options):
    return open_session(load(folder, root, expert_format, **options)).run(IDS)


def test_second_load_maps_what_the_first_packed(folder, cache_root, open_session, monkeypatch):
    plain = run(folder, open_session)
    assert torch.equal(run(folder, open_session, cache_root), plain)
    files = find_files(cache_root)
    assert [path.name for path in files] == [
        f"model.layers.{i}.mlp.experts.packed" for i in range(3)
    ]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files)
    assert files[0].parent.stat().st_mode & 0o777 == 0o700
    # Nothing may be packed again.
    monkeypatch.setattr("tandem.kernels.cpu.experts.PackedExperts.pack_expert", None)
    assert torch.equal(run(folder, open_session, cache_root), plain)


SECOND_PROCESS = """
import mmap, sys
files = [open(path, "rb") for path in sys.argv[1:]]
maps = [mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) for file in files]
for _ in sys.stdin:
    print(sum(part[i] for part in maps for i in range(0, len(part), 4096)), flush=True)
"""


def read_mapped() -> tuple[int, int]:
    """Return KiB of packed files that are resident here, and this process's share of them."""
    sizes = {"Rss": 0, "Pss": 0}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, _, value = line.partition(":")
        if "-" in key.split()[0]:
            inside = line.endswith(".packed")
            assert not inside or " r--s " in line, line
        elif inside and key in sizes:
            sizes[key] += int(value.split()[0])
    return sizes["Rss"], sizes["Pss"]


def test_two_processes_share_the_memory(folder, cache_root, open_session):
    """What both have touched counts half for each of them: a model has no copy of its own.

    The other process maps the files as a second instance does.
    """
    load(folder, cache_root)
    gc.collect()  # Models of other tests have mapped other files.
    model = load(folder, cache_root)
    files = find_files(cache_root)
    packed = sum(path.stat().st_size for path in files) >> 10
    seen: list[tuple[int, int]] = []
    with subprocess.Popen(
        [sys.executable, "-c", SECOND_PROCESS, *map(str, files)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        watchdog = threading.Timer(120, process.kill)
        watchdog.start()
        try:
            # A kernel that is short of memory takes pages of files back between two looks.
            while len(seen) < 5:
                open_session(model).run(IDS)
                process.stdin.write("look\n")
                process.stdin.flush()
                assert process.stdout.readline()
                resident, proportional = read_mapped()
                seen.append((resident, proportional))
                if resident >= packed / 2 and proportional <= 0.75 * resident:
                    break
            else:
                pytest.fail(f"of {packed} KiB never half resident and shared: {seen}")
        finally:
            process.stdin.close()
            process.wait()
            watchdog.cancel()
            watchdog.join()


def test_parts_are_copied_from_the_same_cache(checkpoint, cache_root, open_session, monkeypatch):
    """Results depend on the number of parts, not on whether they came from the cache."""
    folder = checkpoint("qwen3_moe", hidden_size=64, moe_intermediate_size=128, dtype="bfloat16")
    plain = run(folder, open_session, expert_parts=2)
    whole = run(folder, open_session, cache_root, expert_parts=1)
    assert torch.equal(run(folder, open_session), whole)
    assert torch.equal(run(folder, open_session, cache_root, expert_parts=2), plain)
    written = [path.read_bytes() for path in find_files(cache_root)]
    for path in find_files(cache_root):
        path.unlink()
    # Packed in one part for the cache, then split; and read from there.
    assert torch.equal(run(folder, open_session, cache_root, expert_parts=2), plain)
    assert [path.read_bytes() for path in find_files(cache_root)] == written
    monkeypatch.setattr("tandem.kernels.cpu.experts.PackedExperts.pack_expert", None)
    model = load(folder, cache_root, expert_parts=2)
    assert torch.equal(open_session(model).run(IDS), plain)
    one = load(folder, cache_root)
    assert model.weight_bytes == one.weight_bytes
    split, whole = (m.kv_identity(m.kv_layout()) for m in (model, one))
    assert split.digest == whole.digest
    assert [d.field for d in split.compare(whole)] == ["rounding.expert_parts"]


def test_a_refused_node_is_said_once(checkpoint, monkeypatch, caplog):
    folder = checkpoint("qwen3_moe", hidden_size=64, moe_intermediate_size=128, dtype="bfloat16")
    monkeypatch.setattr("tandem.kernels.cpu.experts.PackedExperts.is_bound", False)
    with caplog.at_level(logging.WARNING):
        load(folder, expert_parts=2)
    assert [r for r in caplog.messages if "memory_not_bound" in r] == caplog.messages


def test_matrices_on_nodes_compute_the_same(checkpoint, monkeypatch, caplog, open_session):
    """Two shares of each matrix on this machine's one node, and a kernel that refuses."""
    folder = checkpoint("qwen3", hidden_size=64, intermediate_size=256, dtype="bfloat16")
    plain = load(folder, linear_format="int8g32")
    expected = open_session(plain).run(IDS)
    node = ThreadPool(1).node_ids[0]
    monkeypatch.setattr(ThreadPool, "node_ids", [node, node])
    spread = load(folder, linear_format="int8g32")
    assert torch.equal(open_session(spread).run(IDS), expected)
    # Results do not depend on it, and so neither do the keys of what is cached.
    layout = plain.kv_layout()
    assert spread.kv_identity(layout) == plain.kv_identity(layout)
    monkeypatch.setattr("tandem.kernels.cpu.linear.PackedLinear.is_bound", False)
    with caplog.at_level(logging.WARNING):
        caplog.clear()
        load(folder, linear_format="int8g32")
    assert len([r for r in caplog.messages if "memory_not_bound" in r]) == 1


def test_formats_have_folders_of_their_own(folder, cache_root, open_session):
    run(folder, open_session, cache_root, "int8g32")
    run(folder, open_session, cache_root, "bf16")
    assert {path.parent.name for path in find_files(cache_root)} == {"int8g32", "bf16"}


def test_a_changed_checkpoint_is_packed_again(
    folder, cache_root, open_session, edit_weights, caplog
):
    before = run(folder, open_session, cache_root)

    def change(tensors):
        name = next(name for name in tensors if "experts" in name and "down" in name)
        tensors[name] *= -1

    edit_weights(folder, change)
    with caplog.at_level(logging.WARNING):
        after = run(folder, open_session, cache_root)
    assert "another source" in caplog.text
    assert not torch.equal(before, after)
    assert torch.equal(after, run(folder, open_session))
    assert torch.equal(after, run(folder, open_session, cache_root))


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda text: text[: len(text) // 2], marks=pytest.mark.slow),
        pytest.param(lambda text: "", marks=pytest.mark.slow),
        lambda text: text.replace(packed_cache.LAYOUT, "tandem-experts-0"),
        pytest.param(lambda text: text.replace('"int8g32"', '"int4g32"'), marks=pytest.mark.slow),
        lambda text: json.dumps({**json.loads(text), "files": 7}),
        pytest.param(
            lambda text: json.dumps(json.loads(text) | {"comment": "from a later version"}),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["cut", "empty", "layout", "format", "types", "unknown field"],
)
def test_a_manifest_that_does_not_fit_is_refused(damage, folder, cache_root, open_session, caplog):
    plain = run(folder, open_session, cache_root)
    path = next(cache_root.rglob("manifest.json"))
    path.write_text(damage(path.read_text()))
    for file in find_files(cache_root):
        file.write_bytes(bytes(file.stat().st_size))
    with caplog.at_level(logging.WARNING):
        assert torch.equal(run(folder, open_session, cache_root), plain)
    assert "event=packed_cache_refused" in caplog.text
    assert torch.equal(run(folder, open_session, cache_root), plain)


@pytest.mark.parametrize("change", [-1, pytest.param(1, marks=pytest.mark.slow), None])
def test_a_file_of_another_size_is_packed_again(change, folder, cache_root, open_session, caplog):
    plain = run(folder, open_session, cache_root)
    path = find_files(cache_root)[1]
    if change is None:
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size + change)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(run(folder, open_session, cache_root), plain)
    assert "event=packed_file_refused" in caplog.text
    assert len(find_files(cache_root)) == 3


def test_what_others_may_write_to_is_not_mapped(folder, cache_root, open_session, caplog):
    """Whoever can shorten a mapped file can end the process."""
    plain = run(folder, open_session, cache_root)
    first = find_files(cache_root)[0]
    first.chmod(0o620)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(run(folder, open_session, cache_root), plain)
    assert [m for m in caplog.messages if "packed_file_refused" in m and "others may" in m]
    # Packed again, as a file of our own.
    assert find_files(cache_root)[0].stat().st_mode & 0o777 == 0o600
    caplog.clear()
    stamps = [path.stat().st_mtime_ns for path in find_files(cache_root)]
    first.parent.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(run(folder, open_session, cache_root), plain)
    assert [m for m in caplog.messages if "packed_cache_refused" in m and "others may" in m]
    assert len([m for m in caplog.messages if "packed_cache_not_written" in m]) == 1
    assert [path.stat().st_mtime_ns for path in find_files(cache_root)] == stamps
    for mode, uid, text in (
        (0o600, os.geteuid() + 1, f"it belongs to user {os.geteuid() + 1}"),
        (0o602, os.geteuid(), "others may write to it"),
        (0o644, os.geteuid(), ""),
        (0o755, 0, ""),
    ):
        info = os.stat_result((mode, 1, 1, 1, uid, 0, 0, 0, 0, 0))
        assert packed_cache.find_risk(info) == text


def test_nothing_writes_to_a_finished_file(folder, cache_root, open_session, caplog):
    """A file that is packed again is another one: what is mapped keeps its bytes."""
    model = load(folder, cache_root)
    first = find_files(cache_root)[0]
    before, data = first.stat().st_ino, first.read_bytes()
    with first.open("rb") as held:
        manifest = first.parent / "manifest.json"
        manifest.write_text(manifest.read_text().replace('"int8g32"', '"int8g64"'))
        with caplog.at_level(logging.WARNING):
            again = load(folder, cache_root)
        assert [m for m in caplog.messages if "packed_cache_refused" in m]
        assert find_files(cache_root)[0].stat().st_ino != before
        assert held.read() == data
    assert torch.equal(open_session(model).run(IDS), open_session(again).run(IDS))


def test_one_writer_at_a_time(folder, cache_root, open_session, caplog):
    plain = run(folder, open_session)
    root = choose_root(str(cache_root), folder, 0)
    assert root is not None
    (root / "int8g32").mkdir(parents=True)
    with (root / "int8g32" / ".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with caplog.at_level(logging.WARNING):
            assert torch.equal(run(folder, open_session, cache_root), plain)
        assert caplog.text.count("another process writes") == 1
        assert not find_files(cache_root)
        with pytest.raises(CapacityError, match="does not take"):
            convert_model(folder, "int8g32", packed_cache=str(cache_root))
    assert torch.equal(run(folder, open_session, cache_root), plain)
    assert len(find_files(cache_root)) == 3


def test_a_lock_that_is_a_link_costs_nothing(folder, cache_root, tmp_path):
    root = choose_root(str(cache_root), folder, 0)
    assert root is not None
    (root / "int8g32").mkdir(parents=True)
    precious = tmp_path / "precious"
    precious.write_text("kept")
    (root / "int8g32" / ".lock").symlink_to(precious)
    assert convert_model(folder, "int8g32", packed_cache=str(cache_root)).num_packed == 3
    assert precious.read_text() == "kept"


@pytest.mark.parametrize(
    "step", ["posix_fallocate", pytest.param("fsync", marks=pytest.mark.slow), "rename"]
)
def test_a_full_disk_costs_the_cache_not_the_model(
    step, folder, cache_root, open_session, monkeypatch, caplog
):
    plain = run(folder, open_session)

    def fail(*_):
        raise OSError(errno.ENOSPC, "no space left")

    target = "pathlib.Path.rename" if step == "rename" else f"os.{step}"
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(target, fail)
        assert torch.equal(run(folder, open_session, cache_root), plain)
    assert caplog.text.count("event=packed_cache_not_written") == 1
    assert not find_files(cache_root) or step == "fsync"
    assert not list(cache_root.rglob("*.partial"))
    assert torch.equal(run(folder, open_session, cache_root), plain)
    assert len(find_files(cache_root)) == 3


def test_verify_finds_a_flipped_bit(folder, cache_root):
    report = convert_model(folder, "int8g32", packed_cache=str(cache_root), is_verified=True)
    assert (report.num_files, report.num_packed) == (3, 3)
    assert report.size_bytes == sum(path.stat().st_size for path in find_files(cache_root))
    again = convert_model(folder, "int8g32", packed_cache=str(cache_root), is_verified=True)
    assert again.num_packed == 0
    path = find_files(cache_root)[2]
    path.touch()  # A new time is no new content.
    assert convert_model(folder, "int8g32", packed_cache=str(cache_root), is_verified=True)
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 4
    path.write_bytes(data)
    with pytest.raises(CorruptionError, match=path.name):
        convert_model(folder, "int8g32", packed_cache=str(cache_root), is_verified=True)


def test_convert_needs_experts(checkpoint, tmp_path):
    with pytest.raises(ConfigError, match="nothing to pack"):
        convert_model(checkpoint("llama"), "int8", packed_cache=str(tmp_path / "packed"))
    with pytest.raises(ConfigError, match="off"):
        convert_model(checkpoint("llama"), "int8", packed_cache="off")


KILLED = """
import os, signal, sys
from tandem.models.loading import packed_cache
from tandem.models.convert import convert_model
count = 0
def stop(*_):
    global count
    count += 1
    if count == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[4] == "write":
    packed_cache.WRITE_BYTES = 4096
    write = os.write
    def write_and_stop(descriptor, data):
        stop()
        return write(descriptor, data)
    os.write = write_and_stop
    stop_reading = None
else:
    stop_reading = stop
convert_model(sys.argv[1], "int8g32", packed_cache=sys.argv[2], progress=stop_reading)
"""


@pytest.mark.parametrize(
    ("done", "when"),
    [*(pytest.param(n, "read", marks=pytest.mark.slow) for n in (0, 2)), (1, "write")],
)
def test_a_killed_conversion_goes_on(done, when, folder, cache_root, open_session, tmp_path):
    """Of the layer that the kill falls in nothing is left that looks whole."""
    if when == "read":
        # Each layer's experts are 6 times 3 tensors.
        count = 18 * done + 7
    else:
        convert_model(folder, "int8g32", packed_cache=str(tmp_path / "other"))
        sizes = [path.stat().st_size for path in find_files(tmp_path / "other")]
        count = sum(-(-size // 4096) for size in sizes[:done]) + 3
    arguments = [str(folder), str(cache_root), str(count), when]
    assert fork(KILLED, arguments, tmp_path / "printed") == -signal.SIGKILL
    assert len(find_files(cache_root)) == done
    assert len(list(cache_root.rglob("*.partial"))) == (when == "write")
    report = convert_model(folder, "int8g32", packed_cache=str(cache_root), is_verified=True)
    assert (report.num_files, report.num_packed) == (3, 3 - done)
    assert not list(cache_root.rglob("*.partial"))
    assert torch.equal(run(folder, open_session, cache_root), run(folder, open_session))


TWO = """
import sys
from tandem.models.convert import convert_model
sys.stdout.write("ready\\n")
sys.stdout.flush()
sys.stdin.readline()
convert_model(sys.argv[1], "int8g32", packed_cache=sys.argv[2])
"""


@pytest.mark.slow
def test_two_conversions_at_once_leave_one_whole_cache(folder, cache_root, open_session):
    """Either one ends well, or it says that the other writes; what is there is right."""
    command = [sys.executable, "-c", TWO, str(folder), str(cache_root)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    both = [subprocess.Popen(command, text=True, **pipes) for _ in range(2)]
    watchdog = threading.Timer(180, lambda: [process.kill() for process in both])
    watchdog.start()
    try:
        for process in both:
            assert process.stdout.readline() == "ready\n"
        for process in both:
            process.stdin.write("go\n")
            process.stdin.flush()
        texts = [process.communicate()[1] for process in both]
    finally:
        watchdog.cancel()
        watchdog.join()
    assert 0 in [process.returncode for process in both], texts
    for process, text in zip(both, texts, strict=True):
        assert process.returncode == 0 or "does not take" in text
    report = convert_model(folder, "int8g32", packed_cache=str(cache_root), is_verified=True)
    assert (report.num_files, report.num_packed) == (3, 0)
    assert not list(cache_root.rglob("*.partial"))
    assert torch.equal(run(folder, open_session, cache_root), run(folder, open_session))


def test_auto_keeps_only_what_is_worth_it(tmp_path):
    assert choose_root("auto", tmp_path, packed_cache.MIN_CACHED_BYTES - 1) is None
    assert choose_root("off", tmp_path, 1 << 40) is None
    large = choose_root("auto", tmp_path, packed_cache.MIN_CACHED_BYTES)
    assert large is not None
    assert large.is_relative_to(packed_cache.DEFAULT_ROOT.expanduser())
    assert choose_root("auto", tmp_path / "x", 1 << 40) != choose_root("auto", tmp_path, 1 << 40)
