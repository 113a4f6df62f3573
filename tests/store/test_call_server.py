"""Goal: what one handler does wrong over the engine's calls is seen by its own caller alone."""

import asyncio
import threading

import msgspec
import pytest

from tandem.core.errors import InternalError
from tandem.store.fast_calls import CallServer, _Envelope
from tandem.transfer import PollingLoop, TransferConfig, TransferEngine

SECRET = "s" * 32
DEADLINE_S = 20.0


class Question(msgspec.Struct):
    """Is given back, after an answer of the host."""

    text: str


class Caller:
    name = instance_id = "somebody"
    is_lost = False


def make_engine(name):
    return TransferEngine(TransferConfig(name=name, secret=SECRET, listen=("127.0.0.1:0",)))


@pytest.mark.parametrize("loop_factory", [PollingLoop, asyncio.SelectorEventLoop])
def test_an_answer_that_cannot_be_encoded_is_its_callers_alone(loop_factory):
    """Also after it has waited, among others that go on at the same moment."""
    with make_engine("host") as host, make_engine("master") as master, make_engine("c") as client:
        host.serve_calls(lambda calls: [call.payload for call in calls])
        answers: list[tuple[str, object]] = []

        def ask(text):
            body = msgspec.Raw(msgspec.msgpack.encode(Question(text)))
            request = msgspec.msgpack.encode(_Envelope("echo", "somebody", body))
            try:
                answer = client.call(segment, request, deadline_s=DEADLINE_S)
                answers.append((text, msgspec.msgpack.decode(answer)))
            except InternalError as error:
                answers.append((text, error))

        async def serve():
            peer = await asyncio.to_thread(master.open, host.address)

            async def echo(_, question):
                await master.call_async(peer, b"", deadline_s=DEADLINE_S)
                return "\udc80" if question.text == "bad" else question.text

            server = CallServer(master, [("echo", echo, Question, str)], lambda _: Caller())
            threads = [
                threading.Thread(target=ask, args=("bad" if i % 4 == 0 else f"good {i}",))
                for i in range(24)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                await asyncio.to_thread(thread.join, 2 * DEADLINE_S)
            await server.aclose()

        segment = client.open(master.address)
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(serve())
        assert len(answers) == 24
        for text, answer in answers:
            if text == "bad":
                assert isinstance(answer, InternalError)
            else:
                assert answer == text


@pytest.mark.parametrize("loop_factory", [PollingLoop, asyncio.SelectorEventLoop])
def test_asyncio_timeout_works_inside_handlers(loop_factory):
    """``asyncio.timeout`` needs the handler to be a task: before, during and after it waits."""
    with make_engine("host") as host, make_engine("master") as master, make_engine("c") as client:
        host.serve_calls(lambda calls: [call.payload for call in calls])

        def ask(segment, method, text):
            body = msgspec.Raw(msgspec.msgpack.encode(Question(text)))
            request = msgspec.msgpack.encode(_Envelope(method, "somebody", body))
            answer = client.call(segment, request, deadline_s=DEADLINE_S)
            return msgspec.msgpack.decode(answer)

        async def serve():
            peer = await asyncio.to_thread(master.open, host.address)

            async def late(_, question):
                try:
                    async with asyncio.timeout(0.001):
                        await asyncio.Event().wait()
                except TimeoutError:
                    return f"late {question.text}"

            async def in_time(_, question):
                async with asyncio.timeout(DEADLINE_S):
                    await master.call_async(peer, b"", deadline_s=DEADLINE_S)
                async with asyncio.timeout(DEADLINE_S):
                    return await asyncio.wait_for(asyncio.sleep(0, question.text), DEADLINE_S)

            methods = [("late", late, Question, str), ("in_time", in_time, Question, str)]
            server = CallServer(master, methods, lambda _: Caller())
            segment = await asyncio.to_thread(client.open, master.address)
            answers = await asyncio.gather(
                asyncio.to_thread(ask, segment, "late", "a"),
                asyncio.to_thread(ask, segment, "in_time", "b"),
            )
            assert answers == ["late a", "b"]
            await server.aclose()

        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(serve())


def test_handlers_begin_in_the_order_of_their_calls():
    """A plain function, which runs without a task, does not overtake a coroutine before it."""
    with make_engine("master") as master, make_engine("client") as client:
        begun: list[str] = []

        async def slow(_, question):
            begun.append(question.text)
            await asyncio.sleep(0)
            return question.text

        def quick(_, question):
            begun.append(question.text)
            return question.text

        async def serve():
            methods = [("slow", slow, Question, str), ("quick", quick, Question, str)]
            server = CallServer(master, methods, lambda _: Caller())
            segment = await asyncio.to_thread(client.open, master.address)
            texts = [str(i) for i in range(100)]
            calls = []
            for i, text in enumerate(texts):
                body = msgspec.Raw(msgspec.msgpack.encode(Question(text)))
                envelope = _Envelope("quick" if i % 3 else "slow", "somebody", body)
                calls.append(client.begin_call(segment, msgspec.msgpack.encode(envelope)))
            for call in calls:
                await asyncio.to_thread(call.wait, DEADLINE_S)
            assert begun == texts
            await server.aclose()

        with asyncio.Runner(loop_factory=PollingLoop) as runner:
            runner.run(serve())
