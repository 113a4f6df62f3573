"""From conversations, pairs and texts to rows of token ids: masks, cutoff, packing, batches."""

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
"""The label of tokens that are not learned."""


@dataclass(frozen=True, slots=True)
class Example:
    """One row to learn from: token ids, and labels of the same length."""

    token_ids: tuple[int, ...]
    labels: tuple[int, ...]
    lengths: tuple[int, ...] = ()
    """Lengths of the examples that were packed into this row; empty for one."""


@dataclass(frozen=True, slots=True)
class PairExample:
    """Two answers to one prompt, in token ids; the answers are learned."""

    prompt_ids: tuple[int, ...]
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens of the prompt with the chosen and with the rejected answer."""
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
    """Return the example of a conversation; None if nothing of it is left to learn.

    What is cut off is what LLaMA-Factory cuts: turn by turn, from the end of a question and of its
    answer, the longer of the two first.

    Args:
        conversation: what is learned.
        template: renders it.
        cutoff_len: tokens at most.
        train_on_prompt: learn all tokens, not the answers alone.
        mask_history: learn the last answer alone; it has the room that it needs before the others.
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

    Who needs less than half of the room keeps all; else each keeps its share.
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
    """Return the example of a plain text, learned as a whole with the token that ends it.

    Args:
        text: as it is; the cutoff takes its end.
        tokenizer: transformers'.
        cutoff_len: tokens at most.

    Returns: None if less than two tokens are left.
    """
    ids = encode_document(text, tokenizer)
    if tokenizer.bos_token_id is not None and getattr(tokenizer, "add_bos_token", False):
        ids = [tokenizer.bos_token_id, *ids]
    ids = ids[:cutoff_len]
    return Example(tuple(ids), tuple(ids)) if len(ids) > 1 else None


def encode_document(text: str, tokenizer: Any) -> list[int]:
    """Return the ids of a text with the token that ends it."""
    return list(
        tokenizer(text + (tokenizer.eos_token or ""), add_special_tokens=False)["input_ids"]
    )


def chop(texts: Sequence[str], tokenizer: Any, size: int) -> list[Example]:
    """Return rows of ``size`` tokens of texts one behind the other; what is left over is dropped.

    A row's tokens see all before them in it, of other texts too, as in LLaMA-Factory.
    """
    ids = [i for text in texts for i in encode_document(text, tokenizer)]
    rows = [ids[at : at + size] for at in range(0, len(ids) - size + 1, size)]
    if tokenizer.bos_token_id is not None and getattr(tokenizer, "add_bos_token", False):
        rows = [[tokenizer.bos_token_id, *row[1:]] for row in rows]
    return [Example(tuple(row), tuple(row)) for row in rows]


def encode_pair(pair: Pair, template: Template, *, cutoff_len: int) -> PairExample | None:
    """Return the example of a pair; None if the cutoff leaves no two answers that differ.

    Args:
        pair: two answers to one prompt.
        template: renders it; earlier answers belong to the prompt.
        cutoff_len: tokens at most of the prompt with either answer; cut as in ``encode``.
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
    """Fill rows of ``size`` tokens with whole examples, first fit over the longest first.

    The examples of a row do not see each other: ``collate`` lets positions begin anew.
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
    """Return a batch, padded on the right: ids and labels [B, T], a mask or positions [B, T].

    Packed rows get positions, which restart with each example and each stretch of padding; from
    them transformers derives which tokens see each other.
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
