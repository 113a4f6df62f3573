"""Goal: with window blocks a request gets the bits that it got without, whatever was reused.

Method: a tiny random gpt-oss in bfloat16 through the whole engine; its tokens and the
log-probabilities of the likeliest are compared with those of the model run directly, whose layers
all keep the KV of all tokens, and with those of an engine that reuses nothing.
"""

import pytest

pytest.importorskip("torch", reason="models need the `serve` extra")
pytest.importorskip("transformers", reason="models need the `serve` extra")

from chat_engine import ChatEngine, make_prompt
from windowed import (
    FAMILIES,
    NUM_WINDOWED,
    WINDOW,
    save_all_windowed,
    save_family,
    save_windowed,
)

from tandem.engine.groups.windows import count_window_blocks
from tandem.kernels.paged import PagedBatch, SequenceChunk


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_windowed(tmp_path_factory.mktemp("windowed"))


@pytest.fixture(scope="module")
def fresh(folder):
    """Answers of an engine that reuses nothing, one prompt at a time."""
    return ChatEngine(folder, prefix_cache=False).remember()


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_logits_are_those_of_layers_that_keep_all_tokens(folder, kv_dtype):
    """Bitwise: chunks, decodes, holes where blocks have left the window, company."""
    chat = ChatEngine(folder, kv_dtype=kv_dtype)
    model = chat.built.model
    whole = model.allocate_kv(16, block_size=16, kv_dtype=kv_dtype)
    split = model.allocate_kv(16, block_size=16, kv_dtype=kv_dtype, num_window_blocks=10)
    assert (whole.layout.num_layers, split.layout.num_layers) == (5, 5 - NUM_WINDOWED)
    prompt = make_prompt(120)
    start = 0
    for length in (37, 1, 30, 16, 1, 1, 30):
        end = start + length
        table, first = list(range(5, 13)), max(start - WINDOW + 1, 0) // 16
        # In another order, so that positions that nobody sees have other blocks than before.
        windows = [(2 * i + 1) % 9 for i in range(first, -(-end // 16))]
        own = SequenceChunk(token_ids=prompt[start:end], start=start, block_table=table)
        other = SequenceChunk(token_ids=[5, 6, 7], start=0, block_table=[1])
        expected = model.forward(PagedBatch.build([other, own], 16), whole)
        placed = [
            SequenceChunk(token_ids=[5, 6, 7], start=0, block_table=[1], window_blocks=[9]),
            SequenceChunk(
                token_ids=prompt[start:end],
                start=start,
                block_table=table,
                window_first=first,
                window_blocks=windows,
            ),
        ]
        assert model.forward(PagedBatch.build(placed, 16), split).equal(expected)
        start = end


def test_branches_edits_and_company_change_no_bit(folder, fresh):
    chat = ChatEngine(folder, overlap="on")
    stem = make_prompt(90)
    prompts = [[*stem[:n], *make_prompt(20 + n % 7, n)] for n in (90, 90, 61, 40, 90)]
    for _ in range(2):
        assert chat.ask(*prompts) == [fresh(prompt) for prompt in prompts]
    assert min(chat.cached.values()) > 30
    stats = chat.engine.get_stats()
    assert stats.num_used_window_blocks == 0
    assert stats.num_cached_window_blocks > 2


def test_turns_of_a_chat_go_on_from_where_the_last_message_ended(folder, fresh):
    """The template drops what was thought, and answers are longer than the window."""
    chat = ChatEngine(folder, num_window_blocks=5, max_batch_tokens=16)
    prompt = make_prompt(70)
    [first] = chat.ask([*prompt, 9, 8], message_end=70, max_tokens=60)
    answer = [token for token, _ in first]
    second = [*prompt, *answer[40:], *make_prompt(21, 1)]
    [again] = chat.ask([*second, 9, 8], message_end=len(second))
    assert list(chat.cached.values()) == [70]
    assert again == fresh([*second, 9, 8])
    # What nobody keeps is computed again, from where a window is.
    [edited] = chat.ask([*prompt[:33], *make_prompt(10, 3)])
    assert edited == fresh([*prompt[:33], *make_prompt(10, 3)])
    (told,) = chat.engine.list_timelines([f"{chat.num_asked}"])
    assert (told.miss.reason, told.miss.detail) == ("no_window", "33")
    assert chat.engine.get_stats().windowless_tokens > 0


@pytest.mark.parametrize("num_window_blocks", [5, pytest.param(9, marks=pytest.mark.slow)])
def test_few_blocks_change_no_bit(folder, fresh, num_window_blocks):
    """Requests wait for windows, are preempted and recomputed; windows are given up always."""
    sizes = {"num_window_blocks": num_window_blocks, "num_kv_blocks": 14, "max_model_len": 200}
    chat = ChatEngine(folder, **sizes)
    prompts = [make_prompt(40 + 3 * i, i % 2) for i in range(6)]
    for _ in range(2):
        assert chat.ask(*prompts) == [fresh(prompt) for prompt in prompts]
    stats = chat.engine.get_stats()
    assert stats.num_window_blocks == num_window_blocks
    assert stats.num_evicted_window_blocks > 0


def test_memory_of_windows_is_planned_and_told(folder):
    chat = ChatEngine(folder, num_kv_blocks=200, max_running=5, max_batch_tokens=32)
    info = chat.built.info
    seen = count_window_blocks(WINDOW, 16)
    block_bytes = 2 * 2 * 16 * 16 * 2
    assert info.window_block_bytes == NUM_WINDOWED * block_bytes
    assert info.kv_bytes_per_token * 16 == (5 - NUM_WINDOWED) * block_bytes
    assert info.num_window_blocks == 5 * (seen + 1) + 2 * 2 + int(200 * seen * 16 / 2048)
    [row] = [row for row in info.plan if row[0] == "windows"]
    assert f"{info.num_window_blocks} blocks of 16 tokens in 3 layers" in row[1]


def test_where_all_layers_have_a_window_other_blocks_take_no_memory(tmp_path):
    folder = save_all_windowed(tmp_path)
    chat = ChatEngine(folder, num_kv_blocks=40, num_window_blocks=24)
    assert (chat.built.cache.tensor.numel(), chat.built.info.kv_bytes_per_token) == (0, 0)
    prompts = [make_prompt(100 + 9 * i, i % 2) for i in range(3)]
    answers = chat.ask(*prompts)
    assert chat.ask(*prompts) == answers
    assert min(chat.cached.values()) > 90
    # A context of one window: all layers are in the blocks, as nothing is ever left behind.
    whole = ChatEngine(folder, max_model_len=WINDOW)
    assert whole.built.info.num_window_blocks == 0
    model = chat.built.model
    cache = model.allocate_kv(9, block_size=16)
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = [*prompt, *[token for token, _ in answer]]
        chunk = SequenceChunk(token_ids=tokens, start=0, block_table=range(9), wants="all")
        logits = model.forward(PagedBatch.build([chunk], 16), cache)[len(prompt) - 1 : -1]
        for row, (token, given) in zip(logits.log_softmax(-1), answer, strict=True):
            assert row[token].item() == pytest.approx(given.logprob, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_computes_what_it_did_with_all_layers_in_one_block(family, tmp_path):
    chat = ChatEngine(save_family(family, tmp_path))
    model = chat.built.model
    assert model.spec.window_layers
    prompts = [[*make_prompt(90)[:n], *make_prompt(20, n)] for n in (90, 61, 40)]
    answers = chat.ask(*prompts)
    assert chat.ask(*prompts) == answers
    assert min(chat.cached.values()) >= 59
    whole = model.allocate_kv(10, block_size=16)
    split = model.allocate_kv(10, block_size=16, num_window_blocks=10)
    tokens, table, rows = make_prompt(150), list(range(10)), []
    chunk = SequenceChunk(token_ids=tokens, start=0, block_table=table, wants="all")
    expected = model.forward(PagedBatch.build([chunk], 16), whole)
    for start, end, first in ((0, 100, 0), (100, 150, 5)):
        chunk = SequenceChunk(
            token_ids=tokens[start:end],
            start=start,
            block_table=table,
            wants="all",
            window_first=first,
            window_blocks=table[first:],
        )
        rows += model.forward(PagedBatch.build([chunk], 16), split)
    assert all(row.equal(own) for row, own in zip(rows, expected, strict=True))
