"""Numbers that a master gives to objects and grants: above all that any master gave before."""

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
"""Above ours. Each start of a master and each term takes one: so many while our note of them was
lost are past belief, and 128 such jumps are possible before versions run out."""


class Versions:
    """The versions of one master: its epoch, and a count within it.

    Args:
        epoch: above that of every earlier master of this store; raised further if a host has
            seen a higher one, unless there are elections.
        term: the elected one; None for a single master, which always leads.
    """

    def __init__(self, epoch: int, term: "Term | None") -> None:
        self.epoch = epoch
        self._term = term
        self._counter = 0
        self._outbid: list[tuple[int, int]] = []
        """Versions given in earlier epochs: above the first version, up to the second."""

    def take(self, count: int = 1) -> int:
        """Return the first of so many consecutive versions, above all that were given before."""
        self._counter += count
        return self.epoch << layout.VERSION_BITS | self._counter - count + 1

    @property
    def newest(self) -> int:
        """The highest that this master gave, or could have found given."""
        return self.epoch << layout.VERSION_BITS | self._counter

    def has_given(self, version: int, *, since: int) -> bool:
        """Return True if this master gave a version after ``newest`` was ``since``."""
        in_epoch = version > self.epoch << layout.VERSION_BITS
        return version > since and (in_epoch or any(a < version <= b for a, b in self._outbid))

    def order_epoch(self) -> int:
        """Return the epoch that orders bear. Raises: PeerLostError after the end of the term."""
        if self._term is not None and not self._term.holds():
            raise PeerLostError("store.order", f"the term of epoch {self.epoch} has ended")
        return self.epoch

    def outbid(self, epoch: int) -> None:
        """Note that a host has obeyed a master of ``epoch``: go above it.

        Raises: ConflictError if it is too far above ours to be that of a master;
            PeerLostError if that takes another election; epochs are not ours to choose then.
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
