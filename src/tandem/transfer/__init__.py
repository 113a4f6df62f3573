"""Moves bytes between registered memory of processes and files: local, shm, cma, tcp, file.

A ``TransferEngine`` offers its memory to others and reaches theirs; a ``Segment`` is the memory of
a process, a ``FileSegment`` a file; a ``Batch`` of ``Transfer`` objects is submitted. See
docs/design/transfer/transfer.md and transfer_wire.md. Importing this package or its ``config`` does
not load the extension; the first use of any other name does.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tandem.transfer.config import TransferConfig, TransportName

if TYPE_CHECKING:
    from tandem.transfer.batch import Batch, Op, PreparedBatch, Transfer, TransferStatus
    from tandem.transfer.buffer import Buffer, RemoteBuffer
    from tandem.transfer.calls import MAX_CALL_BYTES, Call, CallHandler, PendingCall
    from tandem.transfer.engine import Notification, TransferEngine
    from tandem.transfer.lane import EngineLanes
    from tandem.transfer.polling_loop import PollingLoop
    from tandem.transfer.segment import FileSegment, Segment

__all__ = [
    "MAX_CALL_BYTES",
    "Batch",
    "Buffer",
    "Call",
    "CallHandler",
    "EngineLanes",
    "FileSegment",
    "Notification",
    "Op",
    "PendingCall",
    "PollingLoop",
    "PreparedBatch",
    "RemoteBuffer",
    "Segment",
    "Transfer",
    "TransferConfig",
    "TransferEngine",
    "TransferStatus",
    "TransportName",
]

_HOMES = {
    "MAX_CALL_BYTES": "calls",
    "Batch": "batch",
    "Buffer": "buffer",
    "Call": "calls",
    "CallHandler": "calls",
    "EngineLanes": "lane",
    "FileSegment": "segment",
    "Notification": "engine",
    "Op": "batch",
    "PendingCall": "calls",
    "PreparedBatch": "batch",
    "RemoteBuffer": "buffer",
    "Segment": "segment",
    "PollingLoop": "polling_loop",
    "Transfer": "batch",
    "TransferEngine": "engine",
    "TransferStatus": "batch",
}


def __getattr__(name: str) -> Any:
    """Import the module of a public name when the name is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
