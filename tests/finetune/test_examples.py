"""Token ids and labels: prompts are masked, rows cut and packed."""

import copy
import itertools

import pytest
import torch

from tandem.core.errors import ConfigError, UnsupportedError
from tandem.finetune.data.examples import (
    IGNORED_LABEL,
    Example,
    chop,
    collate,
    encode,
    encode_pair,
    encode_text,
    pack,
    share_room,
)
from tandem.finetune.data.named_templates import LATER_NAMES, NAMED_TEXTS
from tandem.finetune.data.records import Conversation, Message, Pair
from tandem.finetune.data.templates import (
    Turn,
    differs_from_checkpoint,
    load_tokenizer,
    make_template,
)
from tandem.models.families import open_checkpoint

TALK = Conversation(
    (
        Message("user", "one"),
        Message("assistant", "two"),
        Message("user", "three"),
        Message("assistant", "four"),
    )
)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(open_checkpoint("demo"))


def decode_learned(tokenizer, example):
    return tokenizer.decode([label for label in example.labels if label != IGNORED_LABEL])


def test_answers_alone_are_learned(tokenizer):
    """Each answer with the token that ends it; the row is what the template renders."""
    template = make_template(tokenizer)
    example = encode(TALK, template, cutoff_len=200)
    assert decode_learned(tokenizer, example) == "two<|im_end|>four<|im_end|>"
    messages = [{"role": m.role, "content": m.content} for m in TALK.messages]
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer.decode(example.token_ids) == whole
    last = encode(TALK, template, cutoff_len=200, mask_history=True)
    assert decode_learned(tokenizer, last) == "four<|im_end|>"
    everything = encode(TALK, template, cutoff_len=200, train_on_prompt=True)
    assert "three" in decode_learned(tokenizer, everything)


REASONING = """
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' %}{% set parts = m.content.split('</think>') %}
{%- set bare = parts[-1].lstrip('\n') %}
{%- if not loop.last %}{{ bare }}
{%- else %}{{ '<think>\n' + (parts[0].replace('<think>', '').strip('\n') if parts|length > 1
 else '') + '\n</think>\n\n' + bare }}{% endif %}
{%- else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}
{%- endif %}{% endif %}"""
"""As Qwen3's: the last answer has its reasoning, or an empty one, and earlier ones have none."""
TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
EMPTY = "<think>\n\n</think>\n\n"


@pytest.fixture
def reasoning(tokenizer):
    """The tokenizer with a template that shows earlier answers without their reasoning."""
    made = copy.deepcopy(tokenizer)
    made.chat_template = REASONING
    return made


@pytest.fixture
def thoughtful():
    """A conversation whose first answer has reasoning."""
    return Conversation((TALK.messages[0], Message("assistant", THOUGHT), *TALK.messages[2:]))


THOUGHT = "<think>\nhm\n</think>\n\ntwo"


@pytest.mark.parametrize("name", [None, "qwen3"])
def test_every_answer_is_learned_as_it_was_generated(name, reasoning, thoughtful):
    """Only the last answer was, under a template that drops earlier reasoning."""
    template = make_template(reasoning, name)
    example = encode(thoughtful, template, cutoff_len=400)
    wanted = f"{TURN.format('one')}{THOUGHT}<|im_end|>\n{TURN.format('three')}{EMPTY}four<|im_end|>"
    assert reasoning.decode(example.token_ids).rstrip() == wanted
    learned = decode_learned(reasoning, example).replace("\n<think>", "<think>")
    assert learned.rstrip() == f"{THOUGHT}<|im_end|>{EMPTY}four<|im_end|>"
    assert template.is_history_reduced == (name is None)
    assert template.num_left_out == 0


@pytest.mark.parametrize("name", [None, "qwen3"])
def test_masked_history_is_as_it_is_shown(name, reasoning, thoughtful):
    """As in LLaMA-Factory: where the last answer alone is learned, reasoning before it is gone."""
    template = make_template(reasoning, name)
    example = encode(thoughtful, template, cutoff_len=400, mask_history=True)
    wanted = f"{TURN.format('one')}two<|im_end|>\n{TURN.format('three')}{EMPTY}four<|im_end|>"
    assert reasoning.decode(example.token_ids).rstrip() == wanted
    assert decode_learned(reasoning, example).rstrip() == f"{EMPTY}four<|im_end|>"
    pair = Pair(thoughtful, Conversation((*thoughtful.messages[:-1], Message("assistant", "5"))))
    made = encode_pair(pair, template, cutoff_len=400)
    assert reasoning.decode(made.prompt_ids + made.chosen_ids).rstrip() == wanted


