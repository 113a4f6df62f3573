"""Clients that come in numbers, leave, dawdle or meet a full queue.

Method: real sockets; what the engine holds is read beside. Waits are for conditions, each bounded.
"""

import asyncio
import contextlib
import logging
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import requests
from fake_engine import FakeEngine, make_info
from serving import WAIT_S, wait_until

from tandem.core.clock import MonotonicClock
from tandem.core.wire import AddRequest, SamplingParams
from tandem.server.edge.sse import EventStream
from tandem.server.generation import Generation, GenerationGroup
from tandem.server.lifecycle import Lifecycle
from tandem.server.telemetry.metrics import RequestTimer, ServerMetrics

BODY = {"prompt": "hello", "max_tokens": 200, "stream": True}


def open_stream(port: int, body: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), WAIT_S)
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s"
        % (len(body), body)
    )
    return connection


def check_freed(live, body: bytes, num_choices: int, *, reads: bool, resets: bool) -> None:
    """Leave in the middle of a request: its blocks become free.

    No token ever comes: only the disconnect itself can free them.
    """
    live.engine.hang = True
    connection = open_stream(live.running.port, body)
    wait_until(lambda: live.engine.num_held == num_choices)
    if reads:
        assert b"text/event-stream" in connection.recv(4096)
    if resets:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    wait_until(lambda: live.engine.num_held == 0)
    assert len(live.engine.cancelled) == num_choices


@pytest.mark.parametrize("resets", [True, False], ids=["reset", "closed"])
def test_a_client_that_leaves_a_stream_frees_its_blocks(serve_text, resets):
    body = b'{"prompt": "hello", "max_tokens": 9, "stream": true}'
    check_freed(serve_text(), body, 1, reads=True, resets=resets)


@pytest.mark.parametrize("resets", [True, False], ids=["reset", "closed"])
def test_a_client_that_does_not_wait_for_its_answer_frees_its_blocks(serve_text, resets):
    body = b'{"prompt": "hello", "max_tokens": 9}'
    check_freed(serve_text(), body, 1, reads=False, resets=resets)


def test_a_client_that_leaves_while_its_request_waits_for_an_instance_is_forgotten(serve_text):
    """Else clients that give up and ask again would fill the server during an outage."""
    live = serve_text()
    live.engine.is_down = True
    for is_stream in (b"true", b"false"):
        body = b'{"prompt": "hello", "max_tokens": 9, "n": 2, "stream": %s}' % is_stream
        connection = open_stream(live.running.port, body)
        wait_until(lambda: live.engine.num_waiting == 2)
        connection.close()
        wait_until(lambda: live.engine.num_waiting == 0)
    live.engine.is_down = False
    assert live.post("/v1/completions", {"prompt": "a"}).status_code == 200


def test_a_client_that_leaves_while_its_request_is_accepted_leaves_nothing():
    """At whichever turn of the loop: what the engine has accepted is cancelled."""

    class Engine(FakeEngine):
        async def submit(self, request):
            self.num_waiting += 1
            await self.gate.wait()
            return await super().submit(request)

    async def leave(num_turns: int, num_choices: int) -> bool:
        engine, metrics = Engine(step_s=30), ServerMetrics("tiny")
        engine.gate = asyncio.Event()
        generations = [
            Generation(
                i,
                AddRequest(request_id=str(i), prompt_ids=[1], sampling=SamplingParams()),
                None,
                None,
                RequestTimer(metrics, MonotonicClock(), 0.0),
            )
            for i in range(num_choices)
        ]
        group = GenerationGroup("x", generations, Lifecycle(metrics), 10.0)
        submitting = asyncio.ensure_future(group.submit(engine))
        while engine.num_waiting < num_choices:
            await asyncio.sleep(0)
        engine.gate.set()
        for _ in range(num_turns):
            await asyncio.sleep(0)
        has_ended = submitting.done()
        submitting.cancel()
        await asyncio.gather(submitting, return_exceptions=True)
        if has_ended:
            await group.close()
        assert engine.num_held == 0, (num_turns, num_choices)
        return has_ended

    async def leave_at_every_turn(num_choices: int) -> None:
        for num_turns in range(50):
            if await leave(num_turns, num_choices):
                return
        pytest.fail("it was never accepted")

    for num_choices in (1, 3):
        asyncio.run(leave_at_every_turn(num_choices))


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_abort_reaches_a_request_that_waits_for_an_instance(serve_text, is_stream):
    """It ends at once, as any that is aborted, and never runs."""
    live = serve_text()
    live.engine.is_down = True
    body = {"prompt": "hello", "n": 2, "rid": "mine", "stream": is_stream}
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(live.post, "/v1/completions", body)
        wait_until(lambda: live.engine.num_waiting == 2)
        assert live.post("/abort_request", {"rid": "mine"}).status_code == 200
        answer = asking.result(WAIT_S)
    assert answer.status_code == 200
    assert answer.text.count('"finish_reason":"abort"') == 2
    assert live.engine.num_waiting == live.engine.num_held == 0
    assert not live.engine.requests


