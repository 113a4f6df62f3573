"""SGLang's clients work: the benchmark that a field report printed, and the frontend's endpoint.

Method: their request and reading code, over ``requests``, against a real server.
"""

import json
from itertools import pairwise

import pytest
import requests
from serving import wait_until


@pytest.fixture
def server(shared, tokenizer):
    live = shared
    live.renew()
    live.engine.answer = tokenizer.encode("the cat sat on the mat\nhello world hello world")
    return live


def send_batch_request(url: str, prompts: list[str], gen_tokens: int) -> tuple[list[dict], bool]:
    """Send a batch and read its stream, as the benchmark does; returns chunks and the end."""
    sampling_params = {"max_new_tokens": gen_tokens, "temperature": 0.7, "stop": "\n"}
    data = {"text": prompts, "sampling_params": sampling_params, "stream": True}
    response = requests.post(url + "/generate", json=data, timeout=60, stream=True)
    if response.status_code != 200:
        raise RuntimeError(response.json())
    chunks = []
    for line in response.iter_lines():
        if line:
            decoded_line = line.decode("utf-8").strip()
            if decoded_line.startswith("data: "):
                data_part = decoded_line[6:]
                if data_part == "[DONE]":
                    return chunks, True
                chunks.append(json.loads(data_part))
    return chunks, False


def test_benchmark_flow(server):
    info = requests.get(server.url + "/get_model_info", timeout=10)
    assert info.status_code == 200
    assert info.json()["model_path"]
    prompts = [f"Prompt {i}: hello world" for i in range(10)]
    chunks, is_done = send_batch_request(server.url, prompts, 100)
    assert is_done
    assert any(chunk.get("text") for chunk in chunks)
    assert {chunk["index"] for chunk in chunks} == set(range(10))
    for index in range(10):
        own = [chunk for chunk in chunks if chunk["index"] == index]
        for before, after in pairwise(own):
            assert after["text"].startswith(before["text"]), "text is cumulative"
            assert after["meta_info"]["completion_tokens"] > 0
        last = own[-1]
        assert last["text"] == "the cat sat on the mat"
        assert last["meta_info"]["finish_reason"] == {"type": "stop", "matched": "\n"}
        assert last["meta_info"]["e2e_latency"] > 0
        assert own[0]["meta_info"]["finish_reason"] is None


def test_frontend_stream_reads_text_and_meta_info(server):
    """SGLang's RuntimeEndpoint cuts what it has seen from the front of each text."""
    data = {
        "text": "hello",
        "sampling_params": {"skip_special_tokens": True, "max_new_tokens": 5},
        "stream": True,
    }
    response = requests.post(server.url + "/generate", json=data, stream=True, timeout=10)
    text, position = "", 0
    for line in response.iter_lines(decode_unicode=False):
        chunk = line.decode("utf-8")
        if chunk and chunk.startswith("data:"):
            if chunk == "data: [DONE]":
                break
            data = json.loads(chunk[5:].strip("\n"))
            text += data["text"][position:]
            position = len(data["text"])
            assert data["meta_info"]["prompt_tokens"] > 0
    assert text
    assert data["meta_info"]["finish_reason"] == {"type": "length", "length": 5}
    assert data["meta_info"]["completion_tokens"] == len(data["output_ids"]) == 5


def test_single_and_lists(server, tokenizer):
    ids = tokenizer.encode("hello world")
    single = server.post("/generate", {"text": "hello world"}).json()
    by_ids = server.post("/generate", {"input_ids": ids}).json()
    assert isinstance(single, dict)
    assert single["text"] == by_ids["text"]
    assert server.engine.requests[0].prompt_ids == server.engine.requests[1].prompt_ids == ids
    many = server.post(
        "/generate",
        {
            "input_ids": [ids, ids[:1]],
            "sampling_params": [{"max_new_tokens": 3}, {"max_new_tokens": 5}],
            "rid": ["first", "second"],
        },
    ).json()
    assert [one["meta_info"]["completion_tokens"] for one in many] == [3, 5]
    assert [one["meta_info"]["id"] for one in many] == ["first", "second"]
    choices = server.post(
        "/generate", {"text": "a", "sampling_params": {"n": 2, "max_new_tokens": 1}}
    )
    assert len(choices.json()) == 2


