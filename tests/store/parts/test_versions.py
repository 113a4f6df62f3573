"""Releases one apart work together; further apart they refuse each other at the handshake.

Goal: an upgrade may restart one process after the other. Method: processes of this release that
say they are of another, and, since a newer release only adds, messages as an older and a newer one
would send them: fields missing that have been added since, and fields that nobody here knows.
"""

import asyncio
import inspect
import shutil

import msgspec
import pytest

from tandem.core.clock import MonotonicClock
from tandem.core.errors import UnsupportedError
from tandem.rpc import Auth, RpcServer, make_identity, make_runtime_dir
from tandem.store import ClientService, HostService, MasterService, StoreConfig, StoreMaster
from tandem.store import messages as messages_module
from tandem.store.messages import StoreStatus
from tandem.store.services import connect as service_module

OURS = service_module.STORE_VERSION


@pytest.fixture
def config(tmp_path):
    folder = make_runtime_dir()
    yield StoreConfig(
        master=f"ipc://{folder}/m.sock",
        name="h1",
        segment_dir=str(tmp_path / "segments"),
        segment_bytes=2**20,
        recovery_ms=0,
        deadline_ms=5000,
    )
    shutil.rmtree(folder)


def speak(monkeypatch, version: int) -> None:
    """What starts from now on says that it is of ``version``."""
    monkeypatch.setattr(service_module, "STORE_VERSION", version)


@pytest.mark.asyncio
@pytest.mark.parametrize("theirs", [OURS - 1, OURS, OURS + 1])
async def test_a_release_to_either_side_is_served(config, monkeypatch, theirs):
    async with MasterService(config):
        speak(monkeypatch, theirs)
        async with HostService(config) as host:
            await asyncio.wait_for(host.host.is_joined.wait(), 60)
            speak(monkeypatch, OURS)
            async with ClientService(config) as service:
                await service.client.put("key", b"value")
                assert await service.client.get("key") == b"value"


@pytest.mark.asyncio
@pytest.mark.parametrize("theirs", [OURS - 2, OURS + 2])
async def test_two_releases_away_are_refused_at_the_handshake(config, monkeypatch, theirs):
    async with MasterService(config):
        speak(monkeypatch, theirs)
        with pytest.raises(UnsupportedError, match="they may differ by one"):
            async with ClientService(config):
                pass


@pytest.mark.asyncio
async def test_a_master_of_before_elections_is_taken_for_the_leader(config):
    """It knows no method ``leader``, and its answers lack what has been added since."""
    url = config.master
    server = RpcServer(
        url,
        identity=make_identity("old master", "store_master", {"store": str(OURS - 1)}),
        auth=Auth.for_endpoint(url, None),
        check_compat=service_module.check_version,
    )
    master = StoreMaster(config, clock=MonotonicClock(), epoch=1, draw=lambda n: 0)
    for name, handler, request, response in master.methods():
        server.register(name, handler, request, response)
    server.start()
    try:
        async with ClientService(config) as service:
            status = await service.client.status()
            assert status.epoch == 1
    finally:
        await server.aclose()
        await master.aclose()


def list_messages() -> list[type[msgspec.Struct]]:
    return [
        kind
        for _, kind in inspect.getmembers(messages_module, inspect.isclass)
        if issubclass(kind, msgspec.Struct) and kind is not msgspec.Struct
    ]


@pytest.mark.parametrize("kind", list_messages(), ids=lambda kind: kind.__name__)
def test_what_a_newer_release_adds_is_passed_over(kind):
    made = make_sample(kind)
    built = msgspec.msgpack.decode(msgspec.msgpack.encode(made))
    if isinstance(built, dict):
        built["added_in_the_next_release"] = [1, {"a": b"x"}]
    else:
        built = [*built, [1, {"a": b"x"}]]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(built), type=kind) == made


def make_sample(kind):
    """Return an instance with the plainest value in each field that must be given."""
    plain = {int: 1, str: "s", bool: True, bytes: b"b", float: 1.0}
    values = {}
    for field in msgspec.structs.fields(kind):
        if not field.required:
            continue
        origin = getattr(field.type, "__origin__", field.type)
        if field.type in plain:
            values[field.name] = plain[field.type]
        elif origin in (list, dict):
            values[field.name] = origin()
        elif inspect.isclass(origin) and issubclass(origin, msgspec.Struct):
            values[field.name] = make_sample(origin)
        else:
            values[field.name] = next(iter(field.type))  # An enumeration.
    return kind(**values)


def test_what_an_older_release_does_not_send_has_a_default():
    """The first release's status, as bytes that will not change with the code."""
    old = msgspec.msgpack.encode(
        {
            "epoch": 3, "num_objects": 1, "total_bytes": 5, "num_unreadable": 0,
            "num_under_replicated": 0, "num_unfinished": 0, "hosts": [],
        }
    )  # fmt: skip
    status = msgspec.msgpack.decode(old, type=StoreStatus)
    assert (status.epoch, status.is_recovering) == (3, False)
