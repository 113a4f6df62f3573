"""Version numbers of objects and grants, each above all that any master gave before."""

import logging
from typing import TYPE_CHECKING

from tandem.core.errors import ConflictError, PeerLostError
from tandem.store.formats import layout
from tandem.store.formats.headers import MAX_EPOCH

if TYPE_CHECKING:
    from tandem.store.election import Term

__all__ = ["MAX_EPOCH_JUMP", "Versions"]

logger = logging.getLogger(__name__)

MAX_EPOCH_JUMP = 2**16
"""Largest accepted distance of a seen epoch above this master's. Each start and each term adds one,
so a larger one is a corruption. 128 jumps of this size exhaust the versions.
"""


class Versions:
    """The version numbers that one master gives: its epoch (number among the masters), and a count
    within the epoch.

    Args:
        epoch: above the epoch of every earlier master of this store; raised further if a host has
            seen a higher one, unless there are elections.
        term: the elected term; None for a single master, which always leads.
    """

    def __init__(self, epoch: int, term: "Term | None") -> None:
        self.epoch = epoch
        self._term = term
        self._counter = 0
        self._outbid: list[tuple[int, int]] = []
        """Ranges of versions given in lower epochs, before this master raised its epoch: (number
        below the first version of the range, its last version).
        """

    def take(self, count: int = 1) -> int:
        """Return the first of ``count`` consecutive versions, above all that were given before."""
        self._counter += count
        return self.epoch << layout.VERSION_BITS | self._counter - count + 1

    @property
    def newest(self) -> int:
        """The highest version that this master has given or could have found in a host's inventory
        (list of objects).
        """
        return self.epoch << layout.VERSION_BITS | self._counter

    def has_given(self, version: int, *, since: int) -> bool:
        """Return True if this master gave the version after ``newest`` was ``since``."""
        in_epoch = version > self.epoch << layout.VERSION_BITS
        return version > since and (in_epoch or any(a < version <= b for a, b in self._outbid))

    def order_epoch(self) -> int:
        """Return the epoch (this master's number) that its orders to hosts carry. Raises:
        PeerLostError after the end of the term.
        """
        if self._term is not None and not self._term.holds():
            raise PeerLostError("store.order", f"the term of epoch {self.epoch} has ended")
        return self.epoch

    def outbid(self, epoch: int) -> None:
        """Raise this master's epoch (number) above one that a host has obeyed.

        Raises: ConflictError if ``epoch`` is implausibly far above this master's; PeerLostError if
            there are elections: the term ends, and a new election chooses the epoch.
        """
        if epoch - self.epoch > MAX_EPOCH_JUMP or epoch >= MAX_EPOCH:
            raise ConflictError(
                "store.join",
                f"epoch {epoch} was seen, ours is {self.epoch}: more than {MAX_EPOCH_JUMP} apart, "
                "which no number of starts explains; remove the files of that host",
                field="epoch",
            )
        if self._term is not None:
            self._term.resign(min_epoch=epoch)
            raise PeerLostError("store.join", f"{epoch} was obeyed: elected anew above it")
        self._outbid.append((self.epoch << layout.VERSION_BITS, self.newest))
        self.epoch = epoch + 1
        self._counter = 0
        logger.info("event=epoch_raised epoch=%d", self.epoch)
