"""The demo model over HTTP, as users meet it. After each test no block may have an owner."""

import asyncio
import concurrent.futures
import json
import os
import re
import shutil
import socket
import subprocess
import typing
from pathlib import Path

import httpx
import ollama
import openai
import pydantic
import pytest
import requests

PREFIX = '"""Numbers."""\n\n' + "".join(
    f"def add_{i}(value):\n    return value + {i}\n\n\n" for i in range(24)
)


def complete(server, **body):
    answer = server.client.post("/v1/completions", json={"model": "demo", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_openai_client_sync(idle_after):
    client = openai.OpenAI(base_url=f"{idle_after.url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["demo"]
    messages = [{"role": "user", "content": "Write a function that adds two numbers."}]
    whole = client.chat.completions.create(
        model="demo", messages=messages, max_tokens=24, temperature=0
    )
    assert whole.choices[0].message.content
    assert whole.usage.completion_tokens <= 24
    stream = client.chat.completions.create(
        model="demo",
        messages=messages,
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0


def test_openai_client_async(idle_after):
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{idle_after.url}/v1", api_key="none", max_retries=0
        ) as client:
            whole = await client.completions.create(
                model="demo", prompt="def main():\n", max_tokens=16, temperature=0
            )
            stream = await client.completions.create(
                model="demo", prompt="def main():\n", max_tokens=16, temperature=0, stream=True
            )
            text = "".join([c.choices[0].text async for c in stream if c.choices])
            return [whole.choices[0].text, text]

    whole, streamed = asyncio.run(run())
    assert whole == streamed
    assert whole


def test_ollama_client(idle_after):
    """The examples of the package's page, with the answers that the demo model can give."""
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    greedy = {"temperature": 0, "num_predict": 16}
    with ollama.Client(host=idle_after.url) as client:
        whole = client.chat(model="demo", messages=messages, options=greedy)
        assert whole["message"]["content"] == whole.message.content != ""
        assert (whole.eval_count, whole.done_reason) == (16, "length")
        assert whole.eval_duration > 0
        stream = client.chat(model="demo", messages=messages, options=greedy, stream=True)
        assert "".join(chunk["message"]["content"] for chunk in stream) == whole.message.content
        told = client.generate(model="demo", prompt=messages[0]["content"], options=greedy)
        assert told.response == whole.message.content

        class Country(pydantic.BaseModel):
            name: typing.Annotated[str, pydantic.Field(max_length=10)]
            large: bool

        # Without it the demo model may write spaces until it is cut.
        dense = {"x-guidance": {"whitespace_flexible": False}}
        schema = Country.model_json_schema() | dense
        answer = client.chat(model="demo", messages=messages, format=schema, options={"seed": 1})
        Country.model_validate_json(answer.message.content)
        assert [model.model for model in client.list().models] == ["demo"]
        assert client.show("demo").capabilities[0] == "completion"
        assert client.ps().models[0].size == client.list().models[0].size > 0

    async def chat() -> str:
        async with ollama.AsyncClient(host=idle_after.url) as client:
            chunks = await client.chat("demo", messages=messages, options=greedy, stream=True)
            return "".join([chunk.message.content async for chunk in chunks])

    assert asyncio.run(chat()) == whole.message.content


def test_curl(idle_after):
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    body = {"model": "demo", "prompt": "import os\n", "max_tokens": 8, "stream": True}
    result = subprocess.run(
        ["curl", "-sS", "-N", "--noproxy", "*", f"{idle_after.url}/v1/completions",
         "-H", "Content-Type: application/json", "-d", json.dumps(body)],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    lines = [line for line in result.stdout.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    assert all(json.loads(line.removeprefix("data: ")) for line in lines[:-1])


def test_shared_prefix_is_cached_to_the_token(idle_after):
    server = idle_after
    server.client.post("/flush_cache")
    first = complete(server, prompt=PREFIX + "def subtract(a, b):\n", max_tokens=4)
    second = complete(server, prompt=PREFIX + "class Numbers:\n", max_tokens=4)
    shared = len(server.client.post("/tokenize", json={"prompt": PREFIX}).json()["tokens"])
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    # The tokenizer may merge the last characters of the prefix with what follows.
    assert shared - 2 <= cached <= shared


def test_cached_chunked_and_fresh_give_the_same_tokens(idle_after):
    server = idle_after
    prompt = PREFIX + "def subtract(a, b):\n"
    server.client.post("/flush_cache")
    fresh = complete(server, prompt=prompt, max_tokens=48, temperature=0)
    cached = complete(server, prompt=prompt, max_tokens=48, temperature=0)
    salted = complete(server, prompt=prompt, max_tokens=48, temperature=0, cache_salt="other")
    assert cached["usage"]["prompt_tokens_details"]["cached_tokens"] > 300
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert fresh["choices"][0]["text"] == cached["choices"][0]["text"]
    assert fresh["choices"][0]["text"] == salted["choices"][0]["text"]


def test_seed_fixes_the_text_alone_and_in_company(idle_after):
    server = idle_after
    body = {"prompt": "class Reader:\n", "max_tokens": 24, "temperature": 0.9, "seed": 11}
    alone = complete(server, **body)["choices"][0]["text"]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        others = [
            pool.submit(complete, server, prompt=f"def f{i}(x):\n", max_tokens=40) for i in range(7)
        ]
        again = pool.submit(complete, server, **body).result()["choices"][0]["text"]
        assert all(o.result() for o in others)
    assert again == alone
    different = complete(server, **{**body, "seed": 12})["choices"][0]["text"]
    assert different != alone


def test_n_choices_share_one_prefill(idle_after):
    server = idle_after
    server.client.post("/flush_cache")
    before = server.stats()["prefix_hit_tokens"]
    answer = complete(server, prompt=PREFIX, n=4, max_tokens=8, temperature=1.0, seed=3)
    assert len({choice["text"] for choice in answer["choices"]}) > 1
    gained = server.stats()["prefix_hit_tokens"] - before
    assert gained >= 3 * 0.9 * answer["usage"]["prompt_tokens"]


def test_echo_with_logprobs_scores_the_prompt(idle_after):
    asked = {"echo": True, "max_tokens": 1, "logprobs": 2, "prompt_logprobs": 2}
    answer = complete(idle_after, prompt="import os\nimport sys\n", **asked)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    assert "".join(logprobs["tokens"]).startswith("import os\nimport sys\n")
    far: list[int] = []
    # vLLM's form has the rank of each token: those of the likeliest in order, and of the prompt's.
    for told in answer["choices"][0]["prompt_logprobs"][1:]:
        likeliest = sorted(told.values(), key=lambda one: -one["logprob"])
        ranks = [one["rank"] for one in likeliest]
        assert ranks[:2] == [1, 2]
        far += [rank for rank in ranks[2:] if rank > 2]
    assert far
    assert len(far) == sum(len(told) - 2 for told in answer["choices"][0]["prompt_logprobs"][1:])


def test_stop_string_ends_the_text_before_it(idle_after):
    whole = complete(idle_after, prompt="def f(x):\n", max_tokens=48, temperature=0)
    text = whole["choices"][0]["text"]
    stop = text[len(text) // 2 :][:3]
    cut = complete(idle_after, prompt="def f(x):\n", max_tokens=48, temperature=0, stop=stop)
    assert cut["choices"][0]["text"] == text[: text.index(stop)]
    assert cut["choices"][0]["finish_reason"] == "stop"


def test_benchmark_script_of_the_field_report(idle_after):
    """The flow of the published script: model info, then lists of texts with streaming."""
    info = requests.get(f"{idle_after.url}/get_model_info", timeout=10).json()
    assert info["model_path"]
    data = {
        "text": ["Prompt 0: def a(", "Prompt 1: class B", "Prompt 2: import "],
        "sampling_params": {"max_new_tokens": 24, "temperature": 0.7, "stop": "\n"},
        "stream": True,
    }
    response = requests.post(f"{idle_after.url}/generate", json=data, timeout=60, stream=True)
    assert response.status_code == 200
    texts: dict[int, str] = {}
    done = False
    for line in response.iter_lines():
        decoded = line.decode("utf-8").strip()
        if not decoded.startswith("data: "):
            continue
        if decoded[6:] == "[DONE]":
            done = True
            break
        chunk = json.loads(decoded[6:])
        before = texts.get(chunk["index"], "")
        assert chunk["text"].startswith(before), "text is cumulative"
        texts[chunk["index"]] = chunk["text"]
    assert done
    assert set(texts) == {0, 1, 2}
    assert all("\n" not in text for text in texts.values())
    whole = requests.post(
        f"{idle_after.url}/generate", json={**data, "stream": False}, timeout=60
    ).json()
    assert len(whole) == 3
    assert all(part["meta_info"]["completion_tokens"] > 0 for part in whole)


def count_generated_tokens(server) -> int:
    text = server.client.get("/metrics").text
    samples = re.findall(r"^tandem:generation_tokens_total(?:{.*})? (\S+)$", text, re.MULTILINE)
    return int(sum(map(float, samples)))


def test_disconnect_frees_blocks_long_before_the_request_would_end(idle_after):
    """Tried again where a busy machine let the request end before its client could hang up."""
    server = idle_after
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps(
        {"model": "demo", "prompt": PREFIX, "max_tokens": 1400, "ignore_eos": True, "stream": True}
    ).encode()
    num_generated = []
    while len(num_generated) < 20 and min(num_generated, default=1400) >= 700:
        before = count_generated_tokens(server)
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
            )
            received = b""
            while received.count(b"data: ") < 3:
                received += connection.recv(65536)
        server.wait_until(server.is_idle)
        num_generated.append(count_generated_tokens(server) - before)
    assert min(num_generated) < 700, num_generated


@pytest.mark.parametrize(
    ("path", "content", "headers", "words"),
    [
        ("/v1/completions", b"{", {}, []),
        ("/v1/completions", b"\xff\xfe{}", {}, []),
        ("/v1/completions", b'{"model": "demo", "prompt": 3.5}', {}, ["prompt"]),
        (
            "/v1/completions",
            b'{"model": "demo", "prompt": "a", "max_tokens": "x"}',
            {},
            ["max_tok"],
        ),
        ("/v1/completions", b'{"model": "nope", "prompt": "a"}', {}, ["model"]),
        ("/v1/completions", b'{"model": "demo", "prompt": "a", "temperature": -1}', {}, ["temper"]),
        ("/v1/completions", b'{"model": "demo", "prompt": [999999]}', {}, ["prompt"]),
        ("/v1/chat/completions", b'{"model": "demo", "messages": []}', {}, ["messages"]),
        ("/v1/chat/completions", b'{"model": "demo", "messages": [{"role": 1}]}', {}, ["messages"]),
        ("/generate", b'{"text": 1}', {}, ["text"]),
    ],
)
def test_wrong_requests_get_a_4xx_that_names_the_field(idle_after, path, content, headers, words):
    answer = idle_after.client.post(
        path, content=content, headers={"Content-Type": "application/json", **headers}
    )
    assert 400 <= answer.status_code < 500
    error = answer.json()["error"]
    assert error["message"]
    assert {"type", "param", "code"} <= set(error)
    for word in words:
        assert word in f"{error['message']} {error['param']}"


def test_prompt_over_the_context_names_both_sizes(idle_after):
    answer = idle_after.client.post(
        "/v1/completions", json={"model": "demo", "prompt": [1] * 5000, "max_tokens": 5}
    )
    assert answer.status_code == 400
    assert "5000" in answer.json()["error"]["message"]
    assert "2048" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "prompt"


def test_huge_body_is_refused_early(idle_after):
    answer = idle_after.client.post("/v1/completions", content=b'{"prompt": "' + b"a" * (9 << 20))
    assert answer.status_code == 413
    assert complete(idle_after, prompt="x = ", max_tokens=1)


def test_metrics_have_the_known_names(idle_after):
    complete(idle_after, prompt="x = ", max_tokens=2)
    text = idle_after.client.get("/metrics").text
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prefix_cache_hits_total",
        "time_to_first_token_seconds_bucket",
        "request_queue_time_seconds_bucket",
        "e2e_request_latency_seconds_bucket",
    ):
        assert f"tandem:{name}" in text


def test_health_and_ready(idle_after):
    assert idle_after.client.get("/health").status_code == 200
    assert idle_after.client.get("/ready").status_code == 200


def test_an_instance_imports_nothing_for_training_alone(server):
    """transformers would, where it is installed: a tenth of a start and of what it maps."""
    maps = Path(f"/proc/{server.instance_pid()}/maps").read_text()
    assert "/torch/" in maps
    assert "/scipy/" not in maps
    assert "/sklearn/" not in maps


def test_the_process_that_instances_are_forked_from_holds_nothing(server):
    """One thread, since a fork copies no other; no secret; and of sockets only its own three."""
    stat = Path(f"/proc/{server.instance_pid()}/stat").read_text()
    proc = Path("/proc") / stat.rsplit(")", 1)[1].split()[1]
    assert "fork_server" in (proc / "cmdline").read_text()
    assert len(list((proc / "task").iterdir())) == 1
    assert not re.search(r"(^|\0)TANDEM_(?!MAX_ISA)", (proc / "environ").read_text())
    files = {int(entry.name): os.readlink(entry) for entry in (proc / "fd").iterdir()}
    assert sum(file.startswith("socket:") for file in files.values()) == 3
    assert len(set(files) - {0, 1, 2}) == 2, files


def test_decoding_is_not_held_up_by_a_long_prompt(idle_after):
    """A stream goes on while another prompt is prefilled in chunks."""
    server = idle_after
    with server.client.stream(
        "POST",
        "/v1/completions",
        json={
            "model": "demo",
            "prompt": "x = 1\n",
            "max_tokens": 64,
            "ignore_eos": True,
            "stream": True,
        },
    ) as stream:
        lines = stream.iter_lines()
        next(line for line in lines if line.startswith("data: "))
        with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as other:
            answer = other.post(
                "/v1/completions",
                json={"model": "demo", "prompt": [5] * 1900, "max_tokens": 1, "cache_salt": "z"},
            )
        assert answer.status_code == 200
        rest = [line for line in lines if line.startswith("data: ")]
    assert rest[-1] == "data: [DONE]"
