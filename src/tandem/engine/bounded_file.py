"""A new file of bounded size, for records that a serving process writes without risk.

When the file is full or the disk fails, recording ends with a line in the log; serving continues.
"""

import logging
import os
from pathlib import Path
from typing import BinaryIO

from tandem.core.errors import ConfigError

__all__ = ["BoundedFile"]

logger = logging.getLogger(__name__)

NAMES_TRIED = 64


class BoundedFile:
    """A file of bounded size that only its owner (the user of this process) may read.

    Args:
        path: of the file to create. An existing file is not overwritten: ``path.1``, ``path.2``,
            ... is created instead.
        max_bytes: largest size of the file; the first write that would exceed it closes the file.
        name: name of the record, used in log lines and errors.
        field: name of the setting that gives the path, used in errors.
        flushes: True to flush after each write, so that readers see it at once.

    Raises: ConfigError (the file cannot be made).
    """

    def __init__(
        self, path: Path, max_bytes: int, *, name: str, field: str, flushes: bool = True
    ) -> None:
        self._name, self._flushes = name, flushes
        self.path, file = _make_file(path, field)
        self._file: BinaryIO | None = file
        self._left = max_bytes
        logger.info("event=%s path=%s", name, self.path)

    def write(self, data: bytes) -> None:
        """Append bytes; do nothing if the file is full, failed or closed."""
        if self._file is None:
            return
        if len(data) > self._left:
            logger.warning("event=%s_full path=%s", self._name, self.path)
            self.close()
            return
        try:
            self._file.write(data)
            if self._flushes:
                self._file.flush()
        except OSError as error:
            logger.warning("event=%s_failed path=%s error=%s", self._name, self.path, error)
            self.close()
        self._left -= len(data)

    @property
    def is_open(self) -> bool:
        """True until the file is full, failed or closed."""
        return self._file is not None

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._file is not None:
            file, self._file = self._file, None
            try:
                file.close()
            except OSError as error:
                logger.warning("event=%s_failed path=%s error=%s", self._name, self.path, error)


def _make_file(path: Path, field: str) -> tuple[Path, BinaryIO]:
    for number in range(NAMES_TRIED):
        name = path.with_name(f"{path.name}.{number}") if number else path
        try:
            handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            continue
        except OSError as error:
            what = f"{name}: {error.strerror}: give a file in a folder that can be written"
            raise ConfigError("engine.make_file", what, field=field) from error
        return name, os.fdopen(handle, "wb")
    what = f"{path} and {NAMES_TRIED - 1} files beside it exist: remove some"
    raise ConfigError("engine.make_file", what, field=field)
