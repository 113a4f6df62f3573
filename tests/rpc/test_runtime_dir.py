"""The folder of local sockets: ours alone, on the disk and for the kernel."""

import asyncio
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tandem.core.errors import ConfigError, ConflictError, NotFoundError, PermissionDeniedError
from tandem.rpc import Auth, RpcClient, RpcServer, make_identity, make_runtime_dir
from tandem.rpc.trust.runtime_dir import check_runtime_dir, check_socket_free

TEST_TIMEOUT_S = 60
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, TEST_TIMEOUT_S))


def make_server(endpoint):
    return RpcServer(endpoint, identity=make_identity("server"), auth=Auth.local())


def get_mode(path):
    return path.stat().st_mode & 0o7777


def test_a_new_folder_is_ours_alone_and_found_again(tmp_path):
    path = Path(make_runtime_dir(tmp_path / "run" / "tandem"))
    assert get_mode(path) == 0o700
    assert make_runtime_dir(path) == path
    random_path = make_runtime_dir()
    assert get_mode(random_path) == 0o700
    random_path.rmdir()


OWNER = """
import sys
from tandem.rpc import make_runtime_dir
print(path := make_runtime_dir(), flush=True)
(path / "secret").touch()
sys.stdin.read()
"""


@pytest.fixture
def short_path():
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        yield Path(path)


def test_the_next_start_removes_the_folder_of_a_killed_process_alone(short_path):
    environment = {**os.environ, "TMPDIR": str(short_path)}
    owners = [
        subprocess.Popen(
            [sys.executable, "-c", OWNER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        for _ in range(2)
    ]
    folders = [Path(owner.stdout.readline().strip()) for owner in owners]
    try:
        owners[0].kill()
        owners[0].wait(TEST_TIMEOUT_S)
        others = [short_path / name for name in ("tandem-store-0", "tandem-1-abc", "else")]
        for other in others:
            other.mkdir(mode=0o700)
        third = subprocess.run(
            [sys.executable, "-c", OWNER],
            input="",
            capture_output=True,
            env=environment,
            text=True,
            timeout=TEST_TIMEOUT_S,
            check=True,
        )
        made = Path(third.stdout.strip())
        assert not folders[0].exists()
        assert set(short_path.iterdir()) == {folders[1], made, *others}
    finally:
        for owner in owners:
            owner.kill()
            owner.communicate(timeout=TEST_TIMEOUT_S)


def test_no_temporary_folder_is_an_error_that_says_what_to_set(short_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(short_path / "missing"))
    with pytest.raises(ConfigError, match="No such file or directory: set TMPDIR"):
        make_runtime_dir()


def test_a_path_too_long_for_sockets_gets_a_short_stand_in(tmp_path):
    long_path = tmp_path / ("x" * 100)
    short = make_runtime_dir(long_path)
    assert short == make_runtime_dir(long_path)
    assert short != make_runtime_dir(tmp_path / ("y" * 100))
    assert len(str(short)) < 75
    assert get_mode(short) == 0o700
    for path in (short, make_runtime_dir(tmp_path / ("y" * 100))):
        path.rmdir()


@pytest.mark.parametrize("mode", [0o750, 0o705, 0o777, 0o701])
def test_a_folder_that_others_can_enter_is_refused(folder, mode):
    folder.chmod(mode)
    with pytest.raises(PermissionDeniedError, match=f"mode {mode:04o}"):
        make_runtime_dir(folder)
    with pytest.raises(PermissionDeniedError, match=f"mode {mode:04o}"):
        make_server(f"ipc://{folder}/server.sock").start()
    assert not list(folder.iterdir())


def test_what_is_no_folder_is_refused(folder):
    (folder / "link").symlink_to(folder)
    with pytest.raises(PermissionDeniedError, match="not a folder"):
        make_runtime_dir(folder / "link")
    (folder / "file").touch(mode=0o700)
    with pytest.raises(PermissionDeniedError, match="not a folder"):
        check_runtime_dir(folder / "file")
    with pytest.raises(NotFoundError, match="make_runtime_dir"):
        check_runtime_dir(folder / "missing")


def test_a_regular_file_is_not_taken_for_a_stale_socket(folder):
    (folder / "precious").write_text("data")
    with pytest.raises(ConflictError, match="not a socket"):
        check_socket_free(folder / "precious")
    with pytest.raises(ConflictError, match="not a socket"):
        make_server(f"ipc://{folder}/precious").start()
    assert (folder / "precious").read_text() == "data"


def test_a_folder_that_leaves_no_room_for_a_name_is_refused(tmp_path):
    folder = tmp_path / ("x" * (103 - len(str(tmp_path))))
    with pytest.raises(ConfigError, match="too little room"):
        make_server(f"ipc://{folder}/a").start()
    make_runtime_dir(folder).rmdir()


def test_a_server_makes_its_folder_and_a_private_socket(folder):
    endpoint = f"ipc://{folder}/made/server.sock"

    async def scenario():
        async with make_server(endpoint):
            assert get_mode(folder / "made") == 0o700
            assert get_mode(folder / "made" / "server.sock") == 0o600
            async with RpcClient(
                endpoint, identity=make_identity("client"), auth=Auth.local()
            ) as client:
                assert client.is_connected

    run(scenario())


CONNECT_AS_NOBODY = """
import os, socket, sys
os.setgroups([]); os.setgid({gid}); os.setuid({uid})
with socket.socket(socket.AF_UNIX) as raw:
    raw.settimeout(60)
    try:
        raw.connect({path!r})
        print("connected", flush=True)
        # ZeroMQ greets whom it accepts; whom it turns away gets the end of the stream.
        raw.sendall(b"\\xff" + bytes(8) + b"\\x7f\\x03")
        print("greeted" if raw.recv(1) else "turned away", flush=True)
    except PermissionError:
        print("denied", flush=True)
    except (ConnectionResetError, BrokenPipeError):
        print("turned away", flush=True)
"""


async def connect_as(uid, gid, path):
    """Return what another user's process sees when it connects to ``path``."""
    program = CONNECT_AS_NOBODY.format(uid=uid, gid=gid, path=str(path))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=subprocess.PIPE, cwd="/"
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode().split("\n")[:-1]


@needs_root
def test_another_user_is_stopped_by_the_folder_and_again_by_the_kernels_word():
    nobody = pwd.getpwnam("nobody")
    # The parents of a test's own folder may be closed as well; this one has /tmp above it alone.
    folder = make_runtime_dir(Path("/tmp") / f"tandem-test-{os.getpid()}")
    path = folder / "server.sock"

    async def scenario():
        async with make_server(f"ipc://{path}") as server:
            assert await connect_as(nobody.pw_uid, nobody.pw_gid, path) == ["denied"]
            # Someone opens the folder and the socket after the check: the uid still counts.
            folder.chmod(0o777)
            path.chmod(0o777)
            seen = await connect_as(nobody.pw_uid, nobody.pw_gid, path)
            assert seen == ["connected", "turned away"]
            assert await connect_as(0, 0, path) == ["connected", "greeted"]
            assert not server.peers

    try:
        run(scenario())
    finally:
        shutil.rmtree(folder)


@needs_root
def test_a_folder_of_another_user_is_refused(folder):
    os.chown(folder, pwd.getpwnam("nobody").pw_uid, -1)
    with pytest.raises(PermissionDeniedError, match="belongs to uid"):
        make_runtime_dir(folder)
    client = RpcClient(
        f"ipc://{folder}/server.sock", identity=make_identity("client"), auth=Auth.local()
    )
    with pytest.raises(PermissionDeniedError, match="belongs to uid"):
        run(client.connect())
