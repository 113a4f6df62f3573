"""Goal: a model by transformers' own modules gives the bits of a fresh run, whatever was reused.

Method: a tiny random GPT-2 through the whole engine, its tokens and the log-probabilities of the
likeliest compared with those of an engine that reuses nothing and runs one prompt at a time.
"""

import pytest

pytest.importorskip("torch", reason="models need the `serve` extra")
pytest.importorskip("transformers", reason="models need the `serve` extra")

from chat_engine import ChatEngine, make_prompt
from own_modules import save_own

from tandem.core.errors import UnsupportedError
from tandem.core.wire import AddRequest, Pooling, SamplingParams
from tandem.models.own.plan import PIECE

MEMORY = {"num_kv_blocks": 160, "num_state_slots": 12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_own(tmp_path_factory.mktemp("own"))


@pytest.fixture(scope="module")
def fresh(folder):
    """Answers of an engine that reuses nothing, one prompt at a time, with one chunk a prompt."""
    settings = MEMORY | {"prefix_cache": False, "max_batch_tokens": 1024}
    return ChatEngine(folder, **settings).remember()


def test_turns_of_a_chat_go_on_from_the_last_whole_piece(folder, fresh):
    chat = ChatEngine(folder, **MEMORY)
    prompt = make_prompt(PIECE + 70)
    [first] = chat.ask(prompt)
    assert first == fresh(prompt)
    second = [*prompt, *[token for token, _ in first], *make_prompt(2 * PIECE - 330, 1)]
    [again] = chat.ask(second)
    assert list(chat.cached.values()) == [PIECE]
    assert again == fresh(second)
    # The answer was fed token by token, which is not what a prompt of the same tokens gives.
    third = [*second, *[token for token, _ in again], 5, 6, 7]
    [last] = chat.ask(third)
    assert list(chat.cached.values()) == [len(second) // PIECE * PIECE]
    assert last == fresh(third)


def test_company_and_chunks_change_no_bit(folder, fresh):
    """A step has 64 tokens: no chunk is a piece, and prompts share steps with decodes."""
    chat = ChatEngine(folder, overlap="on", **MEMORY)
    stem = make_prompt(PIECE + 60)
    prompts = [[*stem[:n], *make_prompt(20 + n % 7, n)] for n in (310, 260, 61)]
    for _ in range(2):
        assert chat.ask(*prompts) == [fresh(prompt) for prompt in prompts]
    assert max(chat.cached.values()) == PIECE


def test_few_slots_and_blocks_change_no_bit(folder, fresh):
    """Requests are preempted and recomputed, answers token by token; copies are given up."""
    few = {"num_kv_blocks": 44, "num_state_slots": 3, "max_model_len": 400}
    chat = ChatEngine(folder, **few)
    prompts = [make_prompt(PIECE + 40 + 3 * i, i % 3) for i in range(4)]
    assert chat.ask(*prompts) == [fresh(prompt) for prompt in prompts]
    stats = chat.engine.get_stats()
    assert stats.num_used_state_slots == 0
    # All copies together are bounded by tokens: those of three would be more.
    assert stats.num_snapshots <= 44 * 16 // PIECE


def test_no_vectors_are_taken_of_it(folder):
    chat = ChatEngine(folder, **MEMORY)
    sampling = SamplingParams(max_tokens=0, pooling=Pooling.LAST)
    with pytest.raises(UnsupportedError, match="own modules"):
        chat.engine.add(AddRequest(request_id="v", prompt_ids=[3, 4], sampling=sampling))


def test_a_class_whose_prompt_is_not_cut_is_served_without_prefixes(tmp_path):
    """Mamba's cache is right after a whole prompt and token by token, and wrong after pieces."""
    folder = save_own(tmp_path, "mamba")
    config = {"proof": "auto"}
    chat = ChatEngine(folder, model=config, **MEMORY)
    assert not chat.built.model.plan.own.is_cut
    prompts = [make_prompt(90), make_prompt(70, 1)]
    alone = [chat.ask(prompt) for prompt in prompts]
    assert chat.ask(*prompts) == [answer for [answer] in alone]
    assert set(chat.cached.values()) == {0}
