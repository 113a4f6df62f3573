"""Embeddings, scores and rankings, by the clients that people have.

Method: a real server over the fake engine, whose vector of a prompt is (first token, tokens, kind
of pooling, 0).
"""

import msgspec
import numpy as np
import ollama
import openai
import pytest
from fake_engine import FakeEngine, make_info
from serving import LiveServers
from vocabularies import make_byte_level_tokenizer

KINDS = {"last": 0.0, "mean": 1.0}


@pytest.fixture(scope="module")
def live():
    with LiveServers(make_byte_level_tokenizer(chat_template=None)) as servers:
        yield servers.start(FakeEngine(info=make_info(320, max_model_len=64)))


@pytest.fixture
def client(live):
    live.renew()
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def unit(*numbers):
    return np.array(numbers) / np.linalg.norm(numbers)


def test_embeddings_of_texts_and_ids(client, live):
    tokenizer = make_byte_level_tokenizer()
    texts = ["hello world", "a"]
    ids = [tokenizer.encode(text) for text in texts]
    expected = [unit(each[0], len(each), 0, 0) for each in ids]
    # The client asks for base64 by itself.
    for given in (texts, ids):
        for options in ({}, {"encoding_format": "float"}):
            reply = client.embeddings.create(model="tiny", input=given, **options)
            assert [each.index for each in reply.data] == [0, 1]
            np.testing.assert_allclose([e.embedding for e in reply.data], expected, rtol=1e-6)
            assert reply.usage.prompt_tokens == sum(map(len, ids))
    one = client.embeddings.create(model="tiny", input=texts[0], dimensions=2).data
    np.testing.assert_allclose(one[0].embedding, unit(ids[0][0], len(ids[0])), rtol=1e-6)
    for pooling, kind in KINDS.items():
        raw = client.embeddings.create(
            model="tiny", input=ids[1], extra_body={"pooling": pooling, "normalize": False}
        )
        assert raw.data[0].embedding == [float(ids[1][0]), 1.0, kind, 0.0]


def test_many_texts_go_in_groups(client, live):
    live.engine.max_running = 64
    prompts = [[3 + i % 300] for i in range(200)]
    reply = client.embeddings.create(model="tiny", input=prompts, extra_body={"normalize": False})
    assert [each.embedding[0] for each in reply.data] == [p[0] for p in prompts]


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ({"input": []}, "empty"),
        ({"input": [""]}, "has 0 tokens"),
        ({"input": [[5] * 65]}, "has 65 tokens: send 1 to 64"),
        ({"input": [[5]] * 2049}, "2049 entries"),
        ({"input": "a", "dimensions": 5}, "vectors have 4"),
        ({"input": [[400]]}, "less|< 320|<= 319"),
    ],
)
def test_refused_embeddings(client, live, body, what):
    with pytest.raises(openai.BadRequestError, match=what):
        client.embeddings.create(model="tiny", **body)
    assert live.engine.requests == []


def test_the_pooling_of_a_checkpoint(tmp_path):
    folder = tmp_path / "1_Pooling"
    folder.mkdir()
    (folder / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    with LiveServers(make_byte_level_tokenizer(chat_template=None)) as servers:
        live = servers.start(FakeEngine(info=make_info(320)), folder=tmp_path)
        body = {"input": [7], "normalize": False}
        assert live.post("/v1/embeddings", body).json()["data"][0]["embedding"][2] == KINDS["mean"]


def test_embed_of_ollama(client, live):
    with ollama.Client(host=live.url) as own:
        reply = own.embed("tiny", ["a", "b" * 100])
        assert [len(each) for each in reply.embeddings] == [4, 4]
        assert reply.prompt_eval_count == 1 + 64
        assert reply.total_duration > 0
        with pytest.raises(ollama.ResponseError, match="100 tokens"):
            own.embed("tiny", "b" * 100, truncate=False)


def test_embeddings_of_ollama_as_older_clients_ask(client, live):
    """One vector, not normalized; without a prompt an empty one."""
    token = make_byte_level_tokenizer().encode("a")[0]
    for body, vector in (
        ({"model": "tiny", "prompt": "a"}, [float(token), 1.0, 0.0, 0.0]),
        ({"model": "tiny", "prompt": ""}, []),
        ({"model": "tiny"}, []),
    ):
        reply = live.post("/api/embeddings", body)
        assert (reply.status_code, reply.json()) == (200, {"embedding": vector}), body


def test_scores_and_rankings(client, live):
    tokenizer = make_byte_level_tokenizer()

    def score(first, second):
        ids = tokenizer.encode(first) + tokenizer.encode(second)
        return 1 / (1 + np.exp(-float(ids[0])))

    # Tokens are positive, so the sigmoid is near 1; logits tell them apart.
    body = {"text_1": "x", "text_2": ["a", "b"]}
    reply = live.post("/v1/score", body).json()
    assert [each["score"] for each in reply["data"]] == [score("x", "a"), score("x", "b")]
    assert reply["usage"]["prompt_tokens"] == 4
    pairs = {"queries": ["a", "b"], "documents": ["x", "x"], "use_activation": False}
    logits = [each["score"] for each in live.post("/score", pairs).json()["data"]]
    assert logits == [tokenizer.encode(text)[0] for text in "ab"]
    uneven = live.post("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]})
    assert uneven.status_code == 400
    ranked = live.post("/v1/rerank", {"query": "q", "documents": ["a", {"text": "b"}], "top_n": 1})
    assert len(ranked.json()["results"]) == 1
    assert ranked.json()["results"][0]["document"] in ({"text": "a"}, {"text": "b"})


def test_a_ranking_has_the_best_first(client, live):
    live.engine.score_of = lambda prompt_ids: -float(prompt_ids[-1])
    tokenizer = make_byte_level_tokenizer()
    texts = ["b", "d", "a", "c"]
    body = {"query": "q", "documents": texts, "use_activation": False, "return_documents": False}
    results = live.post("/rerank", body).json()["results"]
    assert [texts[each["index"]] for each in results] == sorted(texts, key=tokenizer.encode)
    assert all("document" not in each for each in results)


def test_a_model_without_the_head_is_refused_by_name(client, live):
    for num_labels, what in ((0, "no head that classifies"), (3, "3 labels")):
        live.engine.info = msgspec.structs.replace(live.engine.info, num_labels=num_labels)
        reply = live.post("/v1/rerank", {"query": "q", "documents": ["a"]})
        assert reply.status_code == 400
        assert what in reply.json()["error"]["message"]
