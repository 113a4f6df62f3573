"""Token ids and labels: prompts are masked, rows cut and packed."""

import pytest
import torch

from tandem.core.errors import ConfigError
from tandem.finetune.data.examples import (
    IGNORED_LABEL,
    Example,
    collate,
    encode,
    make_template,
    pack,
)
from tandem.finetune.data.records import Conversation, Message
from tandem.finetune.training.model import load_tokenizer
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
    template = make_template(tokenizer, "deepseek")
    example = encode(TALK, template, cutoff_len=200)
    assert decode_learned(tokenizer, example) == "two<|im_end|>four<|im_end|>"
    messages = [{"role": m.role, "content": m.content} for m in TALK.messages]
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer.decode(example.token_ids) == whole
    last = encode(TALK, template, cutoff_len=200, mask_history=True)
    assert decode_learned(tokenizer, last) == "four<|im_end|>"
    everything = encode(TALK, template, cutoff_len=200, train_on_prompt=True)
    assert "three" in decode_learned(tokenizer, everything)


def test_cutoff(tokenizer):
    """A row is cut; one without any answer left is none."""
    template = make_template(tokenizer)
    example = encode(TALK, template, cutoff_len=20)
    assert len(example.token_ids) == len(example.labels) == 20
    assert encode(TALK, template, cutoff_len=4) is None


def test_templates(tokenizer):
    """LLaMA-Factory's names stand for the checkpoint's; an unknown one is named."""
    plain = make_template(tokenizer, "empty")
    example = encode(TALK, plain, cutoff_len=99)
    assert tokenizer.decode(example.token_ids) == "one\ntwo<|endoftext|>three\nfour<|endoftext|>"
    with pytest.raises(ConfigError, match="did you mean deepseek3"):
        make_template(tokenizer, "deepsek3")
    system = make_template(tokenizer, system="Be brief.")
    assert "Be brief." in system.render(TALK)[0][0]


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
