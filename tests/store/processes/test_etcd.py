"""Leadership in a real etcd, by its JSON gateway.

Goal: one holder at a time, epochs that only rise, and an error that says what is wrong whenever
etcd is away, stopped, locked, or no etcd at all. Method: the real thing on loopback, stopped and
killed; and a server that answers nonsense.
"""

import asyncio
import base64
import json
import subprocess
import time
import urllib.request

import msgspec
import pytest
from etcd_server import EtcdServer, find_free_port, needs_etcd

from tandem.core.clock import MonotonicClock
from tandem.core.errors import (
    ConfigError,
    CorruptionError,
    DeadlineError,
    PeerLostError,
    PermissionDeniedError,
)
from tandem.store.config import StoreElectionConfig
from tandem.store.election import campaign as campaign_module
from tandem.store.election.election import Holder
from tandem.store.election.etcd import EtcdBackend

CLOCK = MonotonicClock()
T = 5.0


@pytest.fixture(scope="module")
def etcd(tmp_path_factory):
    server = EtcdServer(tmp_path_factory.mktemp("etcd")).start()
    yield server
    server.kill()


def make_backend(*urls: str, **changes) -> EtcdBackend:
    config = StoreElectionConfig(endpoints=urls, prefix=f"/test/{time.monotonic_ns()}")
    return EtcdBackend(msgspec.structs.replace(config, **changes), clock=CLOCK)


def make_rival(backend: EtcdBackend) -> EtcdBackend:
    return EtcdBackend(backend._config, clock=CLOCK)


def post(etcd: EtcdServer, path: str, body: dict) -> dict:
    request = urllib.request.Request(f"{etcd.url}/v3/{path}", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)


@needs_etcd
@pytest.mark.asyncio
async def test_one_leads_and_the_other_sees_who(etcd):
    async with make_backend(etcd.url) as a, make_rival(a) as b:
        assert await a.observe(T) is None
        claim = await a.acquire("tcp://a:1", ttl_s=3, min_epoch=0, timeout_s=T)
        assert claim == (Holder("tcp://a:1", 1), True)
        assert await b.observe(T) == Holder("tcp://a:1", 1)
        refused = await b.acquire("tcp://b:1", ttl_s=3, min_epoch=0, timeout_s=T)
        assert refused == (Holder("tcp://a:1", 1), False)
        assert not await b.renew(T)
        assert await a.renew(T)
        await a.release(T)
        await a.release(T)
        assert not await a.renew(T)
        assert await b.observe(T) is None


@needs_etcd
@pytest.mark.asyncio
async def test_epochs_rise_over_terms_and_above_what_hosts_have_seen(etcd):
    async with make_backend(etcd.url) as a, make_rival(a) as b:
        epochs = []
        for backend, least in ((a, 0), (b, 0), (a, 40), (b, 7)):
            claim = await backend.acquire("x", ttl_s=3, min_epoch=least, timeout_s=T)
            epochs.append(claim.holder.epoch)
            await backend.release(T)
        assert epochs == [1, 2, 41, 42]


@needs_etcd
@pytest.mark.asyncio
async def test_a_lease_that_is_not_renewed_ends(etcd):
    async with make_backend(etcd.url) as a, make_rival(a) as b:
        await a.acquire("a", ttl_s=2, min_epoch=0, timeout_s=T)
        # How long it lasts is etcd's own business: what is ours is for how long it was asked.
        lease = post(etcd, "lease/timetolive", {"ID": a._lease})
        assert lease["grantedTTL"] == "2"
        end_s = time.monotonic() + 60
        while await b.observe(T) is not None:
            assert time.monotonic() < end_s
            await asyncio.sleep(0.05)
        assert (await b.acquire("b", ttl_s=2, min_epoch=0, timeout_s=T)).holder == Holder("b", 2)
        assert not await a.renew(T)