def test_a_client_that_leaves_frees_all_its_choices(serve_text):
    body = b'{"prompt": ["a", "b"], "n": 2, "max_tokens": 9, "stream": true}'
    check_freed(serve_text(), body, 4, reads=True, resets=False)


def test_a_client_that_does_not_read_is_given_up(serve_text):
    live = serve_text(send_timeout_s=0.1)
    # Cumulative text: kilobytes an event soon fill the sockets' buffers.
    live.engine.info = make_info(live.engine.info.vocab_size, max_model_len=1 << 20)
    body = b'{"text": "hello", "stream": true, "sampling_params": {"max_new_tokens": 100000}}'
    with socket.create_connection(("127.0.0.1", live.running.port), WAIT_S) as connection:
        connection.sendall(
            b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s"
            % (len(body), body)
        )
        wait_until(lambda: len(live.engine.cancelled) == 1)
        assert live.engine.num_held == 0


def test_an_answer_that_is_not_read_is_given_up(serve_text):
    """Else its connection and its bytes stay for ever, though its request has ended."""
    live = serve_text(send_timeout_s=0.2)
    connections = live.running._server.server_state.connections
    prompt = b'{"prompt": "%s"}' % (b"z" * 2_000_000)
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n%sContent-Length: %d\r\n\r\n"
    for more in (b"", b"Connection: close\r\n"):
        with connect(live, receives=4096) as connection:
            connection.sendall(head % (more, len(prompt)) + prompt)
            assert connection.recv(12) == b"HTTP/1.1 200"
            wait_until(lambda: not connections)
    # One who reads gets all of it.
    reply = serve_text().post(
        "/tokenize", data=prompt, headers={"Content-Type": "application/json"}
    )
    assert reply.json()["count"] == 2_000_000


def test_a_full_queue_is_503_with_retry_after(serve_text):
    live = serve_text()
    live.engine.max_running = 2
    live.engine.step_s = 30.0
    holders = [
        requests.post(f"{live.url}/v1/completions", json=BODY, stream=True, timeout=WAIT_S)
        for _ in range(2)
    ]
    for path, body in (
        ("/v1/completions", BODY),
        ("/generate", {"text": "a", "stream": True}),
    ):
        refused = live.post(path, body)
        assert refused.status_code == 503
        assert int(refused.headers["Retry-After"]) >= 1
        assert refused.json()["error"]["code"] == "capacity"
    for holder in holders:
        holder.close()
    wait_until(lambda: live.engine.num_held == 0)


def test_of_several_choices_all_are_queued_or_none(serve_text):
    live = serve_text()
    live.engine.max_running = 2
    refused = live.post("/v1/completions", {"prompt": "a", "n": 3, "max_tokens": 1})
    assert refused.status_code == 503
    assert live.engine.num_held == 0
    assert len(live.engine.cancelled) == 2
    assert live.post("/v1/completions", {"prompt": "a", "n": 2}).status_code == 200


def test_64_streams_at_once_and_the_rest_refused(serve_text):
    live = serve_text()
    live.engine.max_running = 64
    live.engine.pause_at = 0  # Until all have asked, however long that takes here.
    live.engine.step_s = 0.02
    refused = []

    async def ask(client: httpx.AsyncClient) -> tuple[int, int]:
        body = {"prompt": "hello", "max_tokens": 50, "stream": True}
        async with client.stream("POST", f"{live.url}/v1/completions", json=body) as reply:
            if reply.status_code == 503:
                refused.append(reply)
                live.engine.pause_at = 0 if len(refused) < 16 else None
            lines = [line async for line in reply.aiter_lines() if line]
        return reply.status_code, len(lines)

    async def ask_all() -> list[tuple[int, int]]:
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(timeout=WAIT_S, limits=limits, trust_env=False) as client:
            return await asyncio.gather(*(ask(client) for _ in range(80)))

    answers = asyncio.run(ask_all())
    served = [lines for status, lines in answers if status == 200]
    assert (len(served), len(refused)) == (64, 16)
    assert set(served) == {51}, "50 tokens and the end"


