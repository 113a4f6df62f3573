"""What lm-eval computes over HTTP is what transformers computes from the weights.

Goal: no token of a continuation is lost or doubled, end-of-text included. Method: its requests and
its reading of the answers, against a float32 forward of transformers over the same checkpoint.
"""

import math
import warnings

import pytest
import torch

from tandem.models.loading.hub import resolve_folder

CONTEXT = "def add(a, b):\n"
CONTINUATIONS = ["    return a + b\n", "    return b\n\n\ndef", "x", " 世界"]
TOLERANCE = 5e-3
"""Of a continuation's sum. Both sides are float32 from the same weights, so that a lost token
(several nats) is a thousand times more."""


@pytest.fixture(scope="module")
def reference():
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(resolve_folder("demo"), dtype=torch.float32)
    return model.eval()


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_those_of_transformers(server, reference, pooling):
    texts = [CONTEXT, *CONTINUATIONS]
    body = {"input": texts, "pooling": pooling}
    answer = server.client.post("/v1/embeddings", json=body).json()
    told = [each["embedding"] for each in answer["data"]]
    for text, vector in zip(texts, told, strict=True):
        ids = server.client.post("/tokenize", json={"prompt": text}).json()["tokens"]
        with torch.no_grad():
            hidden = reference.model(torch.tensor([ids])).last_hidden_state[0]
        pooled = hidden[-1] if pooling == "last" else hidden.mean(dim=0)
        expected = torch.nn.functional.normalize(pooled, dim=0)
        torch.testing.assert_close(torch.tensor(vector), expected, rtol=0, atol=2e-5)


def score(reference, ids: list[int], num_context: int) -> tuple[float, bool]:
    """Return the log-likelihood of the tokens behind the context, and whether all are greedy."""
    with torch.no_grad():
        logits = reference(torch.tensor([ids])).logits[0].double()
    logprobs = torch.log_softmax(logits, -1)
    total, is_greedy = 0.0, True
    for position in range(num_context, len(ids)):
        row = logprobs[position - 1]
        total += row[ids[position]].item()
        is_greedy = is_greedy and row.argmax().item() == ids[position]
    return total, is_greedy


def tokenize(server, text: str) -> list[int]:
    return server.client.post("/tokenize", json={"prompt": text}).json()["tokens"]


def find_whole_answer(server) -> list[int]:
    """Return the ids of a prompt and its greedy answer, the one that ends the text included."""
    messages = [{"role": "user", "content": "Write a function that adds two numbers."}]
    prompt = server.client.post("/tokenize", json={"messages": messages}).json()["tokens"]
    reply = server.client.post(
        "/generate",
        json={"input_ids": prompt, "sampling_params": {"max_new_tokens": 600, "temperature": 0}},
    ).json()
    assert reply["meta_info"]["finish_reason"]["type"] == "stop", reply["meta_info"]
    return prompt + reply["output_ids"]


def test_echo_scores_every_token_also_where_end_of_text_follows(server, reference):
    """The same requests without lm-eval: it asks for one token and cuts its entry off."""
    *ids, eos = find_whole_answer(server)
    reply = server.client.post(
        "/v1/completions",
        json={"prompt": ids, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1},
    ).json()
    choice = reply["choices"][0]
    assert choice["finish_reason"] == "stop"
    values = choice["logprobs"]["token_logprobs"]
    assert len(values) == len(ids) + 1
    assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["top_logprobs"])
    half = len(ids) // 2
    expected, _ = score(reference, ids, half)
    assert sum(values[half:-1]) == pytest.approx(expected, abs=TOLERANCE)
    end, is_greedy = score(reference, [*ids, eos], len(ids))
    assert is_greedy
    assert values[-1] == pytest.approx(end, abs=TOLERANCE)


def test_generate_scores_every_token_it_returns(server, reference):
    *ids, eos = find_whole_answer(server)
    reply = server.client.post(
        "/generate",
        json={
            "input_ids": ids,
            "return_logprob": True,
            "sampling_params": {"max_new_tokens": 4, "temperature": 0},
        },
    ).json()
    meta = reply["meta_info"]
    assert reply["output_ids"] == [eos]
    assert meta["finish_reason"] == {"type": "stop", "matched": eos}
    (row,) = meta["output_token_logprobs"]
    assert row[1] == eos
    assert row[0] == pytest.approx(score(reference, [*ids, eos], len(ids))[0], abs=TOLERANCE)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_lm_eval_agrees_with_transformers(server, reference, batch_size):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Its own and those of what it imports.
        pytest.importorskip("lm_eval", reason="needs lm-eval[api]")
        pytest.importorskip("tenacity", reason="needs lm-eval[api]")
        from lm_eval.api.instance import Instance
        from lm_eval.models.openai_completions import LocalCompletionsAPI

        model = LocalCompletionsAPI(
            base_url=f"{server.url}/v1/completions",
            model="demo",
            tokenizer=str(resolve_folder("demo")),
            tokenizer_backend="huggingface",
            batch_size=batch_size,
        )
        text = model.tokenizer.decode(find_whole_answer(server)[:-1])
        pairs = [(CONTEXT, continuation) for continuation in CONTINUATIONS]
        pairs.append((text[: len(text) // 2], text[len(text) // 2 :]))
        asked = [
            Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=i)
            for i, pair in enumerate(pairs)
        ]
        results = model.loglikelihood(asked)
        for pair, (value, is_greedy) in zip(pairs, results, strict=True):
            context_ids, continuation_ids = model._encode_pair(*pair)
            ids = context_ids + continuation_ids
            expected, expected_greedy = score(reference, ids, len(context_ids))
            assert value == pytest.approx(expected, abs=TOLERANCE), pair
            assert is_greedy == expected_greedy, pair
        rolling = Instance(request_type="loglikelihood_rolling", doc={}, arguments=(text,), idx=0)
        (total,) = model.loglikelihood_rolling([rolling])
        ids = [model.eot_token_id, *tokenize(server, text)]
        expected, _ = score(reference, ids, 1)
        assert math.isfinite(total)
        assert total == pytest.approx(expected, abs=TOLERANCE)