@pytest.mark.parametrize("name", [None, "qwen3"])
def test_without_thinking_an_empty_thought_is_part_of_the_prompt(name, reasoning):
    """``enable_thinking: false``."""
    template = make_template(reasoning, name, is_thinking=False)
    example = encode(TALK, template, cutoff_len=400)
    assert decode_learned(reasoning, example).replace("\n", "") == "two<|im_end|>four<|im_end|>"
    assert reasoning.decode(example.token_ids).count(EMPTY) == 2


def test_a_template_that_moves_the_system_message_loses_turns(tokenizer):
    """It cannot be said what stands between the turns: the last is learned, and this is counted."""
    made = copy.deepcopy(tokenizer)
    made.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{% elif m.role == 'user' %}[Q]"
        "{% if loop.index0 >= messages|length - 2 + add_generation_prompt|int %}"
        "{{ messages[0].content }} {% endif %}{{ m.content }}[A]"
        "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    )
    template = make_template(made, system="S")
    example = encode(TALK, template, cutoff_len=99)
    assert decode_learned(made, example) == f"four{made.eos_token}"
    assert template.num_left_out == 1


def test_what_the_cutoff_takes(tokenizer):
    """Turn by turn, the longer part first: as LLaMA-Factory's ``infer_seqlen``."""
    found = [share_room(*sizes) for sizes in ((9, 9, 99), (90, 9, 50), (9, 90, 50), (60, 60, 50))]
    assert found == [(9, 9), (41, 9), (9, 41), (25, 25)]
    template = make_template(tokenizer)
    (first, last) = template.encode_turns(TALK)
    assert encode(TALK, template, cutoff_len=8) is not None
    assert encode(TALK, template, cutoff_len=2) is None
    size = len(first.source) + len(first.target) + 4
    example = encode(TALK, template, cutoff_len=size)
    kept = share_room(len(last.source), len(last.target), 4)
    cut = last.source[: kept[0]] + last.target[: kept[1]]
    assert list(example.token_ids) == first.source + first.target + cut
    # The last answer has the room that it needs before the others.
    masked = encode(
        TALK, template, cutoff_len=len(last.source) + len(last.target) + 2, mask_history=True
    )
    assert decode_learned(tokenizer, masked) == "four<|im_end|>"
    assert len(masked.token_ids) == len(last.source) + len(last.target) + 2


CUTS = [
    ([(10, 26), (4, 5), (35, 7)], 51, False, [(10, 26), (4, 5), (5, 1)]),
    ([(33, 14)], 7, True, [(5, 2)]),
    ([(28, 27)], 9, False, [(5, 4)]),
    ([(6, 36), (28, 4)], 20, True, [(16, 4)]),
    ([(38, 4), (37, 38)], 55, False, [(38, 4), (7, 6)]),
    ([(15, 3)], 13, True, [(10, 3)]),
    ([(19, 27), (10, 35)], 20, False, [(9, 11)]),
    ([(36, 12), (7, 38), (37, 13)], 100, True, [(4, 1), (7, 38), (37, 13)]),
    ([(40, 14)], 36, False, [(22, 14)]),
    ([(21, 30), (38, 30), (24, 20), (16, 12)], 183, True, [(21, 22), (38, 30), (24, 20), (16, 12)]),
    ([(6, 37), (20, 34)], 68, False, [(6, 37), (10, 15)]),
    ([(29, 19), (39, 5), (8, 33)], 112, True, [(17, 10), (39, 5), (8, 33)]),
]
"""Tokens of (question, answer) by turn, cutoff, ``mask_history``, and what LLaMA-Factory 0.9.5 kept
of the turns that it took."""


@pytest.mark.parametrize(("sizes", "cutoff", "is_masked", "kept"), CUTS)
def test_cut_rows_lose_what_llama_factory_takes(sizes, cutoff, is_masked, kept):
    """Token for token: each has an id of its own."""
    ids = itertools.count(1)
    turns = [
        Turn([next(ids) for _ in range(source)], [next(ids) for _ in range(target)], target)
        for source, target in sizes
    ]

    class Fixed:
        """Renders any conversation as these turns."""

        tail: list[int] = []
        starts: list[int] = []

        def encode_turns(self, conversation, *, is_history_shown=False):
            assert is_history_shown == is_masked
            return turns

    example = encode(TALK, Fixed(), cutoff_len=cutoff, mask_history=is_masked)
    taken = turns[-len(kept) :] if is_masked else turns[: len(kept)]
    wanted, learned = [], []
    for turn, (source, target) in zip(taken, kept, strict=True):
        wanted += turn.source[:source] + turn.target[:target]
        is_learned = turn is turns[-1] or not is_masked
        answer = turn.target[:target] if is_learned else [IGNORED_LABEL] * target
        learned += [IGNORED_LABEL] * source + answer
    assert list(example.token_ids) == wanted
    assert list(example.labels) == learned


