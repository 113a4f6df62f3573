"""The list of a process's corrupt files, for its log and its status."""

import logging

__all__ = ["CorruptionLog"]

logger = logging.getLogger(__name__)

MAX_NAMED = 32
"""Limit of names in the list. Beyond it only a count is kept."""


class CorruptionLog:
    """The names of the store's files, and of objects within them, that were found corrupt, oldest
    first. The reasons go to the log.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        """The names, oldest first. Beyond the limit the last entry gives the number of further
        ones.
        """
        self._num_more = 0

    def note(self, name: str, reason: object) -> None:
        """Log a corrupt file, or a corrupt object within one, and add its name to the list once."""
        logger.error("event=damaged name=%r reason=%s", name, reason)
        if name in self.names:
            return
        if len(self.names) < MAX_NAMED:
            self.names.append(name)
            return
        self._num_more += 1
        self.names[MAX_NAMED:] = [f"and {self._num_more} more, see the log"]
