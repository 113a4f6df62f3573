"""Goal: `tandem store host` says that it is up when a master has taken it in, and not before."""

import asyncio
import os
import signal
import sys
from types import SimpleNamespace

from tandem.cli.commands import store

TIMEOUT_S = 60.0


class Host:
    """A host process whose master comes when the test says so."""

    urls = ("tcp://127.0.0.1:9",)

    def __init__(self):
        self.host = SimpleNamespace(name="h", is_joined=asyncio.Event())

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass


def tell():
    sys.stdout.write("h is up\n")


def test_a_host_is_up_with_its_master(monkeypatch, capsys):
    monkeypatch.setattr(store, "JOIN_NOTICE_S", 0.0)

    async def read(stream):
        text = ""
        while not text:
            await asyncio.sleep(0)
            text = getattr(capsys.readouterr(), stream)
        return text

    async def work():
        host = Host()
        serving = asyncio.create_task(store._serve(host, tell, store._join))
        assert await read("err") == "store host h waits for a master at tcp://127.0.0.1:9\n"
        host.host.is_joined.set()
        assert await read("out") == "h is up\n"
        os.kill(os.getpid(), signal.SIGTERM)
        await serving

    asyncio.run(asyncio.wait_for(work(), TIMEOUT_S))


def test_a_host_without_a_master_ends_when_told_to(monkeypatch, capsys):
    async def work():
        serving = asyncio.create_task(store._serve(Host(), tell, store._join))
        await asyncio.sleep(0)  # Its signal handlers are in place.
        os.kill(os.getpid(), signal.SIGTERM)
        await serving

    asyncio.run(asyncio.wait_for(work(), TIMEOUT_S))
    assert capsys.readouterr().out == ""
