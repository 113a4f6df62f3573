"""Goal: killed instances and a restart from SSD change no bit of chats on models with groups.

Method: ``tandem serve`` of a tiny model with windows and of a tiny hybrid, with a store and a disk;
its instance is killed in the middle, then the whole server starts again with the disk alone.
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
from transformers import Gemma4TextConfig, GptOssConfig, Qwen3NextConfig

from tandem.models.proof.tiny import make_tiny, save_tiny

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

import hybrid
import windowed

VOCABULARY = 4096
MODELS = {
    "windowed": lambda: GptOssConfig(**windowed.SIZES | {"vocab_size": VOCABULARY}),
    "sharing": lambda: Gemma4TextConfig(
        **windowed.SHARING | {"vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY}
    ),
    "hybrid": lambda: Qwen3NextConfig(**hybrid.SIZES | {"vocab_size": VOCABULARY}),
}
NUM_CHATS, NUM_TOKENS, WAIT_S = 16, 60, 120.0
PROMPTS = [
    [(7 * j * j + 11 * (i % 3) * j + 3) % 3000 + 5 for j in range(50 + 3 * (i % 4))] + [i + 5]
    for i in range(NUM_CHATS)
]


def ask(server, i, prompt):
    """A chat's answer with log-probabilities, and the tokens that were not computed."""
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
@pytest.mark.parametrize("kind", list(MODELS))
def test_killed_and_restarted_from_the_disk(serve_demo, monkeypatch, tmp_path, kind):
    folder, disk = tmp_path / "model", tmp_path / "ssd"
    folder.mkdir()
    disk.mkdir(mode=0o700)
    save_tiny(make_tiny(MODELS[kind](), 0), folder)
    for file in resources.files("tandem.models").joinpath("demo").iterdir():
        if file.name.startswith("tokenizer"):
            shutil.copy(str(file), folder)
    monkeypatch.setenv("TANDEM_TEST_MODEL", str(folder))
    common = ["--engine.block-size", "16", "--model.proof", "off", "--engine.num-kv-blocks", "400"]
    with serve_demo(*common, "--engine.prefix-cache", "false") as server:
        fresh = [ask(server, i, prompt)[0] for i, prompt in enumerate(PROMPTS)]
    assert len({text for text, _ in fresh}) > NUM_CHATS // 2
    store = ["--store.memory", "64MiB", "--store.ssd-dir", str(disk), "--tiers.prefetch", "wait"]
    with serve_demo(*common, *store) as server:
        done, num_kills = threading.Event(), 0

        def kill():
            nonlocal num_kills
            while num_kills < 2 and not done.wait(0.1):
                info = server.client.get("/server_info").json()
                stats, instance = info["stats"], info["instance"]
                # In the middle: some tokens of these chats are out. None: it starts again.
                if stats and instance and stats["num_running"] > NUM_CHATS // 2:
                    os.kill(instance["pid"], signal.SIGKILL)
                    num_kills += 1

        killer = threading.Thread(target=kill)
        killer.start()
        told = ask_all(server)
        done.set()
        killer.join()
        assert num_kills > 0
        assert [answer for answer, _ in told] == fresh
        assert [answer for answer, _ in ask_all(server)] == fresh
        groups = ("stored_window_blocks", "stored_states")
        server.wait_until(lambda: any(server.stats()[name] for name in groups), WAIT_S)
        files = [0, 1]

        def is_written():
            files.append(sum(p.stat().st_size for p in disk.rglob("*") if p.is_file()))
            threading.Event().wait(1.0)
            return files[-1] == files[-2] > 0

        server.wait_until(is_written, WAIT_S)
    with serve_demo(*common, *store) as server:
        again = ask_all(server)
        assert [answer for answer, _ in again] == fresh
        assert max(cached for _, cached in again) >= 48
        stats = server.stats()
        assert stats["loaded_window_blocks"] + stats["loaded_states"] > 0
