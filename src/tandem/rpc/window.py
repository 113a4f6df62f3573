"""Flow control towards one peer: the sender's window and the reader's ledger.

ZeroMQ limits its queues by messages instead of bytes, and does not show how much the peer has read.
So each side counts what it has read and reports the totals now and then. Messages that were sent
and not yet reported as read are *unread*, in whatever queue they wait, and their number and bytes
are limited.
"""

import threading

from tandem.core.errors import CorruptionError
from tandem.rpc.config import RpcConfig

__all__ = ["ReadLedger", "SendWindow", "count_window"]


def count_window(config: RpcConfig) -> int:
    """Return the limit of unread messages: twice ``max_pending_per_peer``.

    The answers to all calls that one peer may have running then fit beside as many events or
    refusals. With one limit for both, sending the last answer could lose the peer.
    """
    return 2 * config.max_pending_per_peer


class SendWindow:
    """Counts the messages that the peer has not read. Thread-safe, since any thread may push
    events.
    """

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
        """Number of messages sent that the peer has not reported as read."""
        return self._sent_messages - self._read_messages

    @property
    def unread_bytes(self) -> int:
        """Bytes sent that the peer has not reported as read."""
        return self._sent_bytes - self._read_bytes

    def admit(self, size_bytes: int) -> bool:
        """Count one message as sent. If it does not fit in the window, return False without
        counting it.
        """
        with self._lock:
            if self.unread_messages >= self.max_messages:
                return False
            if self.unread_bytes + size_bytes > self.max_bytes:
                return False
            self._sent_messages += 1
            self._sent_bytes += size_bytes
            return True

    def acknowledge(self, messages_read: int, bytes_read: int) -> None:
        """Record the totals that the peer reports as read. Totals below known ones are ignored.

        Raises: CorruptionError if the peer reports more than was sent.
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
    """Counts what was read from a peer, and decides when to report the totals.

    Args:
        window_messages: the sender's window. A report is due after a quarter of it, so that a
            reader who keeps up never lets the window fill, at the price of four reports for each
            window.
        window_bytes: the sender's window in bytes.
    """

    def __init__(self, window_messages: int, window_bytes: int) -> None:
        self.every_messages = max(1, window_messages // 4)
        self.every_bytes = max(1, window_bytes // 4)
        self.messages = 0
        self.bytes = 0
        self._told_messages = 0
        self._told_bytes = 0

    def note_read(self, size_bytes: int) -> bool:
        """Count one message as read. Return True if a report to the peer is due."""
        self.messages += 1
        self.bytes += size_bytes
        return (
            self.messages - self._told_messages >= self.every_messages
            or self.bytes - self._told_bytes >= self.every_bytes
        )

    def note_told(self) -> None:
        """Note that the current totals were reported to the peer."""
        self._told_messages = self.messages
        self._told_bytes = self.bytes
