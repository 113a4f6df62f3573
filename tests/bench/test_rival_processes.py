"""Goal: a rival in a process of its own answers, or ends in an error that says what happened."""

import contextlib
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from tandem._native import kernel_isas
from tandem.bench.rivals import isa, processes
from tandem.core.errors import DeadlineError, PeerLostError, UnsupportedError

SCRIPT = """
import json, os, sys, time
print("noise of a library", file=sys.stderr)
for line in sys.stdin:
    request = json.loads(line)
    if request["call"] == "die":
        os._exit(3)
    if request["call"] == "hang":
        time.sleep(30)
    answer = {"error": "no"} if request["call"] == "fail" else {"result": request["x"] * 100_000}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def peer(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.symlink_to(sys.executable)
    script = tmp_path / "peer.py"
    script.write_text(SCRIPT)
    with processes.RivalProcess(python, str(script)) as process:
        yield process


def test_calls_and_errors(peer):
    assert peer.call("echo", x="ab") == "ab" * 100_000
    with pytest.raises(UnsupportedError, match="fail: no"):
        peer.call("fail")
    assert peer.call("echo", x="c") == "c" * 100_000


def test_a_paused_peer_takes_no_time_and_goes_on(peer):
    peer.pause()
    with pytest.raises(DeadlineError):
        peer.call("echo", x="", timeout_s=0.2)
    peer.resume()
    assert peer.call("echo", x="") == ""


def test_settings_are_variables_of_the_peer(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    script = tmp_path / "peer.py"
    script.write_text(SCRIPT.replace('request["x"] * 100_000', 'os.environ["TOY"]'))
    settings = {"TOY": "a b=c"}
    with processes.RivalProcess(tmp_path / "bin" / "python", str(script), settings=settings) as one:
        assert one.call("echo") == "a b=c"


def test_a_peer_that_ends_is_named(peer):
    with pytest.raises(PeerLostError, match="ended with 3 in die"):
        peer.call("die")
    with pytest.raises(PeerLostError):
        peer.call("echo", x="a")


def test_a_peer_that_hangs_does_not_hang_the_bench(peer, monkeypatch):
    monkeypatch.setattr(processes, "CLOSE_TIMEOUT_S", 0.2)
    with pytest.raises(DeadlineError, match="no answer"):
        peer.call("hang", timeout_s=0.2)


def test_a_failed_installation_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "ROOT", tmp_path)
    # Only pip's answer is wanted: to put a pip of its own into a venv takes seconds.
    create = processes.venv.create
    monkeypatch.setattr(
        processes.venv, "create", lambda folder, **_: create(folder, system_site_packages=True)
    )
    with pytest.raises(UnsupportedError, match="cannot be installed"):
        processes.install_rival("nothing", ["./no-such-folder-here"])
    assert not list(Path(tmp_path).glob("*/installed"))
    monkeypatch.setattr(processes, "INSTALL_TIMEOUT_S", 0.001)
    with pytest.raises(UnsupportedError, match="not installed within"):
        processes.install_rival("nothing", ["./no-such-folder-here"])


def test_two_benchmarks_install_a_peer_once(tmp_path, monkeypatch):
    """The second waits for the first: a venv that is cleared under pip would be half installed."""
    monkeypatch.setattr(processes, "ROOT", tmp_path)
    monkeypatch.setattr(processes.venv, "create", lambda folder, **_: folder.mkdir())
    installed, together = [], threading.Barrier(2)

    def install(name, _python, _arguments, _settings):
        installed.append(name)
        # Time for the other to come into it as well, if nothing kept it out.
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(0.2)

    monkeypatch.setattr(processes, "_pip_install", install)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: processes.install_rival("llama", ["x"]), range(2)))
    assert installed == ["llama"]


def cap_at(monkeypatch, level):
    monkeypatch.setattr(isa, "cpu_features", lambda: SimpleNamespace(cap=level))


def test_a_peer_gets_no_wider_instruction_set_than_the_cap(monkeypatch):
    cap_at(monkeypatch, "avx512_vnni")
    flags = isa.list_ggml_settings()["CMAKE_ARGS"].split()
    assert {"-DGGML_NATIVE=OFF", "-DGGML_AVX2=ON", "-DGGML_AVX512_VNNI=ON"} <= set(flags)
    assert {"-DGGML_AVX512_BF16=OFF", "-DGGML_AMX_INT8=OFF"} <= set(flags)
    assert isa.list_kt_settings() == {"KT_KERNEL_CPU_VARIANT": "avx512_vnni"}
    isa.check_peer_isa("llama.cpp", "avx2")
    with pytest.raises(UnsupportedError, match="built for avx512_bf16, above TANDEM_MAX_ISA"):
        isa.check_peer_isa("llama.cpp", "avx512_bf16")


def test_without_a_cap_peers_are_built_as_they_like(monkeypatch):
    cap_at(monkeypatch, "")
    assert (isa.list_ggml_settings(), isa.list_kt_settings()) == ({}, {})
    isa.check_peer_isa("llama.cpp", kernel_isas()[-1])


def test_a_build_for_another_instruction_set_is_another_installation(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "ROOT", tmp_path)
    monkeypatch.setattr(processes.venv, "create", lambda folder, **_: folder.mkdir())
    monkeypatch.setattr(processes, "_pip_install", lambda *_: None)
    settings = ({}, {"CMAKE_ARGS": "-DA=ON"}, {"CMAKE_ARGS": "-DA=OFF"})
    made = {processes.install_rival("llama", ["x"], settings=setting) for setting in settings}
    assert len(made) == len(settings)
