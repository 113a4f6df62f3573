"""Goal: hosts and clients find who leads as soon as somebody does, whoever else is silent.

Method: ``LeaderClient`` over masters that answer, are silent or refuse, in virtual time.
"""

import asyncio
from types import SimpleNamespace

import pytest

from tandem.core.errors import DeadlineError, PeerLostError, PermissionDeniedError
from tandem.sim import run_virtual
from tandem.store.election.leader import PAUSE_S, LeaderClient
from tandem.store.messages import LeaderAnswer


class FakeMaster:
    """Answers as it is told to: ``answer`` is called at each question."""

    def __init__(self, url: str, answer, asked: list[str]) -> None:
        self.endpoint, self._answer, self._asked = url, answer, asked
        self.is_connected = False
        self.peer = SimpleNamespace(name=url)

    def on_peer_lost(self, callback) -> None:
        self.lose = lambda: callback(None, PeerLostError("test", "lost"))

    async def connect(self) -> None:
        assert not self.is_connected, "asked twice without an end"
        self.is_connected = True

    async def aclose(self) -> None:
        self.is_connected = False

    async def call(self, method, request, kind):
        self._asked.append(self.endpoint)
        await asyncio.sleep(0.001)
        return await self._answer()


async def be_silent():
    await asyncio.sleep(1000)


async def refuse():
    raise PermissionDeniedError("test", "no")


def answer_with(answer: LeaderAnswer):
    async def give():
        return answer

    return give


def leads_from(time_s: float, epoch: int = 1):
    async def give():
        return LeaderAnswer(is_leader=asyncio.get_running_loop().time() >= time_s, epoch=epoch)

    return give


class Search:
    """A client of some masters, by name."""

    def __init__(self, known: str, masters: dict) -> None:
        self.asked: list[str] = []
        self.masters = {name: FakeMaster(name, give, self.asked) for name, give in masters.items()}
        self.client = LeaderClient(list(known), self.masters.__getitem__)

    async def find(self) -> tuple[str, float]:
        await self.client.connect(60)
        found = self.client.endpoint, asyncio.get_running_loop().time()
        open_ = [name for name, master in self.masters.items() if master.is_connected]
        assert open_ == [found[0]]
        return found


def test_a_silent_master_does_not_hold_up_the_search():
    async def main():
        search = Search("abc", {"a": be_silent, "b": leads_from(0.35), "c": leads_from(99)})
        found = await search.find()
        await search.client.aclose()
        return found

    name, time_s = run_virtual(main)
    assert name == "b"
    assert time_s < 0.35 + 2 * PAUSE_S


def test_a_master_that_is_named_by_another_is_asked_at_once():
    async def main():
        hint = LeaderAnswer(is_leader=False, address="z")
        search = Search("ab", {"a": be_silent, "b": answer_with(hint), "z": leads_from(0)})
        found = await search.find()
        search.masters["z"].lose()  # Then everything again.
        await asyncio.sleep(0.05)
        assert search.client.endpoint == "z"
        await search.client.aclose()
        return found

    name, time_s = run_virtual(main)
    assert name == "z"
    assert time_s < PAUSE_S


def test_of_two_that_answer_at_once_the_newer_is_taken():
    async def main():
        search = Search("ab", {"a": leads_from(0, epoch=3), "b": leads_from(0, epoch=4)})
        found = await search.find()
        await search.client.aclose()
        return found

    assert run_virtual(main)[0] == "b"


def test_masters_that_all_refuse_end_the_search_and_one_that_does_not_goes_on():
    async def main(masters: dict):
        search = Search("ab", masters)
        await search.client.connect(3)

    with pytest.raises(PermissionDeniedError):
        run_virtual(lambda: main({"a": refuse, "b": refuse}))
    with pytest.raises(DeadlineError):
        run_virtual(lambda: main({"a": refuse, "b": be_silent}))
