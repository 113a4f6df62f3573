"""Who may reach the server: keys, hosts, TLS, and the settings that would open it by accident.

Method: a request with each credential, name or certificate against a server that has its own.
"""

import contextlib
import logging
import shutil
import socket
import ssl
import struct
import subprocess
import threading

import pytest
import requests
from fake_engine import FakeEngine
from serving import WAIT_S, LiveServers, wait_until

from tandem.core.errors import ConfigError
from tandem.server.api.endpoints import list_endpoints
from tandem.server.app import build_app
from tandem.server.config import ACCESS_LOGGER, ServerConfig, check_exposure, load_api_keys
from tandem.server.edge.hosts import LOCAL_CALLS
from tandem.server.lifecycle import OPEN_PATHS

ENDPOINTS = ["/v1/models", "/metrics", "/server_info", "/model_info", "/flush_cache"]


@pytest.fixture(scope="module")
def locked(tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("# of the team\nfrom-file\n\n  other  \n")
    with LiveServers(tokenizer) as servers:
        yield servers.start(api_key=("from-config",), api_key_file=str(path))


@pytest.fixture(scope="module")
def named(tokenizer):
    with LiveServers(tokenizer) as servers:
        yield servers.start(allowed_hosts=("*.example.org",))


@pytest.mark.parametrize("path", ENDPOINTS)
def test_without_a_key_there_is_no_answer(locked, path):
    reply = locked.get(path)
    assert reply.status_code == 401
    assert reply.headers["WWW-Authenticate"] == "Bearer"
    assert reply.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("key", ["from-config", "from-file", "other"])
def test_a_known_key_opens(locked, key):
    for scheme in ("Bearer", "bearer"):
        reply = locked.get("/v1/models", headers={"Authorization": f"{scheme} {key}"})
        assert reply.status_code == 200


@pytest.mark.parametrize(
    "header",
    ["Bearer", "Bearer ", "Bearer from-confi", "Bearer from-config2", "Basic from-config"],
)
def test_any_other_key_does_not(locked, header):
    headers = {"Authorization": header}
    assert locked.get("/v1/models", headers=headers).status_code == 401
    reply = locked.post("/v1/completions", {"prompt": "a"}, headers=headers)
    assert reply.status_code == 401
    assert locked.engine.requests == []


def test_bytes_outside_ascii_are_just_a_wrong_key(locked):
    headers = {"Authorization": "Bearer \xff\xfe".encode("latin-1")}
    assert locked.get("/v1/models", headers=headers).status_code == 401


def test_probes_are_open(locked):
    for path in ("/health", "/ready", "/live", "/ping"):
        assert locked.get(path).status_code == 200


def test_no_answer_shows_a_key(locked):
    reply = locked.get("/server_info", headers={"Authorization": "Bearer other"})
    assert reply.status_code == 200
    assert "from-config" not in reply.text
    assert "from-file" not in reply.text


def test_no_log_line_metric_or_page_shows_a_key(locked, caplog):
    """At the most verbose level, of requests with a right key, a wrong one and one in the path."""
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, logger=ACCESS_LOGGER)  # It has a level of its own.
    right, wrong = "from-config", "of-a-stranger"
    told = []
    for key in (right, wrong):
        bearer = {"Authorization": f"Bearer {key}"}
        for path in ("/metrics", "/server_info", "/", "/page/js/app.js", "/no/such/path"):
            told.append(locked.get(path, headers=bearer).text)
        told.append(locked.get("/v1/models", headers={"x-api-key": key}).text)
        told.append(locked.get(f"/v1/models?api_key={key}").text)
        told.append(locked.post("/v1/completions", {"prompt": 1.5}, headers=bearer).text)
    # Others are the client of this test, and uvicorn's own lines, which `configure_logging` mutes.
    ours = [record for record in caplog.records if record.name.startswith("tandem")]
    logged = [record.getMessage() + str(record.__dict__) for record in ours]
    assert any("/v1/completions" in line for line in logged), "nothing was logged"
    for text in (*logged, *told):
        assert right not in text
        assert wrong not in text


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:1", "127.0.0.1:8000", "[::1]:8000", "10.1.2.3", "a.example.org"],
)
def test_hosts_that_are_ours(named, host):
    assert named.get("/v1/models", headers={"Host": host}).status_code == 200


