"""From conversations to token ids: templates, prompt masks, cutoff, packing, batches.

The checkpoint's own chat template renders a conversation; LLaMA-Factory's template names are taken
as aliases for it. Each answer is rendered after its prompt and tokenized apart from it, as a server
that generates it has done.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tandem.core.errors import ConfigError
from tandem.finetune.data.records import Conversation, Pair

__all__ = [
    "IGNORED_LABEL",
    "TEMPLATES",
    "Example",
    "PairExample",
    "Template",
    "collate",
    "encode",
    "encode_pair",
    "make_template",
    "pack",
]

IGNORED_LABEL = -100
"""The label of tokens that are not learned."""

TEMPLATES = frozenset(
    [
        "aquila",
        "atom",
        "baichuan",
        "baichuan2",
        "bailing",
        "chatglm2",
        "chatglm3",
        "chatml",
        "cohere",
        "dbrx",
        "deepseek",
        "deepseek3",
        "deepseekcoder",
        "deepseekr1",
        "falcon",
        "gemma",
        "gemma2",
        "gemma3",
        "glm4",
        "glm4_moe",
        "gpt",
        "gpt_oss",
        "granite3",
        "internlm2",
        "intern2",
        "kimi_vl",
        "llama2",
        "llama3",
        "llama4",
        "minicpm",
        "mistral",
        "mistral_small",
        "moonlight",
        "olmo",
        "orion",
        "phi",
        "phi4",
        "qwen",
        "qwen2_vl",
        "qwen2_5",
        "qwen3",
        "qwen3_nothink",
        "seed_oss",
        "solar",
        "starchat",
        "vicuna",
        "xuanyuan",
        "yi",
        "zephyr",
    ]
)
"""LLaMA-Factory's names that stand for the checkpoint's template."""
EMPTY_TEMPLATES = ("empty", "default")


@dataclass(frozen=True, slots=True)
class Example:
    """One row to learn from: token ids, and labels of the same length."""

    token_ids: tuple[int, ...]
    labels: tuple[int, ...]
    lengths: tuple[int, ...] = ()
    """Of the examples that were packed into this row; empty for one."""


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


class Template:
    """Renders prompts and answers.

    Args:
        tokenizer: transformers' tokenizer of the checkpoint.
        is_plain: texts as they are, answers ended by the end-of-sequence token.
        system: of conversations without a system message.
        options: further arguments of the chat template.
    """

    def __init__(
        self, tokenizer: Any, *, is_plain: bool, system: str | None, options: dict[str, Any]
    ) -> None:
        self._tokenizer = tokenizer
        self._is_plain = is_plain
        self._system = system
        self._options = options

    def render(self, conversation: Conversation) -> list[tuple[str, str]]:
        """Return (text before an answer, answer with its end) for each turn, in order.

        Where the template shows earlier answers otherwise than they were given (without their
        thoughts, say), only the last turn is returned.
        """
        messages = [{"role": m.role, "content": m.content} for m in conversation.messages]
        if self._system is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._system})
        turns: list[tuple[str, str]] = []
        done = ""
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt, whole = self.render_prompt(messages[:i]), self._render(messages[: i + 1])
            if not whole.startswith(prompt) or not prompt.startswith(done):
                # What was rendered so far is not how the template goes on.
                turns, done = [], ""
            answer = whole[len(prompt) :] if whole.startswith(prompt) else message["content"]
            turns.append((prompt[len(done) :], answer))
            done = prompt + answer
        return turns

    def render_prompt(self, messages: list[dict[str, str]]) -> str:
        """Return the text after which the answer is generated."""
        if self._is_plain:
            return self._join(messages)
        return self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **self._options
        )

    def _render(self, messages: list[dict[str, str]]) -> str:
        if self._is_plain:
            return self._join(messages)
        return self._tokenizer.apply_chat_template(messages, tokenize=False, **self._options)

    def _join(self, messages: list[dict[str, str]]) -> str:
        end = self._tokenizer.eos_token or ""
        return "".join(m["content"] + (end if m["role"] == "assistant" else "\n") for m in messages)

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text in which the template wrote all special tokens."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def make_template(
    tokenizer: Any, name: str | None = None, *, system: str | None = None
) -> Template:
    """Return the template of a checkpoint.

    Args:
        tokenizer: transformers'.
        name: LLaMA-Factory's name; ``empty`` and ``default`` are without a template.
        system: default system message.

    Raises: ConfigError: an unknown name, or a checkpoint without a template.
    """
    where = "finetune.make_template"
    if name is not None and name not in TEMPLATES and name not in EMPTY_TEMPLATES:
        close = difflib.get_close_matches(name, [*TEMPLATES, *EMPTY_TEMPLATES], n=1)
        hint = f"did you mean {close[0]}?" if close else "leave it out"
        what = f"unknown template {name!r}: {hint} The checkpoint's own is the default"
        raise ConfigError(where, what, field="template")
    is_plain = name in EMPTY_TEMPLATES
    if not is_plain and not tokenizer.chat_template:
        what = "the checkpoint has no chat template: set template: empty"
        raise ConfigError(where, what, field="template")
    options = {"enable_thinking": False} if name is not None and name.endswith("_nothink") else {}
    return Template(tokenizer, is_plain=is_plain, system=system, options=options)


def encode(
    conversation: Conversation,
    template: Template,
    *,
    cutoff_len: int,
    train_on_prompt: bool = False,
    mask_history: bool = False,
) -> Example | None:
    """Return the example of a conversation; None if nothing of it is left to learn.

    Args:
        conversation: what is learned.
        template: renders it.
        cutoff_len: tokens at most; the rest is cut off.
        train_on_prompt: learn all tokens, not the answers alone.
        mask_history: learn the last answer alone.
    """
    ids: list[int] = []
    labels: list[int] = []
    turns = template.render(conversation)
    for i, (prompt, answer) in enumerate(turns):
        is_learned = not mask_history or i == len(turns) - 1
        kept, rest = _split_answer(answer)
        pieces = [(prompt, train_on_prompt), (kept, is_learned), (rest, False)]
        for text, is_target in pieces:
            piece = template.tokenize(text) if text else []
            ids += piece
            labels += piece if is_target else [IGNORED_LABEL] * len(piece)
    ids, labels = ids[:cutoff_len], labels[:cutoff_len]
    # The first token is predicted by nothing.
    if all(label == IGNORED_LABEL for label in labels[1:]):
        return None
    return Example(tuple(ids), tuple(labels))


def _split_answer(answer: str) -> tuple[str, str]:
    """White space behind the answer's end belongs to the next turn."""
    kept = answer.rstrip() or answer
    return kept, answer[len(kept) :]


def encode_pair(pair: Pair, template: Template, *, cutoff_len: int) -> PairExample | None:
    """Return the example of a pair; None if the cutoff leaves no two answers that differ.

    Args:
        pair: two answers to one prompt.
        template: renders it; earlier answers belong to the prompt.
        cutoff_len: tokens at most of the prompt with either answer; the rest is cut off.
    """
    *earlier, (prompt, chosen) = template.render(pair.chosen)
    texts = [text for turn, answer in earlier for text in (turn, *_split_answer(answer))]
    prompt_ids = [i for text in (*texts, prompt) if text for i in template.tokenize(text)]
    rejected = template.render(pair.rejected)[-1][1]
    room = max(cutoff_len - len(prompt_ids), 0)
    answers = [
        tuple(template.tokenize(_split_answer(text)[0])[:room]) for text in (chosen, rejected)
    ]
    if not prompt_ids or not all(answers) or answers[0] == answers[1]:
        return None
    return PairExample(tuple(prompt_ids), *answers)


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
            # An example's first token is not the continuation of the one before.
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
