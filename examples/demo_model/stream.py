"""The token stream: every training token of a run, laid out in the order in which it is read.

Owns the mixture of library, tests and chats, and the step -> batch function. Both depend on the
corpus and the seed alone.
"""

import logging
import random

import numpy as np
import torch
from corpus import SourceFile, build_chats
from recipe import Recipe
from tokenizer import END_OF_TEXT, render_chat
from tokenizers import Tokenizer

log = logging.getLogger("demo_model")


def encode_files(files: list[SourceFile], tokenizer: Tokenizer) -> list[np.ndarray]:
    """Tokens of each file; an end-of-text token closes it."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    encodings = tokenizer.encode_batch([file.text for file in files])
    return [np.array([*encoding.ids, end], dtype=np.uint16) for encoding in encodings]


def build_stream(files: list[SourceFile], tokenizer: Tokenizer, recipe: Recipe) -> np.ndarray:
    """Lay out every training token of the run, in the order in which it is read.

    An epoch holds the library once and half of the tests, which are alike and plenty, with chat
    documents in between.
    """
    rng = random.Random(recipe.seed)
    end = tokenizer.token_to_id(END_OF_TEXT)
    tokens = encode_files(files, tokenizer)
    chats = [render_chat(chat) for chat in build_chats(files, rng)]
    chat_tokens = [
        np.array([*encoding.ids, end], dtype=np.uint16)
        for encoding in tokenizer.encode_batch(chats)
    ]
    needed = recipe.num_steps * recipe.tokens_per_step + recipe.shape.context_len + 1
    stream: list[np.ndarray] = []
    size, epoch, next_chat = 0, 0, 0
    while size < needed:
        chosen = [t for i, t in enumerate(tokens) if not files[i].is_test or (i + epoch) % 2 == 0]
        budget = recipe.chat_share / (1 - recipe.chat_share) * sum(map(len, chosen))
        while budget > 0:
            document = chat_tokens[next_chat % len(chat_tokens)]
            chosen.append(document)
            budget -= len(document)
            next_chat += 1
        rng.shuffle(chosen)
        stream += chosen
        size += sum(map(len, chosen))
        epoch += 1
        log.info("epoch=%d tokens=%d chats=%d of=%d", epoch, size, next_chat, len(chat_tokens))
    return np.concatenate(stream)[:needed]


class Batches:
    """Step -> inputs and targets. Windows are shuffled inside the short and the long stage."""

    def __init__(self, stream: np.ndarray, recipe: Recipe):
        self.stream, self.recipe = stream, recipe
        self.num_short_steps = recipe.num_steps - recipe.num_long_steps
        self.boundary = self.num_short_steps * recipe.tokens_per_step
        rng = np.random.default_rng(recipe.seed)
        num_long = recipe.num_long_steps * recipe.tokens_per_step // recipe.shape.context_len
        self.short_order = rng.permutation(self.boundary // recipe.short_len)
        self.long_order = rng.permutation(num_long)

    def read(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and next tokens, each [B, L]."""
        is_long = step >= self.num_short_steps
        length = self.recipe.shape.context_len if is_long else self.recipe.short_len
        order, start = (self.long_order, self.boundary) if is_long else (self.short_order, 0)
        count = self.recipe.tokens_per_step // length
        first = (step - self.num_short_steps if is_long else step) * count
        rows = [
            self.stream[start + i * length : start + (i + 1) * length + 1]
            for i in order[first : first + count]
        ]
        batch = torch.from_numpy(np.stack(rows).astype(np.int64))
        return batch[:, :-1], batch[:, 1:]
