"""A whole store in one child process: master and host, for the server that started it.

``tandem serve --store.memory`` starts it. It reads its settings as one line on standard input and
ends when that input ends, so that it never outlives its server. It answers with one line:
``READY``, or the reason why it cannot serve. If it dies, its segment file stays, and the next
process finds the objects again; a clean end removes the file.
"""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable

import msgspec

from tandem.core.descriptors import raise_limit
from tandem.core.errors import TandemError
from tandem.core.logs import configure_logging
from tandem.rpc import RpcConfig
from tandem.store.config import StoreConfig
from tandem.store.services.host import HostService
from tandem.store.services.master import MasterService
from tandem.transfer import PollingLoop

__all__ = ["READY", "StoreProcessSpec", "main"]

READY = b"ready\n"
"""Line that the process writes to standard output once it serves."""


class StoreProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that the server passes to the store process."""

    store: StoreConfig
    """Settings of the store, with a master address in the server's folder, and a host name."""
    rpc: RpcConfig
    log_level: str = "info"
    log_format: str = "text"


async def _serve(spec: StoreProcessSpec) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop() -> None:
        loop.call_soon_threadsafe(stopping.set)

    signal.signal(signal.SIGTERM, lambda _, __: stop())
    threading.Thread(target=_wait_for_end_of_input, args=(stop,), daemon=True).start()
    async with (
        MasterService(spec.store, spec.rpc),
        HostService(spec.store, spec.rpc, keep_segment=False),
    ):
        # The server waits for this line; before it, no master listens.
        _answer(READY)
        await stopping.wait()


def _answer(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


def _wait_for_end_of_input(stop: Callable[[], None]) -> None:
    """Call ``stop`` when the server, which holds the other end of standard input, is gone."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    stop()


def main() -> int:
    """Run the store process; the entry point of ``python -m tandem.store.process``."""
    # Ignore SIGINT: Ctrl-C in a terminal reaches the whole process group, and the server ends this
    # process after it has drained.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=StoreProcessSpec)
    configure_logging("store", spec.log_level, spec.log_format)
    raise_limit()
    with asyncio.Runner(loop_factory=PollingLoop) as runner:
        try:
            runner.run(_serve(spec))
        except (TandemError, OSError) as error:
            reason = error.what if isinstance(error, TandemError) else str(error)
            _answer(f"{' '.join(reason.split())}\n".encode())
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
