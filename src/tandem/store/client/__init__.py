"""A program's side of a store: the API, and the steps of each call.

Other folders import from this package only. Start reading at ``client.py``.
"""

from tandem.store.client.blocking import drive, make_blocking_client
from tandem.store.client.buffers import Part, StoreBuffer
from tandem.store.client.client import AsyncStoreClient
from tandem.store.client.options import DEFAULT_OPTIONS, PutOptions, PutResult

__all__ = [
    "DEFAULT_OPTIONS",
    "AsyncStoreClient",
    "Part",
    "PutOptions",
    "PutResult",
    "StoreBuffer",
    "drive",
    "make_blocking_client",
]
