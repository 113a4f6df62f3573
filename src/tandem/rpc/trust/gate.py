"""The check of CURVE connections: answers ZeroMQ's question whether a proven key may connect.

ZeroMQ asks over the ZAP protocol (RFC 27), by one socket for each context, so every server has its
own context. pyzmq implements the protocol; this module makes the decision, on the server's event
loop.
"""

import asyncio
from typing import Any

import zmq
from zmq.auth.base import Authenticator

from tandem.rpc.trust.auth import ZAP_DOMAIN, Auth
from tandem.rpc.wire.pump import SocketPump

__all__ = ["CurveGate"]


class CurveGate:
    """Admits connections whose keys ``auth`` admits. Open it before the server binds.

    Args:
        context: ZeroMQ's context of the server; borrowed.
        auth: decides on keys.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], auth: Auth) -> None:
        self._auth = auth
        self._tasks: set[asyncio.Task[None]] = set()
        self._authenticator = Authenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(ZAP_DOMAIN, credentials_provider=self)
        authenticator: Any = self._authenticator  # pyzmq does not declare the type of zap_socket.
        self._socket: zmq.Socket[bytes] = authenticator.zap_socket
        self._pump = SocketPump(self._socket, self._receive)

    def callback(self, domain: str, key: bytes) -> bool:
        """Return True if a key may connect. pyzmq calls this method by its name."""
        return domain == ZAP_DOMAIN and self._auth.admits(key)

    def close(self) -> None:
        """Stop answering whether keys may connect. Admitted connections stay."""
        self._pump.close()
        for task in self._tasks:
            task.cancel()
        self._authenticator.stop()

    def _receive(self) -> None:
        question = self._socket.recv_multipart(zmq.NOBLOCK)
        task = asyncio.get_running_loop().create_task(self._answer(question))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, question: list[bytes]) -> None:
        await self._authenticator.handle_zap_message(question)
        self._pump.note_sent()