def test_hosts_that_are_not(named):
    names = ("evil.com", "example.org.evil.com", "example.org", "localhost.evil.com", "", "a:b:c")
    for host in names:
        reply = named.get("/v1/models", headers={"Host": host})
        assert reply.status_code == 400, host
        assert reply.json()["error"]["param"] == "Host"
    assert named.get("/health", headers={"Host": "evil.com"}).status_code == 200


def test_pages_of_other_sites_cannot_post(serve_text):
    live = serve_text()
    for origin in ("https://evil.com", "null", "http://6.6.6.6", "x"):
        reply = live.post("/generate", {"text": "a"}, headers={"Origin": origin})
        assert reply.status_code == 403, origin
    assert live.engine.requests == []
    for origin in (live.url, f"http://localhost:{live.running.port}"):
        reply = live.post("/generate", {"text": "a"}, headers={"Origin": origin})
        assert reply.status_code == 200, origin


def test_the_host_check_can_be_switched_off(serve_text):
    live = serve_text(allowed_hosts=("*",))
    assert live.get("/v1/models", headers={"Host": "any.where"}).status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.1", "host.example"])
def test_beyond_this_machine_a_key_or_a_flag_is_needed(host):
    with pytest.raises(ConfigError) as caught:
        check_exposure(ServerConfig(host=host), ())
    assert caught.value.field == "server.allow_unauthenticated"
    check_exposure(ServerConfig(host=host), ("key",))
    check_exposure(ServerConfig(host=host, allow_unauthenticated=True), ())


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.9.9.9"])
def test_on_this_machine_none_is(host):
    check_exposure(ServerConfig(host=host), ())


def test_a_key_file_without_keys_is_refused(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# none yet\n")
    for name in (path, tmp_path / "absent", tmp_path):
        with pytest.raises(ConfigError) as caught:
            load_api_keys(ServerConfig(api_key_file=str(name)))
        assert caught.value.field == "server.api_key_file"
    for key in ("", "a b", "grüße"):
        with pytest.raises(ConfigError):
            load_api_keys(ServerConfig(api_key=(key,)))


def test_half_a_tls_pair_is_refused(tokenizer):
    with pytest.raises(ConfigError) as caught:
        build_app(ServerConfig(ssl_certfile="cert.pem"), FakeEngine(), tokenizer, "tiny")
    assert caught.value.field == "server.ssl_keyfile"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-keyout", key, "-out", cert, "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"],
        check=True, capture_output=True, timeout=30,
    )  # fmt: skip
    return str(cert), str(key)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
def test_tls(serve_text, certificate):
    cert, key = certificate
    live = serve_text(ssl_certfile=cert, ssl_keyfile=key)
    assert live.url.startswith("https://")
    with live.post("/v1/completions", {"prompt": "a", "max_tokens": 3}, verify=cert) as reply:
        assert reply.status_code == 200
    del reply
    with pytest.raises(requests.exceptions.SSLError):
        live.get("/health")
    plain = live.url.replace("https", "http")
    with pytest.raises(requests.exceptions.ConnectionError):
        requests.get(f"{plain}/health", timeout=5)
    # A TLS connection that ends while the server closes it would take uvicorn seconds.
    wait_until(lambda: not live.running._server.server_state.connections)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
def test_a_tls_client_that_leaves_frees_its_blocks(serve_text, certificate):
    cert, key = certificate
    live = serve_text(ssl_certfile=cert, ssl_keyfile=key)
    live.engine.hang = True  # Only the disconnect itself can free them.
    context = ssl.create_default_context(cafile=cert)
    body = b'{"prompt": "a", "max_tokens": 9, "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    plain = socket.create_connection(("127.0.0.1", live.running.port), WAIT_S)
    with context.wrap_socket(plain, server_hostname="localhost") as connection:
        connection.sendall(head % len(body) + body)
        wait_until(lambda: live.engine.num_held == 1)
    wait_until(lambda: live.engine.num_held == 0)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