def test_too_many_requests_at_once(serve_text):
    live = serve_text(max_in_flight=1)
    live.engine.step_s = 30.0
    with requests.post(f"{live.url}/v1/completions", json=BODY, stream=True, timeout=WAIT_S):
        refused = live.get("/v1/models")
        assert refused.status_code == 503
        assert refused.headers["Retry-After"]
        assert live.get("/health").status_code == 200
        assert live.get("/metrics").status_code == 200


def test_an_engine_that_never_answers_is_given_up(serve_text, monkeypatch):
    from tandem.server import generation

    monkeypatch.setattr(generation, "_DEADLINE_GRACE_S", 0.05)
    live = serve_text(request_timeout_s=0.5)
    live.engine.hang = True
    reply = live.post("/v1/completions", {"prompt": "a"})
    assert reply.status_code == 504
    assert reply.headers["x-should-retry"] == "false"
    assert live.engine.num_held == 0
    assert 0 < live.engine.requests[0].timeout_s <= 0.5, "counted from when it came"
    reply = live.post("/v1/completions", {"prompt": "a", "stream": True, "timeout": 0.5})
    assert reply.status_code == 200
    assert "deadline" in reply.text
    assert 0 < live.engine.requests[1].timeout_s <= 0.5
    assert "larger timeout" in reply.text
    assert " 0 s" not in reply.text


def test_a_time_limit_does_not_wait_for_a_busy_engine(serve_text):
    """The engine ends a request between two steps, which take seconds under overload: one of 0.5 s
    ended at 4 s."""
    live, ended = serve_text(), []
    live.engine.hang = True

    def ask(timeout_s):
        reply = live.post("/v1/completions", {"prompt": "a", "timeout": timeout_s})
        ended.append((timeout_s, reply.status_code))

    # The server alone ends the second: no instance takes it.
    threads = [threading.Thread(target=ask, args=(limit_s,)) for limit_s in (0.05, 1.5)]
    threads[0].start()
    wait_until(lambda: live.engine.num_held == 1)
    live.engine.is_down = True
    threads[1].start()
    for thread in threads:
        thread.join(60)
    assert ended == [(0.05, 504), (1.5, 504)]


def test_while_loading_the_stage_is_told_and_requests_wait_outside(serve_text):
    from tandem.core.wire import InstanceStage, StageChanged

    engine = FakeEngine(info=None)
    engine.stage = StageChanged(InstanceStage.LOADING, "layer 3 of 48", 3, 48)
    live = serve_text(engine)
    ready = live.get("/ready")
    assert ready.status_code == 503
    assert ready.json() == {
        "status": "loading",
        "detail": "layer 3 of 48",
        "done": 3,
        "total": 48,
    }
    for probe in ("/health", "/ping"):
        refused = live.get(probe)
        assert (refused.status_code, refused.json()) == (503, {"status": "loading"})
        assert refused.headers["Retry-After"]
    assert live.get("/live").status_code == 200
    for path, body in (("/v1/completions", BODY), ("/generate", {"text": "a"})):
        refused = live.post(path, body)
        assert refused.status_code == 503
        assert refused.headers["Retry-After"]
        assert "layer 3 of 48" in refused.json()["error"]["message"]
    assert live.get("/v1/models").json()["data"][0]["max_model_len"] is None
    assert "tandem:engine_up{" in live.get("/metrics").text
    engine.stage = StageChanged(InstanceStage.FAILED, "out of memory")
    assert live.get("/health").status_code == 503
    assert live.get("/live").status_code == 503
    engine.info, engine.stage = make_info(), StageChanged(InstanceStage.READY)
    for probe in ("/ready", "/health", "/ping", "/live"):
        assert live.get(probe).status_code == 200
    assert live.post("/ping").status_code == 200


