"""The control channel of the project: typed calls and events between processes.

``RpcServer`` binds and ``RpcClient`` connects; a ``Peer`` is the other side of one session, alike
on both sides. See docs/design/transfer/rpc.md. Bulk bytes belong to ``tandem.transfer``.
"""

from tandem.rpc.client import RpcClient
from tandem.rpc.config import RpcConfig
from tandem.rpc.counters import RpcCounters
from tandem.rpc.handshake import make_identity
from tandem.rpc.lane import LaneRouter
from tandem.rpc.methods import Kept, MethodTable
from tandem.rpc.outgoing import BegunCall, run_threadsafe
from tandem.rpc.peer import Peer
from tandem.rpc.server import RpcServer
from tandem.rpc.trust.auth import Auth, generate_secret, read_secret, write_secret
from tandem.rpc.trust.runtime_dir import make_runtime_dir
from tandem.rpc.wire.frames import Identity

__all__ = [
    "Auth",
    "BegunCall",
    "Identity",
    "Kept",
    "LaneRouter",
    "MethodTable",
    "Peer",
    "RpcClient",
    "RpcConfig",
    "RpcCounters",
    "RpcServer",
    "generate_secret",
    "make_identity",
    "make_runtime_dir",
    "read_secret",
    "run_threadsafe",
    "write_secret",
]