@needs_etcd
@pytest.mark.asyncio
async def test_a_key_that_an_operator_removes_is_a_leadership_lost(etcd):
    async with make_backend(etcd.url) as a, make_rival(a) as b:
        await a.acquire("a", ttl_s=30, min_epoch=0, timeout_s=T)
        post(etcd, "kv/deleterange", {"key": a._leader_key})
        assert not await a.renew(T)
        assert (await b.acquire("b", ttl_s=30, min_epoch=0, timeout_s=T)).holder.epoch == 2
        assert not await a.renew(T)
        assert await b.renew(T)


@needs_etcd
@pytest.mark.asyncio
async def test_a_claim_whose_answer_was_lost_is_recognised(etcd):
    async with make_backend(etcd.url) as a:
        post_one, tries = a._post_one, []

        async def lose_first_answer(url, path, body, kind, timeout_s, **rest):
            answer = await post_one(url, path, body, kind, timeout_s, **rest)
            if path == "kv/txn":
                tries.append(answer.succeeded)
                if len(tries) == 1:
                    raise PeerLostError("test", "the answer was lost")
            return answer

        a._post_one = lose_first_answer
        a._endpoints = [etcd.url, etcd.url]
        claim = await a.acquire("a", ttl_s=3, min_epoch=0, timeout_s=T)
        assert tries == [True, False]
        assert claim == (Holder("a", 1), True)
        assert await a.renew(T)


@needs_etcd
@pytest.mark.asyncio
async def test_of_many_that_ask_at_once_one_wins(etcd):
    first = make_backend(etcd.url)
    rivals = [first, *(make_rival(first) for _ in range(7))]
    answers = await asyncio.gather(
        *(
            rival.acquire(f"m{i}", ttl_s=3, min_epoch=0, timeout_s=T)
            for i, rival in enumerate(rivals)
        ),
        return_exceptions=True,
    )
    claims = [answer for answer in answers if isinstance(answer, campaign_module.Claim)]
    assert [claim.is_ours for claim in claims].count(True) == 1
    assert len({claim.holder for claim in claims}) == 1
    for rival in rivals:
        await rival.release(T)
        await rival.__aexit__()


@needs_etcd
@pytest.mark.asyncio
async def test_the_endpoint_that_answers_is_used(etcd):
    dead = f"http://127.0.0.1:{find_free_port()}"
    async with make_backend(dead, etcd.url) as backend:
        for _ in range(3):
            assert await backend.observe(T) is None
        assert backend._endpoints[0] == etcd.url


@pytest.mark.asyncio
async def test_no_etcd_is_a_lost_peer_within_the_deadline():
    dead = [f"http://127.0.0.1:{find_free_port()}" for _ in range(2)]
    async with make_backend(*dead) as backend:
        async with asyncio.timeout(T):
            with pytest.raises(PeerLostError, match="etcd at"):
                await backend.observe(2.0)


@needs_etcd
@pytest.mark.asyncio
async def test_an_etcd_that_is_stopped_is_late_not_waited_for(tmp_path):
    server = EtcdServer(tmp_path).start()
    try:
        async with make_backend(server.url) as backend:
            await backend.acquire("a", ttl_s=3, min_epoch=0, timeout_s=T)
            server.stop()
            with pytest.raises(DeadlineError, match="silent"):
                await backend.renew(0.5)
            server.go_on()  # Only now: it was not waited for.
            assert await backend.renew(T)
            server.kill()
            with pytest.raises((PeerLostError, DeadlineError)):
                await backend.renew(1.0)
            server.start()
            assert await backend.renew(T), "a lease outlives a restart of etcd"
    finally:
        server.kill()


