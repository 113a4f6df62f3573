"""A hub on loopback whose one file never ends, for a download that is to be broken off."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

REPO = "someone/slow"
SIZE_BYTES = 1 << 30
_FILE = "model.safetensors"
_PIECE = bytes(1 << 16)
_PAUSE_S = 0.05


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "_Hub"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(sends_body=False)

    def do_GET(self) -> None:
        self.answer(sends_body=True)

    def answer(self, *, sends_body: bool) -> None:
        path = self.path.split("?")[0]
        is_file = path.startswith(f"/{REPO}/resolve/")
        if "/tree" in path:
            found = [{"type": "file", "path": _FILE, "size": SIZE_BYTES, "oid": "0" * 40}]
        else:
            files = [{"rfilename": _FILE}]
            found = {"id": REPO, "modelId": REPO, "sha": "0" * 40, "siblings": files}
        body = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("ETag", f'"{hashlib.sha256(_PIECE).hexdigest()}"')
        self.send_header("Content-Length", str(SIZE_BYTES if is_file else len(body)))
        self.end_headers()
        if not sends_body:
            return
        with contextlib.suppress(OSError):  # The client left, which is what this is for.
            if not is_file:
                self.wfile.write(body)
            while is_file and not self.server.ended.wait(_PAUSE_S):
                self.wfile.write(_PIECE)
        self.close_connection = is_file


class _Hub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.ended = threading.Event()


@contextlib.contextmanager
def serve_slow_hub() -> Iterator[str]:
    """Give the URL of a hub that has ``REPO``."""
    hub = _Hub()
    thread = threading.Thread(target=hub.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{hub.server_address[1]}"
    finally:
        hub.ended.set()
        hub.shutdown()
        hub.server_close()
        thread.join(timeout=60)
