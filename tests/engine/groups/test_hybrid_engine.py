"""Goal: on a model with states a request gets the bits of a fresh run, whatever was reused.

Method: a tiny random Qwen3-Next in bfloat16 through the whole engine, its tokens and the
log-probabilities of the likeliest compared with those of an engine that reuses nothing.
"""

import pytest

pytest.importorskip("torch", reason="models need the `serve` extra")
pytest.importorskip("transformers", reason="models need the `serve` extra")

from chat_engine import ChatEngine, make_prompt
from hybrid import STATE_BYTES, save_hybrid


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_hybrid(tmp_path_factory.mktemp("hybrid"))


def make_chat(folder, **settings):
    return ChatEngine(folder, **({"num_state_slots": 12} | settings))


@pytest.fixture(scope="module")
def fresh(folder):
    """Answers of an engine that reuses nothing, one prompt at a time."""
    return make_chat(folder, prefix_cache=False).remember()


def test_turns_of_a_chat_go_on_from_where_the_last_message_ended(folder, fresh):
    """The template drops what was thought: the answer comes back shorter, its prompt does not."""
    chat = make_chat(folder)
    prompt = make_prompt(70)
    [first] = chat.ask([*prompt, 9, 8], message_end=70)
    assert first == fresh([*prompt, 9, 8])
    answer = [token for token, _ in first]
    second = [*prompt, 9, *answer[6:], *make_prompt(21, 1)]
    [again] = chat.ask([*second, 9, 8], message_end=len(second))
    assert list(chat.cached.values()) == [70]
    assert again == fresh([*second, 9, 8])
    # The answer's first tokens are those that opened it, but the state is that before them.
    (told,) = chat.engine.list_timelines([f"{chat.num_asked}"])
    assert (told.miss.reason, told.miss.position, told.miss.detail) == ("no_state", 70, "71")
    # An answer that is kept is not computed again, but for its last token.
    kept = [*second, 9, 8, *[token for token, _ in again]]
    [third] = chat.ask([*kept, *make_prompt(5, 2)])
    assert list(chat.cached.values()) == [len(kept) - 1]
    assert third == fresh([*kept, *make_prompt(5, 2)])


def test_a_prompt_without_messages_is_taken_up_but_for_its_last_token(folder, fresh):
    chat, prompt = make_chat(folder), make_prompt(75)
    assert chat.ask(prompt) == chat.ask(prompt) == [fresh(prompt)]
    assert list(chat.cached.values()) == [len(prompt) - 1]


def test_branches_edits_and_company_change_no_bit(folder, fresh):
    chat = make_chat(folder, overlap="on")
    stem = make_prompt(90)
    prompts = [[*stem[:n], *make_prompt(20 + n % 7, n)] for n in (90, 90, 61, 40, 90)]
    for _ in range(2):
        assert chat.ask(*prompts) == [fresh(prompt) for prompt in prompts]
    assert min(chat.cached.values()) > 30
    stats = chat.engine.get_stats()
    assert stats.num_used_state_slots == 0
    assert stats.num_snapshots > 2


@pytest.mark.parametrize("num_state_slots", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_few_slots_and_blocks_change_no_bit(folder, fresh, num_state_slots):
    """Requests wait for slots, are preempted and recomputed; states are given up all the time."""
    chat = make_chat(folder, num_state_slots=num_state_slots, num_kv_blocks=14, max_model_len=200)
    prompts = [make_prompt(40 + 3 * i, i % 2) for i in range(6)]
    for _ in range(2):
        assert chat.ask(*prompts) == [fresh(prompt) for prompt in prompts]
    stats = chat.engine.get_stats()
    assert stats.num_state_slots == num_state_slots
    assert stats.num_evicted_snapshots > 0


def test_memory_of_states_is_planned_and_told(folder):
    chat = make_chat(folder, num_state_slots=0, max_running=5)
    info = chat.built.info
    assert info.state_bytes == STATE_BYTES
    assert info.num_state_slots == 4 * 5
