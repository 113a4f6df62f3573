"""Downloads of large files that continue where they stopped, in this process or an earlier one.

What has arrived lies beside the target in a file with the suffix ``PART``, which gets the target's
name when it is complete and its SHA-256 is the one wanted: a target that exists is whole.
"""

import fcntl
import hashlib
import os
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from tandem.core.errors import CapacityError, ConflictError, CorruptionError, PeerLostError

if TYPE_CHECKING:
    import httpx

__all__ = ["PART", "Progress", "download", "open_client"]

PART = ".incomplete"
WHERE = "models.download"
CHUNK_BYTES = 1 << 20
TIMEOUT_S = 30.0
"""Longest wait for a connection, and for the next bytes."""
ATTEMPTS = 3
"""Requests in a row that may bring nothing before the download fails."""
PAUSE_S = 1.0
"""Wait before the next request after one that brought nothing."""

Progress = Callable[[int, int, str], None]
"""``progress(done_bytes, total_bytes, what)``; ``total_bytes`` is 0 while unknown."""


def open_client() -> "httpx.Client":
    """Return a client that trusts the system's certificates and uses the environment's proxies."""
    import httpx

    context = ssl.create_default_context()
    return httpx.Client(verify=context, timeout=TIMEOUT_S, follow_redirects=True)


def download(
    client: "httpx.Client",
    url: str,
    path: Path,
    *,
    sha256: str,
    name: str = "",
    headers: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> None:
    """Download a file, or the rest of it; do nothing if ``path`` exists.

    A connection that breaks is replaced, and its successor asks for the bytes that are missing, as
    the next call does after this one failed or its process ended.

    Args:
        client: of ``open_client``; a redirect to another host gets no authorization.
        url: address of the file.
        path: file to make; missing folders are made.
        sha256: expected digest, in hexadecimal.
        name: the file's name for people; empty: that of ``path``.
        headers: further headers of the request.
        progress: called after each piece.

    Raises:
        PeerLostError: the server cannot be reached or refuses; what has arrived is kept.
        CorruptionError: the file is another one than wanted; what has arrived is removed.
        ConflictError: another process is downloading the same file.
        CapacityError: the disk is full; what has arrived is kept.
    """
    if path.exists():
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + PART)
        with _open_part(part) as file:
            # Its writer may have finished while this process waited for nothing but the open.
            if path.exists():
                part.unlink(missing_ok=True)
                return
            digest = _Download(client, url, file, headers or {}, progress, name or path.name).run()
            if digest != sha256:
                part.unlink()
                what = f"{url} has SHA-256 {digest}, not {sha256}: nothing of it was kept"
                raise CorruptionError(WHERE, what)
            os.fsync(file.fileno())
            part.rename(path)
    except PeerLostError:
        raise
    except OSError as error:
        what = f"{path} cannot be written: {error.strerror}: free space or choose another folder"
        raise CapacityError(WHERE, what) from error


@contextmanager
def _open_part(part: Path) -> Iterator[BinaryIO]:
    with part.open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            what = f"another process is downloading {part.with_suffix('')}: wait for it"
            raise ConflictError(WHERE, what) from None
        yield file


class _Download:
    """The requests for one file, each for what those before it did not bring."""

    def __init__(
        self,
        client: "httpx.Client",
        url: str,
        file: BinaryIO,
        headers: Mapping[str, str],
        progress: Progress | None,
        name: str,
    ) -> None:
        self._client = client
        self._url = url
        self._file = file
        # Ranges are of the file's own bytes, not of a compressed form.
        self._headers = {**headers, "Accept-Encoding": "identity"}
        self._progress = progress
        self._name = name
        self._digest = hashlib.sha256()
        self._done = 0

    def run(self) -> str:
        """Fetch what is missing; return the digest of all bytes."""
        import httpx

        self._file.seek(0)
        while chunk := self._file.read(CHUNK_BYTES):
            self._take(chunk)
        failures = 0
        while True:
            before = self._done
            try:
                self._request()
            except httpx.RequestError as error:
                failures = 0 if self._done > before else failures + 1
                if failures == ATTEMPTS:
                    what = f"{self._url}: {error or type(error).__name__} after {self._done} bytes"
                    raise PeerLostError(WHERE, f"{what}: try again, it resumes") from error
                if failures:
                    time.sleep(PAUSE_S)
            else:
                return self._digest.hexdigest()

    def _request(self) -> None:
        from httpx import codes

        headers = self._headers | ({"Range": f"bytes={self._done}-"} if self._done else {})
        with self._client.stream("GET", self._url, headers=headers) as response:
            if response.status_code == codes.REQUESTED_RANGE_NOT_SATISFIABLE and self._done:
                return  # All of it was there.
            if response.status_code not in (codes.OK, codes.PARTIAL_CONTENT):
                what = f"{self._url}: HTTP status {response.status_code} after {self._done} bytes"
                raise PeerLostError(WHERE, f"{what}: try again, it resumes")
            if response.status_code == codes.OK and self._done:
                self._start_anew()  # The server knows no ranges.
            total = self._done + int(response.headers.get("Content-Length", 0))
            for chunk in response.iter_raw():
                self._file.write(chunk)
                self._file.flush()  # For whoever continues after this process was killed.
                self._take(chunk)
                if self._progress is not None:
                    self._progress(self._done, total, self._name)

    def _take(self, chunk: bytes) -> None:
        self._digest.update(chunk)
        self._done += len(chunk)

    def _start_anew(self) -> None:
        self._file.truncate(0)
        self._digest, self._done = hashlib.sha256(), 0