def test_sampling_names_are_mapped(server):
    given = {
        "max_new_tokens": 7,
        "min_new_tokens": 2,
        "temperature": 0,
        "top_k": -1,
        "sampling_seed": 11,
        "stop_token_ids": [5],
        "ignore_eos": True,
        "logit_bias": {"3": -1.5},
    }
    server.post("/generate", {"text": "a", "sampling_params": given, "priority": 3})
    request = server.engine.requests[0]
    assert request.priority == 3
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.seed) == (7, 2, 11)
    assert (sampling.temperature, sampling.top_k, sampling.ignore_eos) == (0.0, 0, True)
    assert sampling.stop_token_ids == (5,)
    assert sampling.logit_bias == {3: -1.5}
    server.post("/generate", {"text": "a"})
    assert server.engine.requests[1].sampling.max_tokens == 128


def test_logprobs_of_output_and_prompt(server, tokenizer):
    ids = tokenizer.encode("hello world")
    reply = server.post(
        "/generate",
        {
            "input_ids": ids,
            "return_logprob": True,
            "top_logprobs_num": 2,
            "logprob_start_len": 1,
            "return_text_in_logprobs": True,
            "sampling_params": {"max_new_tokens": 3},
        },
    ).json()
    meta = reply["meta_info"]
    assert [row[1] for row in meta["output_token_logprobs"]] == reply["output_ids"]
    assert meta["output_token_logprobs"][0][0] == -0.25
    assert "".join(row[2] for row in meta["output_token_logprobs"]) == reply["text"]
    assert [len(rows) for rows in meta["output_top_logprobs"]] == [2, 2, 2]
    assert [row[1] for row in meta["input_token_logprobs"]] == ids[1:]


def test_the_stop_token_has_its_logprob_and_is_what_matched(server, tokenizer):
    server.engine.answer = tokenizer.encode("hello")
    body = {"text": "a", "return_logprob": True}
    for stop_id, sampling in ((0, {}), (7, {"stop_token_ids": [7]})):
        server.engine.stop_token_id = stop_id
        reply = server.post("/generate", body | {"sampling_params": sampling}).json()
        meta = reply["meta_info"]
        assert reply["text"] == "hello"
        assert reply["output_ids"] == [*server.engine.answer, stop_id]
        assert [row[1] for row in meta["output_token_logprobs"]] == reply["output_ids"]
        assert meta["completion_tokens"] == len(reply["output_ids"])
        assert meta["finish_reason"] == {"type": "stop", "matched": stop_id}


def test_abort_by_rid(server):
    server.engine.step_s = 30.0
    body = {"text": "hello", "rid": "mine", "stream": True}
    with requests.post(server.url + "/generate", json=body, stream=True, timeout=20) as response:
        wait_until(lambda: server.engine.num_held == 1)
        assert server.post("/abort_request", {"rid": "other"}).json() == {"num_aborted": 0}
        assert server.post("/abort_request", {"rid": "mine"}).json() == {"num_aborted": 1}
        events = [line for line in response.iter_lines() if line]
    assert json.loads(events[-2][6:])["meta_info"]["finish_reason"]["type"] == "abort"
    assert server.engine.num_held == 0


def test_flush_cache_and_information(server):
    for reply in (server.get("/flush_cache"), server.post("/flush_cache")):
        assert reply.json() == {"success": True, "num_freed_blocks": 7}
    info = server.get("/server_info").json()
    assert info["store"] is None, "it runs none"
    assert info["instance"]["architecture"] == "Qwen3MoeForCausalLM"
    assert "api_key" not in info["config"]
    assert server.get("/get_server_info").json()["version"] == info["version"]
    assert server.get("/model_info").json()["is_generation"] is True


def test_tokenize_and_back(server, tokenizer):
    text = "grüße 😀"
    for prefix in ("", "/v1"):
        reply = server.post(f"{prefix}/tokenize", {"prompt": text, "return_token_strs": True})
        tokens = reply.json()["tokens"]
        assert tokens == tokenizer.encode(text)
        assert reply.json()["count"] == len(tokens) == len(reply.json()["token_strs"])
        back = server.post(f"{prefix}/detokenize", {"tokens": tokens}).json()
        assert back["prompt"] == back["text"] == text
    several = server.post("/tokenize", {"prompt": ["a", "a b"]}).json()
    assert several["count"] == [len(ids) for ids in several["tokens"]]
    chat = server.post("/tokenize", {"messages": [{"role": "user", "content": "hello"}]}).json()
    assert server.post("/detokenize", {"tokens": chat["tokens"]}).json()["text"] == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
