"""Transfers of files between clients and the server: how many at a time, how slow, how long.

Method: the limits by themselves, time in virtual time; real servers over the fake engine, with
clients that stand still, leave and read.
"""

import asyncio
import contextlib
import os
import socket

import pytest
import requests
from fake_engine import FakeEngine, make_info
from serving import WAIT_S, LiveServers, wait_until
from vocabularies import make_byte_level_tokenizer

from tandem.core.errors import CapacityError
from tandem.server.batches.transfers import FileAnswer, Transfers, make_steady
from tandem.sim.loop import run_virtual

HEAD = (
    b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer one\r\n"
    b"Content-Type: multipart/form-data; boundary=b\r\nContent-Length: 1000\r\n\r\n--b"
)


@pytest.fixture
def servers():
    with LiveServers(make_byte_level_tokenizer()) as servers:
        yield servers


def connect(live):
    return socket.create_connection(("127.0.0.1", live.running.port), WAIT_S)


def test_transfers_are_bounded_by_client_and_in_all(monkeypatch):
    monkeypatch.setattr("tandem.server.batches.transfers.count_reserve", lambda: 16)
    transfers = Transfers()
    with transfers.take_place("ann"), transfers.take_place("ann"):
        with pytest.raises(CapacityError, match="2 of this client"), transfers.take_place("ann"):
            pass
        with (
            transfers.take_place("bob"),
            transfers.take_place("bob"),
            pytest.raises(CapacityError, match="4 transfers"),
            transfers.take_place("cid"),
        ):
            pass
    assert not transfers.num_running


def test_a_client_that_keeps_many_transfers_keeps_no_other_from_its_own(
    servers, monkeypatch, caplog
):
    """Uploads and downloads have files open: without a limit they end the server's descriptors."""
    monkeypatch.setattr("tandem.server.batches.transfers.count_reserve", lambda: 16)
    live = servers.start(FakeEngine(info=make_info(320)), api_key=("one", "two"))
    transfers = live.app.state.context.batches.transfers
    data = os.urandom(300_000)

    def ask(method, path, key, **options):
        header = {"Authorization": f"Bearer {key}"}
        return requests.request(method, live.url + path, headers=header, timeout=WAIT_S, **options)

    def upload(key):
        form = {"files": {"file": ("a", data)}, "data": {"purpose": "batch"}}
        return ask("POST", "/v1/files", key, **form)

    file = upload("one").json()["id"]
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(connect(live)).sendall(HEAD)
        wait_until(lambda: transfers.num_running == 2)
        for refused in (upload("one"), ask("GET", f"/v1/files/{file}/content", "one")):
            assert refused.status_code == 503
            assert "2 of this client" in refused.json()["error"]["message"]
            assert int(refused.headers["Retry-After"]) >= 1
        own = upload("two").json()["id"]
        assert ask("GET", f"/v1/files/{own}/content", "two").content == data
    # Clients that leave free their places, and are no errors.
    wait_until(lambda: not transfers.num_running)
    assert ask("GET", f"/v1/files/{file}/content", "one").content == data
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_an_upload_that_stands_still_is_given_up(servers):
    live = servers.start(api_key=("one",), body_timeout_s=0.2)
    with connect(live) as slow:
        slow.sendall(HEAD)
        assert slow.recv(4096).startswith(b"HTTP/1.1 408")
    wait_until(lambda: not live.app.state.context.batches.transfers.num_running)


def test_an_upload_has_a_least_rate():
    """A byte within each pause would hold a transfer's place for days."""

    async def receive_for(part_bytes, pause_s, num_parts):
        async def receive():
            await asyncio.sleep(pause_s)
            return {"type": "http.request", "body": b"x" * part_bytes, "more_body": True}

        steady = make_steady(receive, 10.0)
        for _ in range(num_parts):
            await steady()

    for part_bytes, pause_s in ((1, 0.1), (1, 9.0), (6000, 1.0), (0, 11.0)):
        with pytest.raises(TimeoutError):
            run_virtual(lambda a=part_bytes, b=pause_s: receive_for(a, b, 1000))
    for part_bytes, pause_s in ((1 << 16, 9.0), (7000, 0.9), (1, 0.001)):
        run_virtual(lambda a=part_bytes, b=pause_s: receive_for(a, b, 1000))


def test_a_file_that_grows_or_goes_is_answered_whole_or_not(tmp_path):
    """The length that was told is sent, whatever a batch adds meanwhile."""
    path = tmp_path / "a"
    data = os.urandom(100_000)
    path.write_bytes(data)

    def ask(name, num_bytes, method="GET", **headers):
        sent = []

        async def receive():
            return await asyncio.get_running_loop().create_future()

        async def send(message):
            sent.append(message)
            with path.open("ab") as content:
                content.write(b"y")

        answer = FileAnswer(tmp_path / name, num_bytes, Transfers(), "ann")
        told = [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
        asyncio.run(answer({"type": "http", "method": method, "headers": told}, receive, send))
        assert not sent[-1].get("more_body", False)
        head, body = dict(sent[0]["headers"]), b"".join(each.get("body", b"") for each in sent)
        assert method == "HEAD" or int(head[b"content-length"]) == len(body)
        return sent[0]["status"], head.get(b"content-range", head[b"content-length"]), body

    assert ask("a", 100_000) == (200, b"100000", data)
    assert ask("a", 0) == (200, b"0", b"")
    assert ask("a", 100_000, "HEAD") == (200, b"100000", b"")
    assert ask("b", 1)[0] == 404
    # Parts, by which a client goes on with a download.
    for asked, found in (
        ("bytes=90000-", (206, b"bytes 90000-99999/100000", data[90_000:])),
        ("bytes=5-9", (206, b"bytes 5-9/100000", data[5:10])),
        ("bytes=5-999999", (206, b"bytes 5-99999/100000", data[5:])),
        ("bytes=100000-", (416, b"bytes */100000", b"")),
        *((odd, (200, b"100000", data)) for odd in ("bytes=9-5", "bytes=-5", "bytes=0-1,3-4", "x")),
    ):
        assert ask("a", 100_000, range=asked) == found, asked
    assert ask("a", 0, range="bytes=0-") == (416, b"bytes */0", b"")
    assert ask("a", 100_000, range="bytes=5-", if_range="x") == (200, b"100000", data)
