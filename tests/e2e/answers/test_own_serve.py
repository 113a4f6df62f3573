"""Goal: a model by transformers' own modules answers over HTTP, and as well from two instances.

Method: ``tandem serve`` of a tiny random GPT-2, alone and with a prefill and a decode instance, of
which one is killed in the middle; every answer is that of one that nothing was reused for.
"""

import os
import shutil
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "engine"))

from own_modules import save_own

NUM_CHATS, NUM_TOKENS, WAIT_S = 8, 40, 120.0
PROMPTS = [
    [(7 * j * j + 11 * (i % 3) * j + 3) % 3000 + 5 for j in range(280 + 3 * (i % 4))] + [i + 5]
    for i in range(NUM_CHATS)
]


def ask(server, i, prompt):
    """An answer with log-probabilities, and the tokens that were not computed."""
    body = {
        "model": "demo", "prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True,
        "temperature": float(i % 2), "seed": i, "logprobs": 2,
    }  # fmt: skip
    response = server.client.post("/v1/completions", json=body, timeout=WAIT_S)
    assert response.status_code == 200, response.text
    choice, usage = response.json()["choices"][0], response.json()["usage"]
    return (choice["text"], choice["logprobs"]), usage["prompt_tokens_details"]["cached_tokens"]


def ask_all(server):
    with ThreadPoolExecutor(NUM_CHATS) as pool:
        return list(pool.map(lambda i: ask(server, i, PROMPTS[i]), range(NUM_CHATS)))


@pytest.mark.slow
def test_alone_apart_and_killed(serve_demo, monkeypatch, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    save_own(folder, vocab_size=4096)
    for file in resources.files("tandem.models").joinpath("demo").iterdir():
        if file.name.startswith("tokenizer"):
            shutil.copy(str(file), folder)
    monkeypatch.setenv("TANDEM_TEST_MODEL", str(folder))
    common = ["--engine.num-kv-blocks", "400"]
    with serve_demo(*common, "--engine.prefix-cache", "false") as server:
        fresh = [ask(server, i, prompt)[0] for i, prompt in enumerate(PROMPTS)]
    with serve_demo(*common) as server:
        ask_all(server)
        again = ask_all(server)
        assert [answer for answer, _ in again] == fresh
        assert max(cached for _, cached in again) == 256
        rows = server.client.get("/server_info").json()["instance"]["plan"]
        plan = {row[0]: row[1:] for row in rows}
        assert plan["modules"][0].startswith("transformers' own")
        assert "computes prompts itself" in plan["prefill/decode"][0]
    assert len({text for text, _ in fresh}) > NUM_CHATS // 2
    with serve_demo(*common, "--prefill", "1", "--decode", "1") as server:
        done, killed = threading.Event(), []

        def kill():
            while not killed and not done.wait(0.1):
                for each in server.client.get("/server_info").json()["instances"]:
                    if each["num_running"] and each["pid"]:
                        os.kill(each["pid"], signal.SIGKILL)
                        killed.append(each["name"])
                        return

        assert [answer for answer, _ in ask_all(server)] == fresh
        killer = threading.Thread(target=kill)
        killer.start()
        told = ask_all(server)
        done.set()
        killer.join()
        assert killed
        assert [answer for answer, _ in told] == fresh