TEXTS = {
    "empty": "onetwothreefour",
    "default": "Human: one{eos}\nAssistant:two{eos}\nHuman: three{eos}\nAssistant:four{eos}\n",
    "alpaca": (
        "Below is an instruction that describes a task. Write a response that appropriately "
        "completes the request.\n\n### Instruction:\none\n\n### Response:\ntwo{eos}\n\n"
        "### Instruction:\nthree\n\n### Response:\nfour{eos}\n\n"
    ),
    "deepseek": "{bos}User: one\n\nAssistant:two{eos}User: three\n\nAssistant:four{eos}",
    "falcon": "User: one\nFalcon:two\nUser: three\nFalcon:four\n{eos}",
    "mistral": "{bos}[INST] one[/INST] two{eos}[INST] three[/INST] four{eos}",
    "llama2": "{bos}[INST] one [/INST]two{eos}{bos}[INST] three [/INST]four{eos}",
    "qwen3_nothink": "".join(
        f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n{a}<|im_end|>\n"
        for q, a in (("one", "two"), ("three", "four"))
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_names_give_llama_factorys_text(name, tokenizer):
    """They stood for the checkpoint's own, whatever it was."""
    template = make_template(tokenizer, name)
    example = encode(TALK, template, cutoff_len=200)
    bos, eos = tokenizer.bos_token or "", tokenizer.eos_token
    assert tokenizer.decode(example.token_ids) == TEXTS[name].format(bos=bos, eos=eos)
    assert differs_from_checkpoint(template, tokenizer) == (name != "qwen3_nothink")


def test_an_end_that_is_learned_with_the_next_question(tokenizer):
    """Templates without an end of their own: as LLaMA-Factory's ``efficient_eos``."""
    template = make_template(tokenizer, "falcon")
    example = encode(TALK, template, cutoff_len=200)
    end = tokenizer.eos_token
    assert decode_learned(tokenizer, example) == f"two\n{end}four\n{end}"
    asked = Conversation((Message("system", "S"), *TALK.messages))
    made = encode(asked, make_template(tokenizer, "llama2"), cutoff_len=200)
    assert "[INST] <<SYS>>\nS\n<</SYS>>\n\none [/INST]two" in tokenizer.decode(made.token_ids)


def test_names_without_a_text_are_refused(tokenizer):
    """A name of LLaMA-Factory, a misspelt one, and one whose tokens are not there."""
    with pytest.raises(ConfigError, match="did you mean deepseek3"):
        make_template(tokenizer, "deepsek3")
    with pytest.raises(UnsupportedError, match="text of that name is not here"):
        make_template(tokenizer, "qwen2_audio")
    with pytest.raises(ConfigError, match=r"does not have: <\|start_header_id\|>"):
        make_template(tokenizer, "llama3")
    assert not LATER_NAMES & NAMED_TEXTS.keys()
    system = make_template(tokenizer, system="Be brief.")
    assert "Be brief." in tokenizer.decode(system.encode_turns(TALK)[0].source)


def test_plain_texts(tokenizer):
    """Learned as a whole with their end; packed, they are one text cut into equal rows."""
    end = tokenizer.eos_token_id
    (ids,) = {encode_text("some words", tokenizer, cutoff_len=99).labels}
    assert ids[-1] == end
    assert tokenizer.decode(ids[:-1]) == "some words"
    assert encode_text("some words", tokenizer, cutoff_len=2).token_ids == ids[:2]
    rows = chop(["some words"] * 5, tokenizer, 3)
    whole = ids * 5
    assert [row.token_ids for row in rows] == [
        whole[i : i + 3] for i in range(0, len(whole) - 2, 3)
    ]
    assert all(row.labels == row.token_ids and not row.lengths for row in rows)


def test_packing_keeps_examples_apart():
    """Rows are filled; positions begin anew, and no example continues the one before."""
    examples = [Example((i,) * n, (i,) * n) for i, n in enumerate((3, 5, 2, 4), 1)]
    rows = pack(examples, 7)
    assert sorted(sum(row.lengths) for row in rows) == [7, 7]
    batch = collate(rows, 0)
    assert "attention_mask" not in batch
    for row, positions, labels in zip(rows, batch["position_ids"], batch["labels"], strict=True):
        wanted = torch.cat([torch.arange(n) for n in row.lengths])
        assert torch.equal(positions[:7], wanted)
        assert all(labels[wanted == 0] == IGNORED_LABEL)


def test_batches_are_padded_on_the_right():
    """Padding is masked and not learned."""
    batch = collate([Example((5, 6, 7), (-100, 6, 7)), Example((8, 9), (8, 9))], 1)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 1]]
    assert batch["labels"].tolist() == [[-100, 6, 7], [8, 9, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
