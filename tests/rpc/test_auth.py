"""Who may speak over TCP, what a secret becomes, and what is never opened."""

import asyncio
import logging
import os

import pytest
import zmq

from tandem.core.errors import ConfigError, NotFoundError, PermissionDeniedError
from tandem.rpc import (
    Auth,
    RpcClient,
    RpcConfig,
    RpcServer,
    generate_secret,
    make_identity,
    read_secret,
    write_secret,
)
from tandem.rpc.trust.auth import derive_key_bytes
from tandem.rpc.wire.endpoint import parse_endpoint

TEST_TIMEOUT_S = 60
ANY_PORT = "tcp://127.0.0.1:0"
SECRET = "correct horse battery staple"


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, TEST_TIMEOUT_S))


def make_server(endpoint, auth):
    server = RpcServer(endpoint, identity=make_identity("server"), auth=auth)
    server.register("double", lambda peer, number: 2 * number, int, int)
    return server


def make_client(endpoint, auth, config=None):
    return RpcClient(endpoint, identity=make_identity("client"), auth=auth, config=config)


def test_who_knows_the_secret_gets_in():
    async def scenario():
        async with (
            make_server(ANY_PORT, Auth.cluster(SECRET)) as server,
            make_client(server.endpoint, Auth.cluster(SECRET)) as client,
        ):
            assert server.endpoint.startswith("tcp://127.0.0.1:")
            assert await client.call("double", 21, int) == 42

    run(scenario())


def test_a_wrong_secret_is_refused_fast_and_for_what_it_is():
    async def scenario():
        auth = Auth.cluster(SECRET + "!")
        async with make_server(ANY_PORT, Auth.cluster(SECRET)) as server:
            with pytest.raises(PermissionDeniedError, match="secret is not ours"):
                await make_client(server.endpoint, auth).connect()
            # The server has not been harmed.
            async with make_client(server.endpoint, Auth.cluster(SECRET)) as client:
                assert await client.call("double", 1, int) == 2

    run(scenario())


def test_a_key_that_is_not_admitted_is_refused_by_the_doorkeeper():
    # It knows the server's public key, so the key exchange succeeds; its own key is unknown.
    server_auth = Auth.cluster(SECRET)
    _, stranger = zmq.curve_keypair()

    async def scenario():
        async with make_server(ANY_PORT, server_auth) as server:
            auth = Auth(server_public_key=server_auth.server_public_key, client_secret_key=stranger)
            with pytest.raises(PermissionDeniedError, match="refused our key"):
                await make_client(server.endpoint, auth).connect()

    run(scenario())


def test_a_client_without_encryption_gets_nothing(raw_client):
    async def scenario():
        async with make_server(ANY_PORT, Auth.cluster(SECRET)) as server:
            raw = raw_client(server.endpoint)
            raw.say_hello()
            while not raw.events.poll(0):
                await asyncio.sleep(0.001)
            assert not server.peers
            assert not raw.socket.poll(0)

    run(scenario())


@pytest.mark.parametrize("url", ["tcp://127.0.0.1:0", "tcp://0.0.0.0:0", "tcp://*:0"])
def test_tcp_without_a_secret_is_never_opened(url):
    with pytest.raises(PermissionDeniedError, match="without a secret"):
        make_server(url, Auth.local()).start()
    with pytest.raises(PermissionDeniedError, match="without a secret"):
        Auth.for_endpoint(url)


def test_the_way_follows_from_the_address():
    assert Auth.for_endpoint("ipc:///run/tandem/a.sock").uses_curve is False
    assert Auth.for_endpoint("tcp://10.0.0.1:5000", SECRET).uses_curve is True
    with pytest.raises(ConfigError, match=r"use Auth\.local"):
        make_server("ipc:///run/tandem/a.sock", Auth.cluster(SECRET)).start()


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("ipc://@abstract", PermissionDeniedError),
        ("ipc://*", PermissionDeniedError),
        ("ipc://relative/path", ConfigError),
        ("ipc://", ConfigError),
        ("ipc:///" + "x" * 107, ConfigError),
        ("inproc://a", ConfigError),
        ("tcp://host", ConfigError),
        ("tcp://host:70000", ConfigError),
        ("tcp://host:-1", ConfigError),
        ("localhost:80", ConfigError),
    ],
)
def test_addresses_that_are_refused(url, error):
    with pytest.raises(error, match=r"rpc\.endpoint"):
        parse_endpoint(url)


