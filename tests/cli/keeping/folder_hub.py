"""A hub on loopback that has one repository: the files of a folder, kept as large files are."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextlib.contextmanager
def serve_folder_hub(repo: str, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Give the hub's address, and the names of the files that were fetched from it so far."""
    fetched: list[str] = []
    digests = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.iterdir()}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(sends_body=False)

        def do_GET(self) -> None:
            self.answer(sends_body=True)

        def answer(self, *, sends_body: bool) -> None:
            path = self.path.split("?")[0]
            name, status = path.rpartition("/")[2], 200
            if path.startswith(f"/{repo}/resolve/") and name in digests:
                body = (folder / name).read_bytes()
                if sends_body:
                    fetched.append(name)
            elif path.startswith(f"/api/models/{repo}/tree/"):
                body = json.dumps([self.describe(each) for each in digests]).encode()
            elif path.startswith(f"/api/models/{repo}"):
                files = [{"rfilename": n, "size": self.describe(n)["size"]} for n in digests]
                found = {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": files}
                body = json.dumps(found).encode()
            else:
                status, body = 404, b""
            self.send_response(status)
            self.send_header("X-Repo-Commit", COMMIT)
            if name in digests:
                self.send_header("ETag", f'"{digests[name]}"')
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if sends_body:
                with contextlib.suppress(OSError):
                    self.wfile.write(body)

        @staticmethod
        def describe(name: str) -> dict[str, object]:
            size = (folder / name).stat().st_size
            return {"type": "file", "path": name, "size": size, "oid": digests[name][:40]}

    hub = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.daemon_threads = True
    thread = threading.Thread(target=hub.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{hub.server_address[1]}", fetched
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()
