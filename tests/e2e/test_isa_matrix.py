"""Goal: however an answer comes about, it is that of a fresh run, on every instruction set.

Method: a prefill and a decode instance with a store and little memory give each answer through
the prefix cache, the transfer and the store, after eviction and after kills; one instance that was
flushed gives the truth, under the same cap on the instruction set, with all log-probabilities.
"""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from test_disaggregated_serve import Streamed, find, is_whole

from tandem._native import kernel_isas
from tandem.core.config import MAX_ISA
from tandem.models.loading.hub import DEMO_FOLDER

WAIT_S = 240.0
PROMPTS = [
    f"# Part {i}.\ndef part_{i}(left, right):\n    # Merge two sorted lists of numbers.\n" * 4
    for i in range(5)
]
BODIES = [
    {"prompt": prompt, "max_tokens": 12, "ignore_eos": True, "logprobs": 2, **sampling}
    for prompt, sampling in zip(
        PROMPTS, [{"temperature": 0.0}, {"temperature": 1.0, "seed": 3}] * 3, strict=False
    )
]
LONG = {**BODIES[1], "max_tokens": 200}
DTYPES = {
    "float32": ["--model.dtype", "float32"],
    "bfloat16": ["--model.dtype", "bfloat16"],
    "int8": [
        "--model.dtype", "bfloat16",
        "--model.expert-format", "int8g128", "--model.linear-format", "int8g128",
    ],
    "float16 checkpoint": [],
}  # fmt: skip
PAIR = [
    "--prefill", "1", "--decode", "1", "--store.memory", "64MiB", "--tiers.prefetch", "wait",
    "--tiers.decision", "load", "--engine.num-kv-blocks", "40", "--engine.max-model-len", "512",
    # A busy machine stops processes for seconds: none of them is lost.
    "--rpc.lease-ms", "60000",
]  # fmt: skip


@pytest.fixture(scope="module")
def half_folder(tmp_path_factory) -> Path:
    """The demo model, stored in float16."""
    folder = tmp_path_factory.mktemp("half") / "demo"
    shutil.copytree(DEMO_FOLDER, folder)
    for path in folder.glob("*.safetensors"):
        tensors = {name: tensor.half() for name, tensor in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float16"}))
    return folder


def ask(server, body, path="/v1/completions"):
    answer = server.client.post(path, json={"model": "demo", **body}, timeout=WAIT_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


def chat(server, *, fresh: bool):
    """Two turns; the second has the KV of the first unless it was flushed."""
    messages, answers = [{"role": "user", "content": PROMPTS[0]}], []
    for question in ("And backwards?", None):
        if fresh:
            ask(server, {}, "/flush_cache")
        body = {"messages": messages, "max_tokens": 12, "temperature": 0.0, "logprobs": True}
        answers.append(ask(server, body, "/v1/chat/completions")["choices"])
        messages = [*messages, answers[-1][0]["message"], {"role": "user", "content": question}]
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ["avx2", "avx512_vnni", "avx512_bf16"])
def test_every_way_to_an_answer_gives_that_of_a_fresh_run(
    serve_demo, monkeypatch, half_folder, isa, dtype
):
    if isa not in kernel_isas():
        pytest.skip(f"the machine, the build or the cap of this run has no {isa}")
    if dtype == "float16 checkpoint":
        monkeypatch.setenv("TANDEM_TEST_MODEL", str(half_folder))
    common, env = [*DTYPES[dtype], "--engine.block-size", "16"], {MAX_ISA: isa}

    def flushed(server, body):
        ask(server, {}, "/flush_cache")
        return ask(server, body)["choices"]

    with serve_demo(*common, env=env) as server:
        truth = [flushed(server, body) for body in BODIES]
        long = flushed(server, LONG)[0]["text"]
        turns = chat(server, fresh=True)
    with serve_demo(*common, *PAIR, env=env) as pair:
        pair.wait_until(lambda: is_whole(pair), WAIT_S)
        assert chat(pair, fresh=False) == turns
        for what in ("prefill and decode", "after eviction"):
            assert [ask(pair, body)["choices"] for body in BODIES] == truth, what
        assert ask(pair, BODIES[-1])["choices"] == truth[-1], "from the prefix cache"
        stats = pair.stats()
        assert stats["evicted_tokens"] > 0
        assert stats["peer_read_blocks"] > 0
        pair.wait_until(lambda: pair.stats()["stored_blocks"] > 0, WAIT_S)
        stream = Streamed(pair, {"model": "demo", **LONG})
        stream.wait_for(5)
        os.kill(find(pair, "decode-0")["pid"], signal.SIGKILL)
        assert stream.join() == long, "recovered"
        pair.wait_until(lambda: is_whole(pair), WAIT_S)
        pid = find(pair, "prefill-0")["pid"]
        os.kill(pid, signal.SIGKILL)
        pair.wait_until(lambda: find(pair, "prefill-0")["pid"] != pid and is_whole(pair), WAIT_S)
        answers = [ask(pair, body) for body in BODIES]
        assert [answer["choices"] for answer in answers] == truth, "from the store"
        details = [answer["usage"]["prompt_tokens_details"] for answer in answers]
        assert sum(detail["cached_tokens"] for detail in details) > 0