@pytest.fixture
def asyncio_records(caplog):
    """What asyncio complains of; nothing may be left there, whatever clients do."""
    caplog.set_level(logging.WARNING, logger="asyncio")
    yield caplog
    found = [record for record in caplog.records if record.name == "asyncio"]
    assert found == [], [record.getMessage() for record in found]


@pytest.mark.parametrize(
    # Over TLS a plain close is tried with the others.
    "way",
    ["reset", *(pytest.param(way, marks=pytest.mark.slow) for way in ("closed", "half-closed"))],
)
def test_clients_that_leave_wide_streams_are_no_warnings(serve_text, asyncio_records, way):
    """All choices get a token in one turn of the loop; some turn finds the socket gone midway."""
    live = serve_text()
    body = b'{"prompt": "hello", "n": 256, "max_tokens": 100, "stream": true}'
    for _ in range(8):
        connection = open_stream(live.running.port, body)
        assert b"text/event-stream" in connection.recv(4096)
        if way == "half-closed":
            connection.shutdown(socket.SHUT_WR)
        else:
            on = int(way == "reset")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", on, 0))
            connection.close()
        wait_until(lambda: live.engine.num_held == 0)
        connection.close()
    live.stop()
    live.join()


def test_a_send_that_fails_is_the_last():
    """Of a hundred events that are ready together, those behind a lost connection are not sent."""
    sent = []

    async def run() -> None:
        gone = asyncio.Event()

        async def receive() -> dict:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict) -> None:
            # As a transport does: the failure is told in the next turn of the loop, and from then
            # on the server drops what it is given.
            if not gone.is_set():
                sent.append(message)
            asyncio.get_running_loop().call_soon(gone.set)

        async def events():
            for _ in range(100):
                yield b"data: x\n\n"

        group = GenerationGroup("x", [], Lifecycle(ServerMetrics("tiny")), 10.0)
        await EventStream(group, events())({"type": "http"}, receive, send)

    asyncio.run(run())
    assert 1 <= len(sent) <= 4, "asyncio warns of the fifth"


def test_a_client_that_ends_its_side_with_bytes_unread_is_let_go(serve_text, asyncio_records):
    """asyncio would close the connection once those bytes are sent, which is never."""
    live = serve_text()
    live.engine.info = make_info(live.engine.info.vocab_size, max_model_len=1 << 20)
    body = b'{"prompt": "hello", "max_tokens": 1000000, "stream": true}'
    with open_stream(live.running.port, body) as connection:
        connections = live.running._server.server_state.connections
        wait_until(lambda: len(connections) == 1)
        (protocol,) = connections
        wait_until(lambda: protocol.transport.get_write_buffer_size() > 0)
        connection.shutdown(socket.SHUT_WR)
        wait_until(lambda: live.engine.num_held == 0)
    live.stop()
    live.join()


def exchange(port: int, *parts: bytes) -> bytes:
    """Send parts, each in a packet of its own, and return all that is answered until the close."""
    with socket.create_connection(("127.0.0.1", port), WAIT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in parts:
            connection.sendall(part)
        return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.parametrize("offer", [b"h2c", b"websocket", b"TLS/1.0"])
@pytest.mark.parametrize("cut", [0, 40, -20], ids=["whole", "in the head", "in the body"])
def test_an_offer_of_another_protocol_is_answered_in_http_1_1(serve_text, offer, cut):
    """Java's HTTP client sends the first with every request to a server that it does not know."""
    port = serve_text().running.port
    body = b'{"prompt": "hello", "max_tokens": 2}'
    request = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n"
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: %s\r\nHTTP2-Settings: AAEAAEAA\r\n\r\n%s"
        % (len(body), offer, body)
    )
    last = b"GET /live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    parts = (request[:cut], request[cut:]) if cut else (request,)
    answers = exchange(port, *parts, request, last)
    assert answers.count(b"HTTP/1.1 200 OK") == 3
    assert answers.count(b'"finish_reason":"length"') == 2


