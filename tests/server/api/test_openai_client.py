"""The official OpenAI client gets what it expects.

Method: its sync and async forms against a real server over the fake engine, whose answer to a
prompt is known beforehand.
"""

import asyncio

import openai
import pytest

ANSWER = "the cat sat on the mat 😀 hello"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def server(shared, tokenizer):
    live = shared
    live.renew()
    live.engine.answer = tokenizer.encode(ANSWER)
    live.engine.stop_token_id = 0
    live.engine.cached_len = 3
    return live


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def test_chat(client, server, tokenizer):
    reply = client.chat.completions.create(model="tiny", messages=HELLO)
    choice = reply.choices[0]
    assert choice.message.content == ANSWER
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    rendered = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    prompt = tokenizer.encode(rendered, add_special_tokens=False)
    assert server.engine.requests[0].prompt_ids == prompt
    assert reply.usage.prompt_tokens == len(prompt)
    # The stop token was computed too.
    assert reply.usage.completion_tokens == len(server.engine.answer) + 1
    assert reply.usage.total_tokens == len(prompt) + len(server.engine.answer) + 1
    assert reply.usage.prompt_tokens_details.cached_tokens == 3
    assert reply.id.startswith("chatcmpl-")
    assert reply.model == "tiny"


def test_chat_stream(client):
    stream = client.chat.completions.create(
        model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
    assert "".join(texts) == ANSWER
    assert len([text for text in texts if text]) > 5
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 3
    assert len({chunk.id for chunk in chunks}) == 1


def test_continuous_usage_counts_up(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = client.chat.completions.create(
        model="tiny", messages=HELLO, stream=True, stream_options=options
    )
    counts = [chunk.usage.completion_tokens for chunk in stream if chunk.usage is not None]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


def test_what_an_event_says_belongs_to_its_text(client, server, tokenizer):
    """Choices run ahead of what is sent; an event tells of its own tokens, not of the latest."""
    server.engine.answer = tokenizer.encode("the cat sat on the mat")
    stream = client.completions.create(
        model="tiny",
        prompt=["a", "b"],
        n=8,
        logprobs=0,
        max_tokens=100,
        stop="mat",
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    counts = dict.fromkeys(range(16), 0)
    for chunk in stream:
        if not chunk.choices:
            continue
        (choice,) = chunk.choices
        counts[choice.index] += len(choice.logprobs.tokens)
        assert chunk.usage.completion_tokens == counts[choice.index]
        stop_reason = (choice.model_extra or {}).get("stop_reason")
        assert stop_reason == ("mat" if choice.finish_reason is not None else None)


def test_async_client(server):
    async def ask() -> tuple[str, str]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0
        ) as client:
            whole = await client.chat.completions.create(model="tiny", messages=HELLO)
            stream = await client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
            text = ""
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
            return whole.choices[0].message.content, text

    assert asyncio.run(ask()) == (ANSWER, ANSWER)


def test_completion_of_text_and_ids(client, server, tokenizer):
    ids = tokenizer.encode("the cat")
    for prompt in ("the cat", ids):
        reply = client.completions.create(model="tiny", prompt=prompt, max_tokens=100)
        assert reply.choices[0].text == ANSWER
        assert server.engine.requests[-1].prompt_ids == ids


def test_completion_of_several_prompts_keeps_their_order(client, server):
    server.engine.answer = None
    prompts = ["hello world", "the cat sat", "def main"]
    reply = client.completions.create(model="tiny", prompt=prompts, max_tokens=2, echo=True)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    for choice, prompt in zip(reply.choices, prompts, strict=True):
        assert choice.text.startswith(prompt)
        assert choice.finish_reason == "length"
    assert reply.usage.completion_tokens == 6


def test_several_streams_in_one(client, server):
    server.engine.answer = None
    prompts = ["hello world", "the cat sat"]
    stream = client.completions.create(
        model="tiny", prompt=prompts, max_tokens=50, n=2, stream=True
    )
    texts = dict.fromkeys(range(4), "")
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts[0] == texts[1]
    assert texts[2] == texts[3]
    assert texts[0].startswith(prompts[0])
    assert texts[2].startswith(prompts[1])


def test_n_choices_have_their_own_seeds(client, server):
    reply = client.chat.completions.create(model="tiny", messages=HELLO, n=3, seed=7)
    assert len(reply.choices) == 3
    seeds = [request.sampling.seed for request in server.engine.requests]
    assert seeds[0] == 7
    assert len(set(seeds)) == 3
    client.chat.completions.create(model="tiny", messages=HELLO, n=3, seed=7)
    assert [request.sampling.seed for request in server.engine.requests[3:]] == seeds
    assert reply.usage.prompt_tokens == len(server.engine.requests[0].prompt_ids)


def test_chat_logprobs(client, server):
    reply = client.chat.completions.create(
        model="tiny", messages=HELLO, logprobs=True, top_logprobs=2
    )
    content = reply.choices[0].logprobs.content
    spelled = b"".join(bytes(entry.bytes) for entry in content).decode()
    assert spelled == f"{ANSWER}<|endoftext|>", "every token that was generated, the last as well"
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    assert content[0].logprob == -0.25
    stream = client.chat.completions.create(
        model="tiny", messages=HELLO, logprobs=True, top_logprobs=2, stream=True
    )
    streamed = []
    for chunk in stream:
        found = chunk.choices[0].logprobs
        streamed += found.content if found is not None else []
    assert [e.bytes for e in streamed] == [e.bytes for e in content]


def test_completion_logprobs_with_echo(client, server, tokenizer):
    server.engine.answer = None
    ids = tokenizer.encode("the cat sat")
    reply = client.completions.create(
        model="tiny", prompt="the cat sat", max_tokens=0, echo=True, logprobs=1
    )
    found = reply.choices[0].logprobs
    assert reply.choices[0].text == "the cat sat"
    assert "".join(found.tokens) == "the cat sat"
    assert len(found.tokens) == len(ids)
    assert found.token_logprobs[0] is None
    assert found.token_logprobs[1:] == [-0.25] * (len(ids) - 1)
    assert found.text_offset[0] == 0
    assert found.text_offset[-1] == len("the cat sat") - len(found.tokens[-1])


@pytest.mark.parametrize("echo", [False, True])
def test_offsets_are_those_of_the_text(client, server, tokenizer, echo):
    """Also of characters of several tokens, of special tokens, and of those that have no text."""
    prompt, answer = "世😀<|im_start|>a", "é, 世界 😀!<|im_end|>z"
    server.engine.answer = tokenizer.encode(answer)
    reply = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=50, echo=echo, logprobs=1
    )
    choice = reply.choices[0]
    assert choice.text == (prompt if echo else "") + answer.replace("<|im_end|>", "")
    found = choice.logprobs
    shown = [
        (token, offset)
        for token, offset in zip(found.tokens, found.text_offset, strict=True)
        if "\ufffd" not in token and token not in ("<|im_end|>", "<|endoftext|>")
    ]
    assert len(shown) > 4
    for token, offset in shown:
        assert choice.text.startswith(token, offset), (token, offset)
    assert found.text_offset == sorted(found.text_offset)
    assert found.text_offset[-1] == len(choice.text)


@pytest.mark.parametrize("is_stream", [False, True])
def test_end_of_text_right_after_the_prompt_has_its_entry(client, server, tokenizer, is_stream):
    """lm-eval cuts the last entry off: with one too few it would lose a token of the prompt."""
    server.engine.answer = []
    ids = tokenizer.encode("the cat sat")
    reply = client.completions.create(
        model="tiny", prompt="the cat sat", max_tokens=1, echo=True, logprobs=1, stream=is_stream
    )
    parts = [part.choices[0] for part in reply] if is_stream else reply.choices
    assert "".join(part.text for part in parts) == "the cat sat"
    assert parts[-1].finish_reason == "stop"
    assert [t for part in parts for t in part.logprobs.tokens][-1] == "<|endoftext|>"
    values = [v for part in parts for v in part.logprobs.token_logprobs]
    assert values == [None] + [-0.25] * len(ids)
    offsets = [v for part in parts for v in part.logprobs.text_offset]
    assert offsets[-1] == len("the cat sat")
    assert all(len(part.logprobs.top_logprobs) == len(part.logprobs.tokens) for part in parts)


def test_of_tokens_with_one_text_the_likeliest_is_told(client, server, tokenizer):
    """Pieces of a character all read U+FFFD; a worse one must not hide the greedy one."""
    texts = [tokenizer.token_text(token_id) for token_id in range(tokenizer.vocab_size)]
    first = next(i for i, text in enumerate(texts) if text == texts[i + 1] == "\ufffd")
    server.engine.answer = [first]
    reply = client.completions.create(model="tiny", prompt="a", max_tokens=1, logprobs=2)
    assert reply.choices[0].logprobs.top_logprobs == [{"\ufffd": -0.25}]


@pytest.mark.parametrize("is_stream", [False, True])
def test_stop_string(client, server, is_stream):
    reply = client.chat.completions.create(
        model="tiny", messages=HELLO, stop=["nowhere", "on the"], stream=is_stream
    )
    if is_stream:
        chunks = list(reply)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        text, reason = reply.choices[0].message.content, reply.choices[0].finish_reason
        assert 0 < reply.usage.completion_tokens < len(server.engine.answer)
    assert text == "the cat sat "
    assert reason == "stop"
    # The engine was told at once, rather than left to finish.
    assert server.engine.cancelled == [server.engine.requests[0].request_id]


def test_stop_string_kept_on_demand(client):
    reply = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        stop="on the",
        extra_body={"include_stop_str_in_output": True},
    )
    assert reply.choices[0].message.content == "the cat sat on the"


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("large")
    assert caught.value.code == "not_found"


def test_unknown_model(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="large", messages=HELLO)
    assert caught.value.param == "model"


def test_lost_instance_is_an_error_and_in_a_stream_an_event(client, server):
    server.engine.die_after = 2
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model="tiny", messages=HELLO)
    assert caught.value.status_code == 503
    assert caught.value.code == "peer_lost"
    stream = client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
    with pytest.raises(openai.APIError) as caught:
        list(stream)
    assert caught.value.code == "peer_lost"


def test_what_other_servers_take_is_taken(server):
    """``top_p`` 0 is the likeliest token alone, ``top_logprobs`` 0 asks for nothing."""
    body = {"messages": HELLO, "max_tokens": 2, "top_logprobs": 0, "top_p": 0}
    reply = server.post("/v1/chat/completions", body)
    assert reply.status_code == 200, reply.text
    assert 0 < server.engine.requests[-1].sampling.top_p < 1e-6
    assert server.engine.requests[-1].sampling.logprobs is None
    listed = server.get("/v1/models/").json()
    assert listed == server.get("/v1/models").json()
    assert listed["object"] == "list"
