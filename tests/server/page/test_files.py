"""The page's files: routes, headers, and that they ask for nothing that there is not.

Method: a real server over the fake engine, asked byte by byte where a client would tidy the path;
the sources are read for what a strict policy forbids, and for every endpoint and metric they name.
"""

import http.client
import re
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from fake_engine import make_info
from serving import LiveServers

from tandem.core.wire import InstanceInfo
from tandem.server.api.endpoints import list_endpoints
from tandem.server.config import ServerConfig
from tandem.server.page.files import PAGE_ENDPOINTS, list_page_routes
from tandem.server.telemetry.metrics import METRICS

STATIC = Path(str(files("tandem.server.page") / "static"))
OWN = sorted(STATIC.glob("js/*.js"))
PATHS = sorted(route.path for route in list_page_routes())


@pytest.fixture(scope="module")
def locked(tokenizer):
    with LiveServers(tokenizer) as servers:
        yield servers.start(api_key=("secret-key",))


def fetch(live, path: str, **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
    """Ask for a path as it is written."""
    connection = http.client.HTTPConnection(urlsplit(live.url).netloc, timeout=10)
    try:
        connection.request("GET", path, headers=headers)
        reply = connection.getresponse()
        return reply, reply.read()
    finally:
        connection.close()


def test_every_file_is_served_without_a_key_and_under_the_policy(locked):
    assert {"/", "/page/js/app.js", "/page/css/base.css", "/page/icon.svg"} < set(PATHS)
    for path in PATHS:
        reply, body = fetch(locked, path)
        assert reply.status == 200, path
        on_disk = STATIC / ("index.html" if path == "/" else path.removeprefix("/page/"))
        assert body == on_disk.read_bytes()
        assert reply.headers["x-content-type-options"] == "nosniff"
        policy = dict(
            directive.split(" ", 1)
            for directive in reply.headers["content-security-policy"].split("; ")
        )
        assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
        allowed = set(" ".join(policy.values()).split())
        assert allowed == {"'none'", "'self'", "'script'", "dompurify"}
        kind = {"js": "text/javascript", "mjs": "text/javascript", "css": "text/css"}
        expected = kind.get(path.rpartition(".")[2])
        if expected is not None:
            assert reply.headers["content-type"].startswith(expected), path
    assert fetch(locked, "/server_info")[0].status == 401
    assert fetch(locked, "/v1/models", authorization="Bearer secret-key")[0].status == 200


def test_a_file_that_did_not_change_is_not_sent_again(locked):
    reply, body = fetch(locked, "/page/js/app.js", **{"accept-encoding": "gzip"})
    assert reply.headers["content-encoding"] == "gzip"
    assert len(body) < len((STATIC / "js/app.js").read_bytes())
    again, nothing = fetch(locked, "/page/js/app.js", **{"if-none-match": reply.headers["etag"]})
    assert (again.status, nothing) == (304, b"")


@pytest.mark.parametrize(
    "path",
    [
        "/page/../files.py",
        "/page/js/../../files.py",
        "/page/%2e%2e/files.py",
        "/page/..%2f..%2fapp.py",
        "/page//etc/passwd",
        "/page/js",
        "/page/",
        "/page/index.html",
        "/page/js/app.js%00",
        "//page/js/app.js",
    ],
)
def test_no_other_path_leads_to_a_file(locked, path):
    for key in ({}, {"authorization": "Bearer secret-key"}):
        reply, body = fetch(locked, path, **key)
        assert reply.status == (404 if key else 401)
        assert b"import" not in body


class _Strict(HTMLParser):
    def handle_starttag(self, tag, attrs):
        names = {name for name, _ in attrs}
        assert tag != "style"
        assert "style" not in names
        assert not [name for name in names if name.startswith("on")]
        for name, value in attrs:
            if name in ("src", "href"):
                assert value.startswith(("/page/", "#")), value
        if tag == "script":
            assert "src" in names


def test_the_page_has_nothing_inline_and_no_other_host():
    _Strict().feed((STATIC / "index.html").read_text())
    assert OWN
    for script in OWN:
        text = script.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|\beval\(|new Function", text)
        assert not re.search(r"(?:local|session)Storage|document\.cookie|indexedDB", text)
        hosts = set(re.findall(r"https?://[^\s\"'`)]+", text))
        assert hosts <= {"http://www.w3.org/2000/svg"}, script
        for module in re.findall(r'from "([^"]+)"', text):
            assert module in PATHS, module


def test_what_the_page_asks_for_exists():
    served = {endpoint.path for endpoint in list_endpoints(ServerConfig())}
    assert set(PAGE_ENDPOINTS) <= served
    asked = set()
    for script in OWN:
        calls = re.findall(r"(?:ask|askJson|fetch)\(\s*[\"`](/[^\"`]*)", script.read_text())
        asked |= {re.sub(r"\$\{.*?\(id\)\}", "{id:path}", path) for path in calls}
    assert asked == set(PAGE_ENDPOINTS)


def test_metrics_and_fields_that_the_page_reads_exist():
    text = (STATIC / "js/live.js").read_text()
    read = set(re.findall(r'(?:total|buckets)\(found, "(\w+)"', text))
    read |= {name.removeprefix("tandem:") for name in re.findall(r'"(tandem:\w+)"', text)}
    assert len(read) > 8
    assert read <= {spec.name.removeprefix("tandem:") for spec in METRICS}
    info = make_info()
    placement = (STATIC / "js/placement.js").read_text()
    for name in set(re.findall(r"\binfo\.(\w+)", placement)):
        assert name in InstanceInfo.__struct_fields__, name
    assert info.placement == []
