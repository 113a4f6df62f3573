"""Goal: a Python program gets the tokens that a client of the server gets, and never hangs.

Method: the demo model as one GGUF file, which is all that the program names.
"""

import asyncio
import subprocess
import sys
import threading

import httpx
import pytest

import tandem
from demo_file import MESSAGES, NUM_TOKENS, answer, make_folder, write_file
from shared import Shared
from tandem.core.errors import ConfigError, PeerLostError

PROMPTS = ["The capital of", "Once upon a time"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("demo"))


@pytest.fixture(scope="module")
def models(folder):
    file = str(write_file(folder))
    with Shared(lambda: tandem.LLM(file, dtype="bfloat16", max_model_len=512)) as shared:
        yield shared


@pytest.fixture
def llm(models):
    return models.get()


def test_a_gguf_file_alone_answers_as_its_folder(llm, folder):
    """Template, tokens, weights and end of text come from the one file."""
    (output,) = llm.chat(MESSAGES, max_tokens=NUM_TOKENS, temperature=0)
    assert (output.prompt_tokens, output.text) == answer(folder)
    assert output.text


def post(llm, path, **body):
    async def ask():
        transport = httpx.ASGITransport(llm._app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return (await client.post(path, json=body)).json()

    return llm._call(ask())


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 1, "seed": 7, "n": 2},
        {"temperature": 0, "stop": ["e"]},
        {"temperature": 0, "logprobs": 2},
    ],
)
def test_answers_are_those_of_the_server(llm, fields):
    fields = fields | {"max_tokens": 12}
    answer = post(llm, "/v1/completions", prompt=PROMPTS, **fields)
    outputs = llm.generate(PROMPTS, **fields)
    for output, choice in zip(outputs, answer["choices"], strict=True):
        assert (output.text, output.finish_reason) == (choice["text"], choice["finish_reason"])
        assert output.stop_reason == choice.get("stop_reason")
        if "logprobs" in fields:
            assert [x.logprob for x in output.logprobs] == choice["logprobs"]["token_logprobs"]
    assert sum(x.completion_tokens for x in outputs) == answer["usage"]["completion_tokens"]


def test_a_chat_is_answered_as_by_the_server(llm):
    fields = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 8}
    answer = post(llm, "/v1/chat/completions", **fields)
    assert llm.chat(**fields)[0].text == answer["choices"][0]["message"]["content"]


def test_streams_join_to_the_answer_and_end_when_closed(llm):
    whole = llm.generate(PROMPTS[0], temperature=0, max_tokens=12)[0]
    assert "".join(d.text for d in llm.stream(PROMPTS[0], temperature=0, max_tokens=12)) == (
        whole.text
    )

    async def join():
        return [d.text async for d in llm.astream(PROMPTS[0], temperature=0, max_tokens=12)]

    assert "".join(asyncio.run(join())) == whole.text
    stream = llm.stream(PROMPTS[0], max_tokens=400, ignore_eos=True)
    next(stream)
    stream.close()
    # A cancel is told to the engine between two of its steps.
    polls = (llm._call(llm._context.engine.stats()).num_running for _ in range(1000))
    assert 0 in polls


def test_two_threads_get_their_own_answers(llm):
    alone = [llm.generate(prompt, temperature=0, max_tokens=12)[0].text for prompt in PROMPTS]
    found = {}

    def ask(prompt):
        found[prompt] = llm.generate(prompt, temperature=0, max_tokens=12)[0].text

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in PROMPTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[prompt] for prompt in PROMPTS] == alone


def test_mistakes_are_errors_of_the_project(llm):
    with pytest.raises(ConfigError, match="temperature"):
        llm.generate("a", temperature=-1)
    with pytest.raises(ConfigError, match="no setting"):
        tandem.LLM("demo", max_modellen=5)
    with pytest.raises(AttributeError):
        _ = tandem.LLN


def test_importing_tandem_loads_neither_torch_nor_the_extension():
    code = "import sys, tandem; assert not {'torch', 'tandem._native._core'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def check_that_closing_ends_requests(llm):
    stream = llm.stream(PROMPTS[0], max_tokens=400, ignore_eos=True)
    next(stream)
    llm.close()
    with pytest.raises(PeerLostError):
        list(stream)
    with pytest.raises(PeerLostError):
        llm.generate("a")


def test_closing_ends_a_request_in_flight_with_an_error(models):
    """Last of this file: to start another model takes as long as all of its tests."""
    with models.use_up() as llm:
        check_that_closing_ends_requests(llm)


@pytest.mark.slow
def test_closing_ends_requests_of_a_pair():
    check_that_closing_ends_requests(tandem.LLM("demo", max_model_len=512, prefill=1, decode=1))
