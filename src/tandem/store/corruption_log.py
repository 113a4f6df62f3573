"""The list of a process's damaged files, for its log and its status."""

import logging

__all__ = ["CorruptionLog"]

logger = logging.getLogger(__name__)

MAX_NAMED = 32
"""Beyond this number only the count is reported."""


class CorruptionLog:
    """The files and records that were damaged, oldest first; what each is goes to the log."""

    def __init__(self) -> None:
        self.names: list[str] = []
        """The first ones; the last says how many more there are."""
        self._num_more = 0

    def note(self, name: str, reason: object) -> None:
        """Name a damaged file or record, once."""
        logger.error("event=damaged name=%r reason=%s", name, reason)
        if name in self.names:
            return
        if len(self.names) < MAX_NAMED:
            self.names.append(name)
            return
        self._num_more += 1
        self.names[MAX_NAMED:] = [f"and {self._num_more} more, see the log"]