@pytest.mark.parametrize("way", ["reset", "closed", "unwrapped"])
def test_tls_clients_that_leave_wide_streams_are_no_warnings(serve_text, certificate, caplog, way):
    cert, key = certificate
    caplog.set_level(logging.WARNING, logger="asyncio")
    live = serve_text(ssl_certfile=cert, ssl_keyfile=key)
    context = ssl.create_default_context(cafile=cert)
    body = b'{"prompt": "a", "n": 64, "max_tokens": 200, "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    for _ in range(4):
        plain = socket.create_connection(("127.0.0.1", live.running.port), 10)
        with context.wrap_socket(plain, server_hostname="localhost") as connection:
            connection.sendall(head % len(body) + body)
            assert b"text/event-stream" in connection.recv(4096)
            if way == "reset":
                on = struct.pack("ii", 1, 0)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, on)
            elif way == "unwrapped":
                connection.settimeout(0.2)
                with contextlib.suppress(OSError):  # What is still on its way is not read.
                    connection.unwrap()
        wait_until(lambda: live.engine.num_held == 0)
    live.stop()
    live.join()
    assert [r.getMessage() for r in caplog.records if r.name == "asyncio"] == []


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
def test_a_handshake_has_a_limit_of_time_and_gives_way(serve_text, certificate, monkeypatch):
    """Half-done ones take descriptors as half-sent heads do, before there is any request."""
    cert, key = certificate
    live = serve_text(ssl_certfile=cert, ssl_keyfile=key, head_timeout_s=0.3)

    def connect(begin):
        connection = socket.create_connection(("127.0.0.1", live.running.port), WAIT_S)
        connection.sendall(begin)
        return connection

    hello = bytes.fromhex("16030100c8010000c40303")
    for begin in (b"", hello, b"GET / HTTP/1.1\r\n\r\n"):
        with connect(begin) as connection, contextlib.suppress(ConnectionResetError):
            while connection.recv(4096):
                pass
    connections = live.running._server.server_state.connections
    wait_until(lambda: not connections)
    live = serve_text(ssl_certfile=cert, ssl_keyfile=key)
    connections = live.running._server.server_state.connections

    def is_scarce(_: int) -> bool:
        return sum(not each.transport.is_closing() for each in connections) > 6

    monkeypatch.setattr("tandem.server.edge.bounded_connection.is_scarce", is_scarce)
    with contextlib.ExitStack() as stack:
        for _ in range(12):
            stack.enter_context(connect(hello))
        assert requests.get(f"{live.url}/health", verify=cert, timeout=WAIT_S).status_code == 200
    wait_until(lambda: not connections)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
def test_a_tls_client_that_does_not_read_its_answer_is_given_up(serve_text, certificate):
    cert, key = certificate
    live = serve_text(ssl_certfile=cert, ssl_keyfile=key, send_timeout_s=0.2)
    connections = live.running._server.server_state.connections
    prompt = b'{"prompt": "%s"}' % (b"z" * 2_000_000)
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    context = ssl.create_default_context(cafile=cert)
    plain = socket.socket()
    plain.settimeout(WAIT_S)
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    plain.connect(("127.0.0.1", live.running.port))
    with context.wrap_socket(plain, server_hostname="localhost") as connection:
        connection.sendall(head % len(prompt) + prompt)
        wait_until(lambda: not connections)


def test_an_unreadable_certificate_is_a_config_error(serve_text, tmp_path):
    path = tmp_path / "cert.pem"
    path.write_text("no certificate")
    with pytest.raises(ConfigError) as caught:
        serve_text(ssl_certfile=str(path), ssl_keyfile=str(path))
    assert caught.value.field == "server.ssl_certfile"


def test_a_port_in_use_is_a_config_error(serve_text):
    live = serve_text()
    with pytest.raises(ConfigError) as caught:
        serve_text(port=live.running.port)
    assert caught.value.field == "server.port"


ORIGIN = "https://chat.example.org"


