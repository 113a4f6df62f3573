"""Flow control to one peer: the sender's window and the reader's ledger.

ZeroMQ bounds its queues by messages, not bytes, and hides how much of them the peer has read.
So each side counts what it has read and tells it now and then; what was sent and not yet told as
read is *unread*, wherever it waits (our queue, the kernel, theirs), and that is what is bounded.
"""

import threading

from tandem.core.errors import CorruptionError
from tandem.rpc.config import RpcConfig

__all__ = ["ReadLedger", "SendWindow", "count_window"]


def count_window(config: RpcConfig) -> int:
    """Messages that may be unread: twice ``max_pending_per_peer``.

    So the answers of all the calls that one peer may have running fit beside as many events or
    refusals; with the same limit for both, answering the last of them could lose the peer.
    """
    return 2 * config.max_pending_per_peer


class SendWindow:
    """Counts what the peer has not yet read. Thread-safe: events are pushed from any thread."""

    def __init__(self, max_messages: int, max_bytes: int) -> None:
        self.max_messages = max_messages
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._sent_messages = 0
        self._sent_bytes = 0
        self._read_messages = 0
        self._read_bytes = 0

    @property
    def unread_messages(self) -> int:
        """Messages sent and not yet told as read."""
        return self._sent_messages - self._read_messages

    @property
    def unread_bytes(self) -> int:
        """Bytes sent and not yet told as read."""
        return self._sent_bytes - self._read_bytes

    def admit(self, size_bytes: int) -> bool:
        """Count one message as sent; return False, counting nothing, if it does not fit."""
        with self._lock:
            if self.unread_messages >= self.max_messages:
                return False
            if self.unread_bytes + size_bytes > self.max_bytes:
                return False
            self._sent_messages += 1
            self._sent_bytes += size_bytes
            return True

    def acknowledge(self, messages_read: int, bytes_read: int) -> None:
        """Take the peer's totals; older ones than known are ignored.

        Raises: CorruptionError if the peer claims to have read what was never sent.
        """
        with self._lock:
            if messages_read > self._sent_messages or bytes_read > self._sent_bytes:
                raise CorruptionError(
                    "rpc.acknowledge",
                    f"peer claims {messages_read} messages, {bytes_read} bytes read; sent were "
                    f"{self._sent_messages} and {self._sent_bytes}",
                )
            self._read_messages = max(self._read_messages, messages_read)
            self._read_bytes = max(self._read_bytes, bytes_read)


class ReadLedger:
    """Counts what was read of a peer and says when the peer should be told.

    Args:
        window_messages: the sender's window; told at a quarter of it, so that a reader who keeps
            up never lets it fill, at the price of four beats a window.
        window_bytes: likewise, in bytes.
    """

    __slots__ = (
        "_told_bytes",
        "_told_messages",
        "bytes",
        "every_bytes",
        "every_messages",
        "messages",
    )

    def __init__(self, window_messages: int, window_bytes: int) -> None:
        self.every_messages = max(1, window_messages // 4)
        self.every_bytes = max(1, window_bytes // 4)
        self.messages = 0
        self.bytes = 0
        self._told_messages = 0
        self._told_bytes = 0

    def note_read(self, size_bytes: int) -> bool:
        """Count one message; return whether the peer should be told now."""
        self.messages += 1
        self.bytes += size_bytes
        return (
            self.messages - self._told_messages >= self.every_messages
            or self.bytes - self._told_bytes >= self.every_bytes
        )

    def note_told(self) -> None:
        """Note that the present totals were sent to the peer."""
        self._told_messages = self.messages
        self._told_bytes = self.bytes
