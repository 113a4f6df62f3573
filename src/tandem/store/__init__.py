"""A store of objects in the memory of many hosts: byte strings under keys, in replicas.

Programs use ``StoreClient`` (blocking) or ``AsyncStoreClient``; ``StoreClient.local()`` is a whole
store inside one process. See docs/design/store/store.md.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tandem.store.client import AsyncStoreClient, Part, PutOptions, PutResult, StoreBuffer
    from tandem.store.config import StoreConfig
    from tandem.store.host import StoreHost
    from tandem.store.master.master import StoreMaster
    from tandem.store.services.client import ClientService
    from tandem.store.services.host import HostService
    from tandem.store.services.master import MasterService
    from tandem.store.sync_client import StoreClient

__all__ = [
    "AsyncStoreClient",
    "ClientService",
    "HostService",
    "MasterService",
    "Part",
    "PutOptions",
    "PutResult",
    "StoreBuffer",
    "StoreClient",
    "StoreConfig",
    "StoreHost",
    "StoreMaster",
]

_HOMES = {
    "AsyncStoreClient": "client",
    "Part": "client",
    "PutOptions": "client",
    "PutResult": "client",
    "StoreBuffer": "client",
    "StoreConfig": "config",
    "StoreHost": "host",
    "StoreMaster": "master.master",
    "ClientService": "services.client",
    "HostService": "services.host",
    "MasterService": "services.master",
    "StoreClient": "sync_client",
}


def __getattr__(name: str) -> Any:
    # Import on first use: the command line reads a store's settings without loading the native
    # extension.
    if name not in _HOMES:
        raise AttributeError(f"module 'tandem.store' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"tandem.store.{_HOMES[name]}"), name)
