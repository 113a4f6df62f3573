"""Builds a run's training and validation examples from the datasets of its recipe."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tandem.core.errors import ConfigError
from tandem.finetune.data.examples import chop, encode, encode_pair, encode_text, pack
from tandem.finetune.data.records import BadRow, load_dataset, load_pairs, load_texts
from tandem.finetune.data.templates import Template, differs_from_checkpoint, make_template
from tandem.finetune.recipes.recipe import Recipe

__all__ = ["Dataset", "prepare_data"]

logger = logging.getLogger(__name__)
WHERE = "finetune.prepare_data"


@dataclass(frozen=True, slots=True)
class Dataset:
    """The training and validation examples of a run in token ids, and the rows that were left
    out.
    """

    train: list[Any]
    """Training examples: ``Example``, or ``PairExample`` in stage dpo."""
    validation: list[Any]
    bad_rows: list[BadRow]
    num_unlearnable: int
    """Number of rows without anything to learn: the cutoff left no answer, or no two different
    answers.
    """


def prepare_data(recipe: Recipe, tokenizer: Any) -> Dataset:
    """Load and encode the datasets of a recipe.

    Raises: the errors of ``load_dataset`` and ``make_template``; ConfigError (no example is left).
    """
    data = recipe.data
    encoder = _Encoder(recipe, tokenizer)
    bad_rows: list[BadRow] = []

    def load(names: str) -> list[Any]:
        found: list[Any] = []
        for name in (part.strip() for part in names.split(",") if part.strip()):
            rows, bad = encoder.load(name)
            bad_rows.extend(bad)
            found += rows
        return found

    rows = load(data.dataset)
    if not rows:
        raise ConfigError(WHERE, "no dataset: name one of dataset_info.json", field="dataset")
    held_out = load(data.eval_dataset)
    if data.val_size > 0:
        rows, split = _split(rows, data.val_size, recipe.train.seed)
        held_out += split
    (train, train_lost), (validation, lost) = encoder.encode(rows), encoder.encode(held_out)
    if not train:
        raise ConfigError(WHERE, encoder.tell_cut("any record"), field="cutoff_len")
    if held_out and not validation:
        what = encoder.tell_cut("any record of validation")
        raise ConfigError(WHERE, what, field="cutoff_len")
    if encoder.is_packed and recipe.method.stage == "sft":
        train = pack(train, data.cutoff_len)
    encoder.log_turns()
    return Dataset(train, validation, bad_rows, train_lost + lost)


class _Encoder:
    """Reads a dataset's rows of the kind that the recipe's stage needs (conversations, pairs or
    texts), and encodes them as token ids.
    """

    def __init__(self, recipe: Recipe, tokenizer: Any) -> None:
        self._stage, self._data, self._tokenizer = recipe.method.stage, recipe.data, tokenizer
        self.is_packed = recipe.is_packed
        self._template: Template | None = None
        if self._stage != "pt":
            data = recipe.data
            self._template = make_template(
                tokenizer,
                data.template,
                system=data.default_system,
                is_thinking=data.enable_thinking,
            )
            if differs_from_checkpoint(self._template, tokenizer):
                what = "chats and servers ask in the checkpoint's own text, which is another one"
                logger.warning("event=other_template template=%s why=%r", data.template, what)
            if data.train_on_prompt and self._template.tail:
                what = f"train_on_prompt: template {data.template} ends answers in the next prompt"
                raise ConfigError(WHERE, f"{what}: remove it", field="train_on_prompt")

    def load(self, name: str) -> tuple[list[Any], list[BadRow]]:
        """Return the valid rows of a dataset, of the kind that the stage learns from, and the
        invalid ones.
        """
        folder, most = Path(self._data.dataset_dir), self._data.max_samples
        if self._stage == "dpo":
            records = load_pairs(name, folder, most)
            return records.pairs, records.bad_rows
        if self._stage == "pt":
            records = load_texts(name, folder, most)
            return records.texts, records.bad_rows
        records = load_dataset(name, folder, most)
        return records.conversations, records.bad_rows

    def encode(self, rows: list[Any]) -> tuple[list[Any], int]:
        """Return the training examples of rows, and the number of rows that gave none, as the
        cutoff left nothing to learn.
        """
        data, size = self._data, self._data.cutoff_len
        if self._template is None:
            if self.is_packed:
                return chop(rows, self._tokenizer, size), 0
            made = [encode_text(row, self._tokenizer, cutoff_len=size) for row in rows]
        elif self._stage == "dpo":
            made = [encode_pair(row, self._template, cutoff_len=size) for row in rows]
        else:
            made = [
                encode(
                    row,
                    self._template,
                    cutoff_len=size,
                    train_on_prompt=data.train_on_prompt,
                    mask_history=data.mask_history,
                )
                for row in rows
            ]
        examples = [example for example in made if example is not None]
        return examples, len(rows) - len(examples)

    def tell_cut(self, where: str) -> str:
        """Return the error message for data ``where`` the cutoff (``cutoff_len``) leaves no
        example.
        """
        size = self._data.cutoff_len
        if self._stage == "pt":
            return f"cutoff_len {size} is more than the tokens of {where}: lower it"
        return f"cutoff_len {size} leaves no answer in {where}: raise it"

    def log_turns(self) -> None:
        """Log in which form answers other than the last of a conversation are learned, if the
        template renders them differently.
        """
        template = self._template
        if template is None or self._data.mask_history or self._stage != "sft":
            return
        if template.is_history_reduced:
            what = "the chat template shows earlier answers otherwise, as without their reasoning"
            what += ": each answer is learned as it was generated, and later ones see it so"
            logger.info("event=answers_as_generated why=%r", what)
        if template.num_left_out:
            what = "the chat template writes earlier turns otherwise: their answers are not learned"
            logger.warning("event=turns_left_out turns=%d why=%r", template.num_left_out, what)


def _split(items: list[Any], size: float, seed: int) -> tuple[list[Any], list[Any]]:
    count = round(len(items) * size) if size < 1 else int(size)
    count = max(count, 1)
    if count >= len(items):
        what = f"val_size {size} leaves none of {len(items)} records to learn"
        raise ConfigError(WHERE, what, field="val_size")
    order = torch.randperm(len(items), generator=torch.Generator().manual_seed(seed)).tolist()
    chosen = set(order[:count])
    return (
        [item for i, item in enumerate(items) if i not in chosen],
        [item for i, item in enumerate(items) if i in chosen],
    )
