"""A process of a store for the tests that kill one: told by its arguments what to be.

Prints ``ready`` when it is up; ends when its standard input does.
"""

import asyncio
import errno
import os
import sys
import threading
from pathlib import Path

import msgspec

from tandem.rpc import RpcConfig
from tandem.store import ClientService, HostService, MasterService, PutOptions, StoreConfig
from tandem.store.disk_files import DiskFolder


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


if __name__ == "__main__":
    role, config_json, rpc_json, *rest = sys.argv[1:]
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
        warm = rest[2:] == ["warm"]
        asyncio.run(stall_in_put(config, rpc, rest[0], int(rest[1]), is_warm=warm))
