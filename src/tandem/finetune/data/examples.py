"""Converts conversations, pairs and texts into rows of token ids: masks, cutoff,
packing, batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tandem.finetune.data.records import Conversation, Pair
from tandem.finetune.data.templates import Template

__all__ = [
    "IGNORED_LABEL",
    "Example",
    "PairExample",
    "chop",
    "collate",
    "encode",
    "encode_pair",
    "encode_text",
    "pack",
    "share_room",
]

IGNORED_LABEL = -100
"""Label of tokens that are excluded from the loss."""


@dataclass(frozen=True, slots=True)
class Example:
    """One training row: token ids, and for each the id to learn at its position or
    ``IGNORED_LABEL``.
    """

    token_ids: tuple[int, ...]
    labels: tuple[int, ...]
    lengths: tuple[int, ...] = ()
    """Lengths of the examples packed into this row; empty if the row is a single example."""


@dataclass(frozen=True, slots=True)
class PairExample:
    """Two answers to one prompt, in token ids, of which one was preferred; only the answers are
    learned.
    """

    prompt_ids: tuple[int, ...]
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]

    @property
    def lengths(self) -> tuple[int, int]:
        """Lengths of the prompt with the chosen and with the rejected answer, in tokens."""
        prompt = len(self.prompt_ids)
        return prompt + len(self.chosen_ids), prompt + len(self.rejected_ids)


def encode(
    conversation: Conversation,
    template: Template,
    *,
    cutoff_len: int,
    train_on_prompt: bool = False,
    mask_history: bool = False,
) -> Example | None:
    """Return the example of a conversation; None if the cutoff leaves nothing to learn.

    The cutoff removes the same tokens as LLaMA-Factory: turn by turn, from the ends of the question
    and the answer, from the longer of the two first.

    Args:
       conversation: the conversation to learn.
       template: renders the conversation.
       cutoff_len: most tokens of the example.
       train_on_prompt: True to learn all tokens, not only the answers.
       mask_history: True to learn only the last answer, which is then cut after the others.
    """
    turns = template.encode_turns(conversation, is_history_shown=mask_history)
    order = turns[::-1] if mask_history else turns
    ids: list[int] = []
    labels: list[int] = []
    left = cutoff_len - len(template.tail)
    for i, turn in enumerate(order):
        if left <= 0:
            break
        num_source, num_target = share_room(len(turn.source), len(turn.target), left)
        left -= num_source + num_target
        source, target = turn.source[:num_source], turn.target[:num_target]
        source_labels = source if train_on_prompt else [IGNORED_LABEL] * num_source
        if i > 0 and num_source:
            source_labels = [*template.starts, *source_labels[len(template.starts) :]]
        num_learned = 0 if mask_history and i > 0 else min(turn.num_learned, num_target)
        target_labels = target[:num_learned] + [IGNORED_LABEL] * (num_target - num_learned)
        if mask_history:
            ids, labels = source + target + ids, source_labels + target_labels + labels
        else:
            ids, labels = ids + source + target, labels + source_labels + target_labels
    # The first token's label is never predicted, so it does not count; an example without any other
    # label teaches nothing and is left out.
    if all(label == IGNORED_LABEL for label in labels[1:]):
        return None
    return Example(tuple(ids + template.tail), tuple(labels + template.tail))


def share_room(num_source: int, num_target: int, room: int) -> tuple[int, int]:
    """Return how many tokens of a question and of its answer are kept, as LLaMA-Factory does.

    A part that needs less than half of the room is kept whole; otherwise both are cut in
    proportion.
    """
    if num_target * 2 < room:
        most = room
    elif num_source * 2 < room:
        most = room - num_source
    else:
        most = int(room * (num_target / (num_source + num_target)))
    kept = min(most, num_target)
    return min(max(room - kept, 0), num_source), kept


def encode_text(text: str, tokenizer: Any, *, cutoff_len: int) -> Example | None:
    """Return the example of a plain text, all of whose tokens, and the end token, are learned.

    Args:
       text: the text; the cutoff removes its end.
       tokenizer: tokenizer of transformers.
       cutoff_len: most tokens of the example.

    Returns: None if fewer than two tokens are left.
    """
    ids = encode_document(text, tokenizer)
    if tokenizer.bos_token_id is not None and getattr(tokenizer, "add_bos_token", False):
        ids = [tokenizer.bos_token_id, *ids]
    ids = ids[:cutoff_len]
    return Example(tuple(ids), tuple(ids)) if len(ids) > 1 else None


def encode_document(text: str, tokenizer: Any) -> list[int]:
    """Return the token ids of a text, followed by the token that ends a text."""
    return list(
        tokenizer(text + (tokenizer.eos_token or ""), add_special_tokens=False)["input_ids"]
    )


def chop(texts: Sequence[str], tokenizer: Any, size: int) -> list[Example]:
    """Concatenate texts and cut them into rows of ``size`` tokens; an incomplete last row is
    dropped.

    A token attends to all tokens before it in its row, including those of other texts, as in
    LLaMA-Factory.
    """
    ids = [i for text in texts for i in encode_document(text, tokenizer)]
    rows = [ids[at : at + size] for at in range(0, len(ids) - size + 1, size)]
    if tokenizer.bos_token_id is not None and getattr(tokenizer, "add_bos_token", False):
        rows = [[tokenizer.bos_token_id, *row[1:]] for row in rows]
    return [Example(tuple(row), tuple(row)) for row in rows]


def encode_pair(pair: Pair, template: Template, *, cutoff_len: int) -> PairExample | None:
    """Return the example of a pair; None if the cutoff leaves no two different answers.

    Args:
       pair: two answers to one prompt.
       template: renders the pair; earlier answers are a part of the prompt.
       cutoff_len: most tokens of the prompt with either answer; cut as in ``encode``.
    """
    *earlier, last = template.encode_turns(pair.chosen, is_history_shown=True)
    other = template.encode_turns(pair.rejected, is_history_shown=True)[-1]
    prompt = [i for turn in earlier for i in turn.source + turn.target] + last.source
    answers = [turn.target[: turn.num_learned] + template.tail for turn in (last, other)]
    room = share_room(len(prompt), max(map(len, answers)), cutoff_len)
    prompt_ids = tuple(prompt[: room[0]])
    chosen, rejected = (tuple(answer[: room[1]]) for answer in answers)
    if not prompt_ids or not chosen or not rejected or chosen == rejected:
        return None
    return PairExample(prompt_ids, chosen, rejected)


def pack(examples: Sequence[Example], size: int) -> list[Example]:
    """Pack whole examples into rows of ``size`` tokens: first fit, longest first.

    The examples of a row do not attend to each other: ``collate`` restarts positions at each.
    """
    rows: list[list[Example]] = []
    room: list[int] = []
    order = sorted(range(len(examples)), key=lambda i: (-len(examples[i].token_ids), i))
    for i in order:
        length = len(examples[i].token_ids)
        row = next((r for r, left in enumerate(room) if left >= length), None)
        if row is None:
            rows.append([])
            room.append(size)
            row = len(rows) - 1
        rows[row].append(examples[i])
        room[row] -= length
    return [
        Example(
            tuple(t for e in row for t in e.token_ids),
            # The first label of each example is masked: in a packed row it would be predicted from
            # the example before.
            tuple(t for e in row for t in (IGNORED_LABEL, *e.labels[1:])),
            tuple(len(e.token_ids) for e in row),
        )
        for row in rows
    ]


def collate(examples: Sequence[Example], pad_id: int) -> dict[str, Tensor]:
    """Return a batch, padded on the right: ids and labels [B, T], and a mask or positions [B, T].

    Packed rows get positions, which restart at each example and at the padding; transformers
    derives from them which tokens attend to each other.
    """
    width = max(len(e.token_ids) for e in examples)
    ids = torch.full((len(examples), width), pad_id, dtype=torch.int64)
    labels = torch.full((len(examples), width), IGNORED_LABEL, dtype=torch.int64)
    for i, example in enumerate(examples):
        ids[i, : len(example.token_ids)] = torch.tensor(example.token_ids)
        labels[i, : len(example.labels)] = torch.tensor(example.labels)
    batch = {"input_ids": ids, "labels": labels}
    if not any(e.lengths for e in examples):
        lengths = torch.tensor([len(e.token_ids) for e in examples])
        batch["attention_mask"] = (torch.arange(width) < lengths[:, None]).long()
        return batch
    positions = torch.zeros_like(ids)
    for i, example in enumerate(examples):
        filled = [*(example.lengths or (len(example.token_ids),)), width - len(example.token_ids)]
        positions[i] = torch.cat([torch.arange(length) for length in filled])
    batch["position_ids"] = positions
    return batch
