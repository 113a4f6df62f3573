"""A process of a store for the tests that kill one: told by its arguments what to be.

Prints ``ready`` when it is up; ends when its standard input does. As a nursery, it forks such
processes, which then need not import anything.
"""

import asyncio
import contextlib
import errno
import json
import os
import socket
import sys
import threading
from pathlib import Path

import msgspec

from tandem.rpc import RpcConfig
from tandem.store import ClientService, HostService, MasterService, PutOptions, StoreConfig
from tandem.store.host.disk_files import DiskFolder


async def read_end() -> None:
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def wait() -> None:
        sys.stdin.read()
        loop.call_soon_threadsafe(ended.set_result, None)

    threading.Thread(target=wait, daemon=True).start()
    await ended


def say(text: str) -> None:
    print(text, flush=True)


async def serve(service) -> None:
    async with service:
        say("ready")
        await read_end()


async def stall_in_put(
    config: StoreConfig, rpc: RpcConfig, key: str, size: int, *, is_warm: bool = False
) -> None:
    """Take space for an object, say so, and write it only when a line comes; then commit.

    A warm one has put another before: it maps the host's memory.
    """
    async with ClientService(config, rpc) as service:
        client = service.client
        if is_warm:
            await client.put(f"{key}/before", bytes(size))
        port = client._port
        write = port.write

        async def write_when_told(endpoint, pieces, timeout_s):
            say("granted")
            await asyncio.to_thread(sys.stdin.readline)
            try:
                await write(endpoint, pieces, timeout_s)
            except Exception as error:
                say(f"write {type(error).__name__}")
                raise
            say("write ok")

        port.write = write_when_told
        options = PutOptions(replicas=1)
        try:
            result = await client.put(key, b"\xee" * size, options)
            say(f"put {result.value}")
        except Exception as error:
            say(f"put {type(error).__name__}")


def fill_disk_while(file: Path) -> None:
    """Have no room for bucket files for as long as a file is there."""
    reserve = DiskFolder._reserve

    def reserve_or_fail(folder: DiskFolder, descriptor: int, nbytes: int) -> None:
        if file.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(folder, descriptor, nbytes)

    DiskFolder._reserve = reserve_or_fail


def nurse(channel: socket.socket) -> None:
    """Fork a process for each message: its arguments, with its standard input and output."""
    with contextlib.suppress(ImportError):
        import httpx  # noqa: F401  What masters with an election import later.
    while True:
        data, descriptors, *_ = socket.recv_fds(channel, 2**16, 2)
        if not data:
            return
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        pid = os.fork()
        if not pid:
            channel.close()
            for target, descriptor in enumerate(descriptors):
                os.dup2(descriptor, target)
                os.close(descriptor)
            run(*json.loads(data))
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)
        # Nobody has waited for it yet, so the number still means this process.
        handle = os.pidfd_open(pid)
        socket.send_fds(channel, [str(pid).encode()], [handle])
        os.close(handle)


def run(role: str, config_json: str, rpc_json: str, *rest: str) -> None:
    config = msgspec.json.decode(config_json, type=StoreConfig)
    rpc = msgspec.json.decode(rpc_json, type=RpcConfig)
    if role == "master":
        asyncio.run(serve(MasterService(config, rpc)))
    elif role == "host":
        asyncio.run(serve(HostService(config, rpc)))
    elif role == "full_host":
        fill_disk_while(Path(rest[0]))
        asyncio.run(serve(HostService(config, rpc)))
    else:
        is_warm = rest[2:] == ("warm",)
        asyncio.run(stall_in_put(config, rpc, rest[0], int(rest[1]), is_warm=is_warm))


if __name__ == "__main__":
    if sys.argv[1] == "nursery":
        nurse(socket.socket(fileno=int(sys.argv[2])))
    else:
        run(*sys.argv[1:])