def preflight(live, origin: str, path: str = "/v1/completions"):
    return requests.options(
        live.url + path,
        headers={
            "Origin": origin,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
        },
        timeout=10,
    )


def test_a_page_of_an_allowed_origin_may_ask_and_read(serve_text):
    live = serve_text(cors_origins=(ORIGIN,), api_key=("k",))
    reply = preflight(live, ORIGIN)
    assert reply.status_code == 200, "a preflight carries no key"
    assert reply.headers["Access-Control-Allow-Origin"] == ORIGIN
    assert "POST" in reply.headers["Access-Control-Allow-Methods"]
    assert "x-stainless-os" in reply.headers["Access-Control-Allow-Headers"].lower()
    headers = {"Origin": ORIGIN, "Authorization": "Bearer k"}
    for extra in ({}, {"stream": True}):
        reply = live.post("/v1/completions", {"prompt": "a", **extra}, headers=headers)
        assert reply.status_code == 200
        assert reply.headers["Access-Control-Allow-Origin"] == ORIGIN
        assert "x-request-id" in reply.headers["Access-Control-Expose-Headers"]
    refused = live.post("/v1/completions", {"prompt": "a"}, headers={"Origin": ORIGIN})
    assert refused.status_code == 401
    assert refused.headers["Access-Control-Allow-Origin"] == ORIGIN, "pages can read what is wrong"


def test_a_page_of_another_origin_may_not(serve_text):
    for live in (serve_text(cors_origins=(ORIGIN,)), serve_text()):
        for origin in ("https://evil.com", f"{ORIGIN}.evil.com", "null"):
            reply = preflight(live, origin)
            assert reply.status_code in (400, 403), origin
            assert "Access-Control-Allow-Origin" not in reply.headers
            reply = live.post("/generate", {"text": "a"}, headers={"Origin": origin})
            assert reply.status_code == 403
    assert live.engine.requests == []


LOCAL_ORIGINS = (
    *("http://localhost:3000", "http://localhost", "http://127.0.0.1:1", "https://[::1]:5173"),
    *("http://tauri.localhost", "tauri://localhost", "app://obsidian.md", "vscode-webview://1a2b"),
)


def test_local_pages_may_generate_and_list_models_and_no_more(serve_text):
    """Where no key is needed: a page of this machine is not a stranger, but not its user either."""
    live = serve_text()
    served = {(m, each.path) for each in list_endpoints(live.config) for m in each.methods}
    assert served >= LOCAL_CALLS, "each is an endpoint"
    for origin in LOCAL_ORIGINS:
        headers = {"Origin": origin}
        for extra in ({}, {"stream": True}):
            reply = live.post("/v1/completions", {"prompt": "a", **extra}, headers=headers)
            assert reply.status_code == 200, (origin, reply.text)
            assert reply.headers["Access-Control-Allow-Origin"] == origin
        for path in ("/v1/models", "/v1/models/tiny", "/api/tags"):
            reply = live.get(path, headers=headers)
            assert (reply.status_code, reply.headers.get("Access-Control-Allow-Origin")) == (
                200,
                origin,
            )
        reply = preflight(live, origin)
        assert (reply.status_code, reply.headers["Access-Control-Allow-Origin"]) == (200, origin)
    headers = {"Origin": LOCAL_ORIGINS[0]}
    for method, path in sorted(served - LOCAL_CALLS):
        if path in OPEN_PATHS or path == "/v1/models/{name:path}":
            continue
        reply = requests.request(method, live.url + path, json={}, headers=headers, timeout=10)
        assert (reply.status_code, "Access-Control-Allow-Origin" in reply.headers) == (403, False)
        assert "Access-Control-Allow-Origin" not in preflight(live, headers["Origin"], path).headers
    assert (
        requests.delete(f"{live.url}/v1/models/tiny", headers=headers, timeout=10).status_code
        == 403
    )