def test_a_tunnel_is_refused(serve_text):
    answer = exchange(serve_text().running.port, b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (HEAD + b"X-Long: ", b"a" * 65536),
        (HEAD, b"X-Many: a\r\n" * 4096),
        (b"GET /", b"a" * 65536),
        (CHUNKED + b"2\r\n{}\r\n0\r\n", b"X-Trailer: a\r\n" * 4096),
    ],
    ids=["a header", "headers", "a path", "trailers"],
)
def test_a_head_without_end_is_refused(serve_text, begin, more):
    port = serve_text().running.port
    with socket.create_connection(("127.0.0.1", port), WAIT_S) as connection:
        connection.sendall(begin)
        with pytest.raises(ConnectionError):
            for _ in range(1024):
                connection.sendall(more)
    assert httpx.get(f"http://127.0.0.1:{port}/live").status_code == 200


def test_a_head_of_many_headers_is_refused(serve_text):
    """Each costs the loop time, also for those who look one up: the head is parsed no further."""
    live = serve_text()
    head = b"GET /live HTTP/1.1\r\nHost: localhost\r\n"
    for number, status in ((900, b"200 OK"), (1100, b"431 Too Large"), (60_000, b"431 Too Large")):
        with connect(live) as connection, contextlib.suppress(ConnectionError):
            connection.sendall(head + b"a:\r\n" * number + b"\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 " + status + b"\r\n")
    chunked = CHUNKED + b"2\r\n{}\r\n0\r\n" + b"a:\r\n" * 1100
    with connect(live) as connection:
        connection.sendall(chunked + b"\r\n")
        read_to_end(connection)
    assert live.get("/live").status_code == 200


def test_a_large_head_and_a_body_of_tiny_chunks_are_served(serve_text):
    port = serve_text().running.port
    body = b'{"prompt": "hello", "max_tokens": 2, "cache_salt": "%s"}' % (b"a" * 200)
    body += b" " * 70_000
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    head = CHUNKED.replace(b"\r\n\r\n", b"\r\nX-Long: " + b"a" * 100_000 + b"\r\n\r\n")
    trailers = b"0\r\nX-Request-Id: late\r\n\r\n"
    last = b"GET /live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    answers = exchange(port, head, chunks + trailers, last)
    assert answers.count(b"HTTP/1.1 200 OK") == 2
    assert b"late" not in answers  # Trailers are no headers.


def test_no_work_of_a_request_keeps_the_loop(serve_text, monkeypatch):
    """While a long list is encoded, other requests are served: its work is on a thread."""
    live = serve_text()
    tokenizer = live.app.state.context.encoder.tokenizer
    encode, begun, gate = tokenizer.encode, threading.Event(), threading.Event()

    def wait(text, **options):
        if text == "wait":
            begun.set()
            assert gate.wait(60)
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", wait)
    replies = []
    asking = threading.Thread(
        target=lambda: replies.append(live.post("/tokenize", {"prompt": ["wait", "b"] * 20_000}))
    )
    asking.start()
    assert begun.wait(60)
    assert live.get("/health").status_code == 200
    assert live.post("/v1/completions", {"prompt": "a"}).status_code == 200
    assert not replies
    gate.set()
    asking.join(60)
    assert len(replies[0].json()["tokens"]) == 40_000


def test_a_time_limit_holds_before_a_request_is_generated(serve_text, monkeypatch):
    """It counts from arrival: while others' prompts are encoded, and while no instance takes it."""
    live = serve_text(tokenizer_threads=1)
    tokenizer = live.app.state.context.encoder.tokenizer
    encode, gate = tokenizer.encode, threading.Event()
    monkeypatch.setattr(tokenizer, "encode", lambda *a, **k: gate.wait(60) and encode(*a, **k))
    busy = threading.Thread(target=lambda: live.post("/tokenize", {"prompt": "a"}))
    busy.start()
    assert live.post("/v1/completions", {"prompt": "a", "timeout": 0.05}).status_code == 504
    gate.set()
    busy.join(60)
    live.engine.is_down = True
    assert live.post("/v1/completions", {"prompt": "a", "timeout": 0.05}).status_code == 504
    assert live.engine.num_waiting == 0


def connect(live, receives: int | None = None) -> socket.socket:
    """Connect to a server; ``receives`` is the size in bytes of the client's buffer."""
    connection = socket.socket()
    connection.settimeout(WAIT_S)
    if receives is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receives)
    connection.connect(("127.0.0.1", live.running.port))
    return connection


