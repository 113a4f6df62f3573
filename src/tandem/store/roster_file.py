"""The membership of a store with a single master: two files beside its socket.

Format: docs/design/store_roster.md. The roster is replaced as a whole, tombstones are appended.
Every line has a checksum. One process at a time writes: the one that serves the socket.
"""

import asyncio
import logging
import os
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from tandem.core.errors import InternalError
from tandem.store.roster import Batch, Roster, SavedRoster, Tombstone

__all__ = ["FileRosterStore"]

logger = logging.getLogger(__name__)


class FileRosterStore:
    """A ``RosterStore`` in files ``members.NAME`` and ``tombstones.NAME`` of a folder of ours."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._members = folder / f"members.{name}"
        self._tombstones = folder / f"tombstones.{name}"

    async def load(self) -> SavedRoster:
        """See ``RosterStore``."""
        return await asyncio.to_thread(self._load)

    async def save(self, roster: Roster) -> None:
        """See ``RosterStore``."""
        line = _pack_line(msgspec.json.encode(roster))
        await asyncio.to_thread(self._replace, self._members, line)

    async def add(self, batch: Batch) -> None:
        """See ``RosterStore``."""
        await asyncio.to_thread(self._append, _pack_line(msgspec.json.encode(batch)))

    async def drop(self, below: int) -> None:
        """See ``RosterStore``."""
        await asyncio.to_thread(self._drop, below)

    def _load(self) -> SavedRoster:
        try:
            lines = _read_lines(self._members)
            if lines is None:
                return SavedRoster(None, self._load_tombstones(), is_new=True)
            roster = msgspec.json.decode(lines[0], type=Roster) if lines else None
        except msgspec.MsgspecError:
            roster = None
        except OSError as error:
            raise _describe(self._members, error) from None
        if roster is None:
            logger.error("event=roster_damaged path=%s", self._members)
        return SavedRoster(roster, self._load_tombstones())

    def _load_tombstones(self) -> list[Batch]:
        try:
            lines = _read_lines(self._tombstones) or []
        except OSError as error:
            raise _describe(self._tombstones, error) from None
        batches: list[Batch] = []
        for line in lines:
            try:
                batches.append(msgspec.json.decode(line, type=tuple[int, list[Tombstone]]))
            except msgspec.MsgspecError:
                logger.exception("event=tombstones_unreadable path=%s", self._tombstones)
        return batches

    def _append(self, line: bytes) -> None:
        try:
            is_made = not self._tombstones.exists()
            with self._tombstones.open("ab") as file:
                # An attempt that failed may have left half a line.
                file.write(b"\n" + line)
                file.flush()
                os.fsync(file.fileno())
            if is_made:
                self._sync_folder()
        except OSError as error:
            raise _describe(self._tombstones, error) from None

    def _drop(self, below: int) -> None:
        kept = [batch for batch in self._load_tombstones() if batch[0] >= below]
        lines = (_pack_line(msgspec.json.encode(batch)) for batch in kept)
        self._replace(self._tombstones, b"".join(lines))

    def _replace(self, path: Path, data: bytes) -> None:
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            with draft.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
            self._sync_folder()
        except OSError as error:
            raise _describe(path, error) from None

    def _sync_folder(self) -> None:
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _pack_line(body: bytes) -> bytes:
    """Return the body with its checksum; JSON has no line breaks of its own."""
    return b"%08x %s\n" % (zlib.crc32(body), body)


def _read_lines(path: Path) -> Sequence[bytes] | None:
    """Return the bodies of lines that hold together; None if there is no file."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    return list(_check_lines(path, data.split(b"\n")))


def _check_lines(path: Path, lines: Sequence[bytes]) -> Iterable[bytes]:
    for i, line in enumerate(lines):
        if not line:
            continue
        head, _, body = line.partition(b" ")
        if head == b"%08x" % zlib.crc32(body):
            yield body
        else:
            # Torn, if it is the last one: whoever wrote it had no answer, nor had its client.
            logger.error("event=roster_line_damaged path=%s line=%d", path, i + 1)


def _describe(path: Path, error: OSError) -> InternalError:
    return InternalError("store.roster", f"{path}: {error.strerror or error}")
