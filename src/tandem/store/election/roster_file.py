"""The roster of a store with a single master: two files beside the master's socket.

Format: docs/design/store/store_roster.md. The roster file is replaced as a whole, tombstones are
appended. Each line is written twice, with a checksum. Only the process that serves the socket
writes.
"""

import os
from pathlib import Path

import msgspec

from tandem.core.errors import InternalError
from tandem.store.corruption_log import CorruptionLog
from tandem.store.election.roster import Batch, Roster, SavedRoster, Tombstone
from tandem.store.formats.headers import pack_line, parse_lines
from tandem.store.tasks import in_thread

__all__ = ["FileRosterStore"]


class FileRosterStore:
    """A ``RosterStore`` (storage of a store's hosts and removals) in the files ``members.NAME`` and
    ``tombstones.NAME`` of a folder.

    Args:
        folder: a folder that only this user can enter.
        name: the master's name, as part of a file name.
        corruption: the log of corrupt files to extend; None for a new one.
    """

    def __init__(self, folder: Path, name: str, corruption: CorruptionLog | None = None) -> None:
        self._folder = folder
        self._members = folder / f"members.{name}"
        self._tombstones = folder / f"tombstones.{name}"
        self._corruption = CorruptionLog() if corruption is None else corruption

    @in_thread
    def load(self) -> SavedRoster:
        """Read the roster (the list of hosts) and all tombstones (removals of objects) from the
        files. Raises also: UnsupportedError if a later version wrote them.
        """
        lines = self._read_lines(self._members, "roster")
        tombstones = self._load_tombstones()
        if lines is None:
            # The file of tombstones (removals) is created with the first roster (list of hosts). If
            # it exists without a roster file, the roster was lost.
            return SavedRoster(None, tombstones, is_new=not self._tombstones.exists())
        try:
            return SavedRoster(msgspec.json.decode(lines[0], type=Roster), tombstones)
        except (IndexError, msgspec.MsgspecError) as error:
            self._corruption.note("roster", f"{self._members}: no copy can be read: {error}")
            return SavedRoster(None, tombstones)

    @in_thread
    def save(self, roster: Roster) -> None:
        """Replace the file of the roster (the list of hosts) atomically, and sync it to the
        disk.
        """
        self._replace(self._members, _pack(roster))
        if not self._tombstones.exists():
            self._append(b"")

    @in_thread
    def add(self, batch: Batch) -> None:
        """Append tombstones (removals of objects) to their file, and sync it to the disk."""
        self._append(_pack(batch))

    @in_thread
    def drop(self, below: int) -> None:
        """Rewrite the tombstone file without the tombstones (removals of objects) of rounds
        (writes of the roster) numbered below ``below``.
        """
        kept = [batch for batch in self._load_tombstones() if batch[0] >= below]
        self._replace(self._tombstones, b"".join(map(_pack, kept)))

    def _load_tombstones(self) -> list[Batch]:
        batches: list[Batch] = []
        for line in self._read_lines(self._tombstones, "tombstones") or []:
            try:
                batches.append(msgspec.json.decode(line, type=tuple[int, list[Tombstone]]))
            except msgspec.MsgspecError as error:
                self._corruption.note("tombstones", f"{self._tombstones}: {error}")
        return batches

    def _read_lines(self, path: Path, name: str) -> list[bytes] | None:
        """Return the lines of a file, each of which is stored twice; None if the file is missing.
        If a copy of a line is corrupt or missing, the file is rewritten.
        """
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _describe(path, error) from None
        bodies, num_damaged = parse_lines(data, str(path))
        if num_damaged:
            self._corruption.note(name, f"{num_damaged} lines of {path}")
        whole = b"".join(map(pack_line, bodies))
        if bodies and data != whole:
            self._replace(path, whole)
        return bodies

    def _append(self, lines: bytes) -> None:
        try:
            is_made = not self._tombstones.exists()
            with self._tombstones.open("ab") as file:
                begin = file.tell()
                try:
                    file.write(lines)
                    file.flush()
                    os.fsync(file.fileno())
                except OSError:
                    # Undo a partial write, since half a line would be reported as corrupt. If this
                    # fails too, the rest is read as torn.
                    os.truncate(self._tombstones, begin)
                    raise
            if is_made:
                self._sync_folder()
        except OSError as error:
            raise _describe(self._tombstones, error) from None

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


def _pack(content: Roster | Batch) -> bytes:
    return pack_line(msgspec.json.encode(content))


def _describe(path: Path, error: OSError) -> InternalError:
    return InternalError("store.roster", f"{path}: {error.strerror or error}")