def read_to_end(connection: socket.socket) -> bytes:
    """Return what the server sends up to its end of the connection."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(4096):
            received += part
    return received


def test_a_head_has_a_limit_of_time_wherever_it_stops(serve_text):
    """Without one, half-sent heads take all descriptors. Streams that run meanwhile go on."""
    live = serve_text(head_timeout_s=0.3)
    whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    unfinished = whole.replace(b"\r\n\r\n", b"\r\nContent-Length: 9\r\n\r\nabc")
    ends = {  # What is sent, and after its answer; what the server says at last.
        (b"", b""): b"",
        (b"GET", b""): b"HTTP/1.1 408",
        (b"\r\n\r\n", b""): b"",
        (b"GET /health HTTP/1.1\r\nHost: local", b""): b"HTTP/1.1 408",
        (whole, b"\r\n"): b"",
        (whole, b"GET /he"): b"HTTP/1.1 408",
        (whole + b"GET /he", b"a"): b"HTTP/1.1 408",
        (unfinished, b"d"): b"",
    }
    live.engine.step_s = 0.01
    stream = requests.post(f"{live.url}/v1/completions", json=BODY, stream=True, timeout=WAIT_S)
    connections = {sent: connect(live) for sent in ends}
    for (first, after), connection in connections.items():
        connection.sendall(first)
        if after:
            answer = b""
            while not answer.endswith(b"}"):
                answer += connection.recv(4096)
            assert answer.startswith(b"HTTP/1.1 200")
            connection.sendall(after)
    for sent, end in ends.items():
        with connections[sent] as connection:
            assert read_to_end(connection).startswith(end), sent
    assert stream.text.rstrip().endswith("[DONE]")


def test_connections_that_wait_give_way_when_descriptors_are_scarce(serve_text, monkeypatch):
    live = serve_text()
    limit = 6

    def is_scarce(_: int) -> bool:
        connections = live.running._server.server_state.connections
        return sum(not each.transport.is_closing() for each in connections) > limit

    monkeypatch.setattr("tandem.server.edge.bounded_connection.is_scarce", is_scarce)
    live.engine.step_s = 30.0
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 90\r\n\r\n"
    with (
        open_stream(live.running.port, b'{"prompt": "hello", "stream": true}') as stream,
        connect(live) as body,
    ):
        wait_until(lambda: live.engine.num_held == 1)
        body.sendall(head + b"{")
        halves = [connect(live) for _ in range(limit + 4)]
        for half in halves:
            half.sendall(b"GET /hea")
        assert read_to_end(halves[0]) == b""
        assert live.get("/health").status_code == 200
        assert live.engine.num_held == 1
        # With nobody left who waits for a head, a body that does not come gives way; then nobody.
        for half in halves:
            half.close()
        wait_until(lambda: len(live.running._server.server_state.connections) == 2)
        limit = 1
        assert live.get("/health").status_code == 200
        assert read_to_end(body) == b""
        # So does an answer that its client does not read.
        limit = 2
        with connect(live, receives=4096) as unread:
            prompt = b'{"prompt": "%s"}' % (b"z" * 2_000_000)
            unread.sendall(
                b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                b"Content-Length: %d\r\n\r\n%s" % (len(prompt), prompt)
            )
            assert unread.recv(12) == b"HTTP/1.1 200"
            limit = 1  # It is being closed, and does not count.
            assert live.get("/health").status_code == 200
            assert not read_to_end(unread).endswith(b"}"), "it was cut"
        with connect(live) as refused:
            assert read_to_end(refused).startswith(b"HTTP/1.1 503")
        stream.close()
        wait_until(lambda: live.engine.num_held == 0)


def test_a_burst_of_connections_leaves_the_reserve(serve_text, monkeypatch):
    """asyncio accepts as many as there are before it calls any of them: it is given few at a time,
    or all descriptors are gone before one is closed for another."""
    reserve, limit, most = 80, 20, 0
    monkeypatch.setattr("tandem.server.run.count_reserve", lambda: reserve)
    live = serve_text()
    connections = live.running._server.server_state.connections

    def is_scarce(_: int) -> bool:
        nonlocal most
        most = max(most, len(connections))
        return len(connections) > limit

    monkeypatch.setattr("tandem.server.edge.bounded_connection.is_scarce", is_scarce)
    gate = threading.Event()
    live.call_soon(lambda: gate.wait(WAIT_S))
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(connect(live))
        gate.set()
        assert live.get("/health").status_code == 200
    assert limit < most <= limit + reserve // 2