def test_local_pages_are_strangers_elsewhere(serve_text):
    """To a server with a key, beyond loopback or behind a proxy, and by origins like local ones."""
    open_one = serve_text(allowed_hosts=("proxy.example",))
    for live, origin, host in (
        *((serve_text(api_key=("k",)), origin, None) for origin in LOCAL_ORIGINS[::7]),
        (serve_text(host="0.0.0.0", allow_unauthenticated=True), LOCAL_ORIGINS[0], None),
        (open_one, LOCAL_ORIGINS[0], "proxy.example"),
        *(
            (open_one, origin, None)
            for origin in (
                *("null", "file://", "app:", "app", "data://localhost", "chrome-extension://abc"),
                *(
                    "http://localhost.evil.com",
                    "http://evil.com/localhost",
                    "http://localhost@e.com",
                ),
                *("http://128.0.0.1", "http://[::2]", "http://evil.com:localhost"),
            )
        ),
    ):
        headers = {"Origin": origin, "Authorization": "Bearer k"}
        headers |= {"Host": host} if host else {}
        reply = live.post("/v1/completions", {"prompt": "a"}, headers=headers)
        assert (reply.status_code, "Access-Control-Allow-Origin" in reply.headers) == (403, False)
        assert reply.json()["error"]["code"] == "origin_not_allowed"


def test_every_origin_on_demand_but_not_every_host(serve_text):
    live = serve_text(cors_origins=("*",))
    assert preflight(live, "https://any.where").headers["Access-Control-Allow-Origin"] == "*"
    headers = {"Origin": "https://any.where"}
    reply = live.post("/generate", {"text": "a"}, headers=headers)
    assert (reply.status_code, reply.headers["Access-Control-Allow-Origin"]) == (200, "*")
    rebound = live.post("/generate", {"text": "a"}, headers=headers | {"Host": "evil.com"})
    assert rebound.status_code == 400


def test_options_tells_the_methods(serve_text):
    live = serve_text()
    reply = requests.options(f"{live.url}/v1/completions", timeout=10)
    assert (reply.status_code, reply.headers["Allow"], reply.content) == (204, "POST", b"")
    assert set(
        requests.options(f"{live.url}/version", timeout=10).headers["Allow"].split(", ")
    ) == {
        "GET",
        "HEAD",
    }
    assert requests.options(f"{live.url}/nowhere", timeout=10).status_code == 404


def test_only_the_owner_or_an_admin_ends_requests_and_flushes(serve_text):
    """With several keys, one client's is no word over another's; an admin's is over all."""
    live = serve_text(api_key=("one", "two"), admin_api_key=("admin",))
    live.engine.hang = True

    def call(path, body, key):
        return live.post(path, body, headers={"Authorization": f"Bearer {key}"})

    answers = {}

    def ask(key):
        answers[key] = call("/v1/completions", {"prompt": "a", "request_id": "mine"}, key).json()

    asking = {key: threading.Thread(target=ask, args=(key,)) for key in ("one", "two")}
    for thread in asking.values():
        thread.start()
    wait_until(lambda: live.engine.num_held == 2)
    assert call("/abort_request", {"rid": "mine"}, "one").json() == {"num_aborted": 1}
    asking["one"].join(WAIT_S)
    assert answers["one"]["choices"][0]["finish_reason"] == "abort"
    assert call("/abort_request", {"abort_all": True}, "one").json() == {"num_aborted": 0}
    assert call("/flush_cache", None, "one").status_code == 403
    counts = [
        live.get("/expert_counts", headers={"Authorization": f"Bearer {key}"})
        for key in ("one", "admin")
    ]
    assert counts[0].status_code == 403
    assert counts[1].json()["counts"] == [[2, 0, 2]]
    assert live.engine.num_held == 1
    assert call("/flush_cache", None, "admin").status_code == 200
    assert call("/abort_request", {"abort_all": True}, "admin").json() == {"num_aborted": 1}
    asking["two"].join(WAIT_S)
    several = serve_text(api_key=("one", "two"))
    reply = several.post("/flush_cache", headers={"Authorization": "Bearer one"})
    assert reply.status_code == 403, "no admin key is no right for all"
    alone = serve_text(api_key=("one",))
    reply = alone.post("/flush_cache", headers={"Authorization": "Bearer one"})
    assert reply.status_code == 200, "all that is here is this client's"