@needs_etcd
@pytest.mark.asyncio
async def test_names_and_passwords(tmp_path):
    server = EtcdServer(tmp_path).start()
    try:
        post(server, "auth/user/add", {"name": "root", "password": "open sesame"})
        post(server, "auth/user/grant", {"user": "root", "role": "root"})
        post(server, "auth/user/add", {"name": "guest", "password": "guest"})
        post(server, "auth/enable", {})
        async with make_backend(server.url, user="root", password="open sesame") as backend:
            await backend.acquire("a", ttl_s=3, min_epoch=0, timeout_s=T)
            backend._token = "a token that has ended"
            assert await backend.renew(T), "it authenticates anew"
        for user, password in (("root", "wrong"), ("guest", "guest"), ("", "")):
            async with make_backend(server.url, user=user, password=password) as backend:
                with pytest.raises(PermissionDeniedError):
                    await backend.observe(T)
    finally:
        server.kill()


def make_certificates(folder) -> None:
    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    subject = ("-subj", "/CN=127.0.0.1", "-days", "2")
    openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
            "-keyout", "ca.key", "-out", "ca.pem", *subject)  # fmt: skip
    (folder / "san").write_text("subjectAltName=IP:127.0.0.1\n")
    openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
            "-keyout", "it.key", "-out", "it.csr", "-subj", "/CN=127.0.0.1")  # fmt: skip
    openssl("x509", "-req", "-in", "it.csr", "-CA", "ca.pem", "-CAkey", "ca.key",
            "-CAcreateserial", "-out", "it.pem", "-days", "2", "-extfile", "san")  # fmt: skip


@needs_etcd
@pytest.mark.asyncio
async def test_certificates_of_both_sides(tmp_path):
    make_certificates(tmp_path)
    ca, cert, key = (str(tmp_path / name) for name in ("ca.pem", "it.pem", "it.key"))
    server = EtcdServer(
        tmp_path, "--cert-file", cert, "--key-file", key, "--client-cert-auth",
        "--trusted-ca-file", ca, scheme="https",
    )  # fmt: skip
    server.start(wait=False)
    try:
        async with make_backend(server.url, ca_file=ca, cert_file=cert, key_file=key) as backend:
            end_s = time.monotonic() + 60
            while True:
                try:
                    assert await backend.observe(T) is None
                    break
                except PeerLostError:
                    assert time.monotonic() < end_s
                    await asyncio.sleep(0.1)
        async with make_backend(server.url, ca_file=ca) as backend:
            with pytest.raises(PeerLostError, match="etcd at"):
                await backend.observe(T)
        async with make_backend(server.url, cert_file=cert, key_file=key) as backend:
            with pytest.raises(PeerLostError, match=r"(?i)certificate"):
                await backend.observe(T)
    finally:
        server.kill()


def test_certificates_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(ConfigError, match="certificates cannot be loaded"):
        make_backend("https://127.0.0.1:1", ca_file=str(tmp_path / "none"))


def test_settings_are_checked_and_hide_the_password():
    with pytest.raises(ConfigError, match="http://host:port"):
        StoreElectionConfig(endpoints=("127.0.0.1:2379",))
    with pytest.raises(ConfigError, match="http://host:port"):
        StoreElectionConfig(endpoints=())
    assert "sesame" not in repr(StoreElectionConfig(password="sesame"))


def encode(value: bytes) -> str:
    return base64.b64encode(value).decode()


NONSENSE = {
    "no JSON": b"<html>",
    "another shape": b'{"kvs": 5}',
    "no base64": b'{"kvs": [{"value": "%%%"}]}',
    "no leader": b'{"kvs": [{"value": "' + encode(b"{}").encode() + b'"}]}',
    "an epoch below one": b'{"kvs": [{"value": "'
    + encode(b'{"address": "a", "epoch": 0}').encode()
    + b'"}]}',
    "too much": b'{"kvs": [{"value": "' + b"A" * 2**21 + b'"}]}',
}


@pytest.mark.parametrize("name", NONSENSE)
@pytest.mark.asyncio
async def test_what_is_no_etcd_is_told_from_one(name):
    body = NONSENSE[name]

    async def answer(reader, writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server, make_backend(f"http://{host}:{port}") as backend:
        with pytest.raises(CorruptionError):
            await backend.observe(T)
