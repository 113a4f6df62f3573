"""Goal: under overload every client is served in its turn, and a time limit is what it says.

Method: 180 equal clients on one address ask, as streams, each again as soon as it has its answer,
while one more asks with ``timeout: 0.5``. Counted: answers of each client; for each request, those
that were sent later and begun before. How long things took is printed, since it depends on the
machine.
"""

import asyncio
import bisect
import json
import re
import statistics
import threading
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx
import pytest

NUM_CLIENTS = 180
TIMEOUT_S = 300.0
LIMIT_S = 0.5
PROMPT = "def split(path, size):\n    # Return the parts of a file, each of at most size bytes.\n"
HEAD = (
    "POST /v1/completions HTTP/1.1\r\nHost: {}\r\nConnection: close\r\nContent-Length: {}\r\n\r\n"
)
LATER = re.compile(r"status=504 duration_s=([\d.]+)")


@dataclass
class Answer:
    client: int
    sent_s: float
    """When the request was written to a connection that was open."""
    begun_s: float
    content: bytes


async def ask(place, client, body):
    """Send a request and read its answer to the end; plain sockets cost this process least."""
    text = json.dumps(body)
    host, _, port = place.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write((HEAD.format(place, len(text)) + text).encode())
        sent_s = time.monotonic()
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head + await reader.read()
        content = await reader.readuntil(b"data: ")
        begun_s = time.monotonic()
        return Answer(client, sent_s, begun_s, content + await reader.read())
    finally:
        writer.close()


async def run_client(place, index, end_s, answers):
    turn = 0
    while time.monotonic() < end_s:
        turn += 1
        # A third asks again and again for what is cached, and might be preferred for it.
        prompt = PROMPT if index % 3 == 0 else f"# {index} {turn}\n{PROMPT}"
        body = {"model": "demo", "prompt": prompt * (1 + index % 4), "max_tokens": 24,
                "ignore_eos": True, "stream": True, "seed": index}  # fmt: skip
        async with asyncio.timeout(TIMEOUT_S):
            answers.append(await ask(place, index, body))


async def run_clients(place, end_s):
    answers = []
    await asyncio.gather(*(run_client(place, i, end_s, answers) for i in range(NUM_CLIENTS)))
    return answers


def run_limited(url, end_s, found):
    """Ask with a time limit; note status and seconds of each."""
    body = {"model": "demo", "prompt": PROMPT * 2, "max_tokens": 200, "timeout": LIMIT_S}
    with httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False) as client:
        while time.monotonic() < end_s:
            begin_s = time.monotonic()
            status = client.post("/v1/completions", json=body).status_code
            found.append((status, time.monotonic() - begin_s))
            time.sleep(0.1)


def count_overtaken(answers, margin_s):
    """For each request: those sent later, by more than the margin, that began before it."""
    sent, counts = [], []
    for answer in sorted(answers, key=lambda a: a.begun_s):
        counts.append(len(sent) - bisect.bisect_right(sent, answer.sent_s + margin_s))
        bisect.insort(sent, answer.sent_s)
    return sorted(counts)


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(40, marks=pytest.mark.slow),
        pytest.param(150, marks=pytest.mark.long),
    ],
)
def test_180_equal_clients_are_served_in_turn(serve_demo, seconds):
    with serve_demo("--engine.max-model-len", "1024") as server:
        end_s, limited = time.monotonic() + seconds, []
        asking = threading.Thread(target=run_limited, args=(server.url, end_s, limited))
        asking.start()
        answers = asyncio.run(run_clients(urlsplit(server.url).netloc, end_s))
        asking.join(TIMEOUT_S)
        counts = [0] * NUM_CLIENTS
        for answer in answers:
            counts[answer.client] += 1
        waits = sorted(answer.begun_s - answer.sent_s for answer in answers)
        took = sorted(seconds for _, seconds in limited)
        told = sorted(float(found[1]) for line in server.log if (found := LATER.search(line)))
        overtaken = {margin: count_overtaken(answers, margin)[-1] for margin in (0.0, 0.5, 2.0)}
        print(
            f"\n{seconds} s: answers={len(answers)} of a client min={min(counts)} "
            f"max={max(counts)}; first token median_s={statistics.median(waits):.2f} "
            f"longest_s={waits[-1]:.2f}; most that overtook one, by margin_s: {overtaken}; "
            f"timeout of {LIMIT_S} s: n={len(took)} ended after "
            f"median_s={statistics.median(took):.2f} longest_s={took[-1]:.2f}, by the server's "
            f"log longest_s={told[-1] if told else 0:.2f}",
            flush=True,
        )
        assert all(b"[DONE]" in answer.content for answer in answers)
        assert not [answer.content for answer in answers if b'data: {"error"' in answer.content]
        assert {status for status, _ in limited} <= {200, 504}
        assert min(counts) >= 1, "a client was never served"
        # A round of all others would be unfair; requests that are under way pass each other.
        assert overtaken[2.0] < NUM_CLIENTS / 4
        server.wait_until(server.is_idle, 60)
