"""Moves bytes between the registered memory of processes: local, shm, cma and tcp.

``TransferEngine`` offers memory and reaches that of others; a ``Segment`` is such a process; a
``Batch`` of ``Transfer`` is the work. See docs/design/transfer.md and transfer_wire.md.
"""

from tandem.transfer.batch import Batch, Op, Transfer, TransferStatus
from tandem.transfer.buffer import Buffer, RemoteBuffer
from tandem.transfer.config import TransferConfig, TransportName
from tandem.transfer.engine import Notification, TransferEngine
from tandem.transfer.segment import Segment

__all__ = [
    "Batch",
    "Buffer",
    "Notification",
    "Op",
    "RemoteBuffer",
    "Segment",
    "Transfer",
    "TransferConfig",
    "TransferEngine",
    "TransferStatus",
    "TransportName",
]