@pytest.mark.parametrize(
    ("url", "is_loopback"),
    [
        ("tcp://127.0.0.1:1", True),
        ("tcp://127.8.8.8:1", True),
        ("tcp://[::1]:1", True),
        ("tcp://[::ffff:127.0.0.1]:1", True),
        ("tcp://localhost:1", True),
        ("tcp://0.0.0.0:1", False),
        ("tcp://*:1", False),
        ("tcp://10.1.2.3:1", False),
        ("tcp://localhost.example.org:1", False),
    ],
)
def test_what_is_loopback(url, is_loopback):
    assert parse_endpoint(url).is_loopback is is_loopback


def test_a_busy_port_is_a_conflict():
    async def scenario():
        async with make_server(ANY_PORT, Auth.cluster(SECRET)) as server:
            with pytest.raises(Exception, match="Address already in use") as caught:
                make_server(server.endpoint, Auth.cluster(SECRET)).start()
            assert caught.value.code == "conflict"

    run(scenario())


def test_derivation_is_hkdf_sha256():
    # RFC 5869 appendix A.1, cut to the 32 bytes of the first block.
    key = derive_key_bytes(
        bytes.fromhex("0b" * 22),
        salt=bytes.fromhex("000102030405060708090a0b0c"),
        info=bytes.fromhex("f0f1f2f3f4f5f6f7f8f9"),
    )
    assert key.hex() == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"


def test_the_two_keys_of_one_secret_differ():
    auth = Auth.cluster(SECRET)
    assert auth._server_secret_key != auth._client_secret_key
    assert Auth.cluster(SECRET.encode()).server_public_key == auth.server_public_key


def test_secrets_show_nowhere(caplog):
    secret = generate_secret()
    auth = Auth.cluster(secret)
    caplog.set_level(logging.DEBUG)

    async def scenario():
        async with make_server(ANY_PORT, auth) as server:
            async with make_client(server.endpoint, auth) as client:
                await client.call("double", 1, int)
            with pytest.raises(PermissionDeniedError) as caught:
                await make_client(server.endpoint, Auth.cluster(secret[::-1])).connect()
            return str(caught.value)

    text = run(scenario()) + caplog.text + repr(auth) + str(auth)
    for hidden in (
        secret,
        secret[::-1],
        *(k.decode() for k in (auth._server_secret_key, auth._client_secret_key)),
    ):
        assert hidden not in text


def test_a_secret_must_be_long_enough():
    for bad in ("", "short", "x" * 15, "x" * 5000):
        with pytest.raises(ConfigError) as caught:
            Auth.cluster(bad)
        assert caught.value.field == "secret"
        assert "xxx" not in str(caught.value)
    assert len(generate_secret()) >= 43
    assert generate_secret() != generate_secret()


def test_a_secret_file_is_private_and_comes_back(tmp_path):
    path = tmp_path / "secret"
    write_secret(path, SECRET)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_secret(path) == SECRET
    with pytest.raises(FileExistsError):
        write_secret(path, "another secret, quite long")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_secret_file_that_others_can_read_is_refused(tmp_path, mode):
    path = tmp_path / "secret"
    write_secret(path, SECRET)
    path.chmod(mode)
    with pytest.raises(PermissionDeniedError, match=f"mode {mode:04o}"):
        read_secret(path)


def test_files_that_are_no_secret_are_refused(tmp_path):
    with pytest.raises(NotFoundError):
        read_secret(tmp_path / "missing")
    with pytest.raises(PermissionDeniedError, match="regular"):
        read_secret(tmp_path)
    write_secret(tmp_path / "secret", SECRET)
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(PermissionDeniedError):
        read_secret(tmp_path / "link")
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(PermissionDeniedError, match="regular"):
        read_secret(tmp_path / "pipe")
    (tmp_path / "binary").write_bytes(b"\xff\xfe" * 20)
    (tmp_path / "binary").chmod(0o600)
    with pytest.raises(ConfigError, match="UTF-8"):
        read_secret(tmp_path / "binary")


def test_configurations_that_contradict_themselves_are_refused():
    with pytest.raises(ConfigError, match="lease_ms"):
        RpcConfig(lease_ms=1000, heartbeat_interval_ms=600)
    with pytest.raises(ConfigError, match="max_pending_bytes"):
        RpcConfig(max_message_bytes=2**20, max_pending_bytes=2**19)
    with pytest.raises(ConfigError, match="reconnect_max_ms"):
        RpcConfig(reconnect_initial_ms=500, reconnect_max_ms=400)
