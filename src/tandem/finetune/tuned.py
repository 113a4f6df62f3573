"""A model with an adapter, in this process: answers and perplexity.

For looking at what was learned; a server is faster at many requests.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tandem.core.errors import ConfigError
from tandem.finetune.data.examples import IGNORED_LABEL, Example, collate, encode
from tandem.finetune.data.records import Conversation
from tandem.finetune.data.templates import make_template
from tandem.finetune.training.expert_adapters import open_adapter
from tandem.finetune.training.model import load_frozen, load_tokenizer

__all__ = ["TunedModel"]


class TunedModel:
    """A checkpoint, with or without an adapter, that generates and scores. Not thread-safe.

    Args:
        model: folder, hub id that was pulled before, or ``demo``.
        adapter: folder of an adapter in PEFT's format; None is the model alone.
        template: as of a recipe.
        is_bf16: tensors in bfloat16 instead of float32.
        expert_format: as of ``load_frozen``.
        num_threads: of the kernels; None = all cores.

    Raises: as ``load_frozen``, ``open_adapter`` and ``make_template``.
    """

    def __init__(
        self,
        model: str,
        adapter: str | Path | None = None,
        *,
        template: str | None = None,
        is_bf16: bool = False,
        expert_format: str = "auto",
        num_threads: int | None = None,
    ) -> None:
        frozen = load_frozen(
            model, is_bf16=is_bf16, expert_format=expert_format, num_threads=num_threads
        )
        self._tokenizer = load_tokenizer(frozen.checkpoint)
        self._template = make_template(self._tokenizer, template)
        ends = (*frozen.checkpoint.spec.eos_token_ids, *self._template.stop_ids)
        self._ends = _list_ends(ends, self._tokenizer)
        self._model = frozen.model
        if adapter is not None:
            # Checked before PEFT believes it.
            self._model = open_adapter(frozen.model, Path(adapter))
        self._model.eval()

    def answer(
        self,
        messages: list[dict[str, str]],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        seed: int | None = None,
    ) -> str:
        """Generate the next turn; temperature 0 is greedy.

        Raises: ConfigError: the prompt is longer than the model's context.
        """
        ids = self._template.encode_prompt(messages)
        limit = self._model.config.max_position_embeddings
        if len(ids) + 1 > limit:
            raise ConfigError("finetune.answer", f"{len(ids)} tokens: the context has {limit}")
        if seed is not None:
            torch.manual_seed(seed)
        sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None}
        sampling["top_k"] = None
        if temperature > 0:
            sampling = {"do_sample": True, "temperature": temperature}
        prompt = torch.tensor([ids])
        with torch.no_grad():
            out = self._model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=min(max_tokens, limit - len(ids)),
                eos_token_id=self._ends,
                pad_token_id=self._tokenizer.pad_token_id,
                use_cache=True,
                **sampling,
            )
        return self._tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)

    def predict(self, conversations: Sequence[Conversation], max_tokens: int) -> Iterator[str]:
        """Yield the greedy answer to each conversation's last question."""
        for conversation in conversations:
            messages = [{"role": m.role, "content": m.content} for m in conversation.messages[:-1]]
            yield self.answer(messages, max_tokens=max_tokens).strip()

    def perplexity(self, conversations: Sequence[Conversation], cutoff_len: int) -> float:
        """Return exp of the mean negative log probability of all answers' tokens."""
        total, count = 0.0, 0
        for conversation in conversations:
            example = encode(conversation, self._template, cutoff_len=cutoff_len)
            if example is None:
                continue
            loss, num_tokens = self._score(example)
            total, count = total + loss, count + num_tokens
        return math.exp(total / count) if count else math.nan

    def _score(self, example: Example) -> tuple[float, int]:
        batch = collate([example], 0)
        labels = batch.pop("labels")[:, 1:]
        with torch.no_grad():
            logits = self._model(**batch).logits[:, :-1].float()
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
        )
        return float(loss), int((labels != IGNORED_LABEL).sum())


def _list_ends(of_model: Sequence[int], tokenizer: Any) -> list[int]:
    """Ids that end an answer: the model's, and the one that ends a turn of the template."""
    ends = set(of_model)
    if tokenizer.eos_token_id is not None:
        ends.add(tokenizer.eos_token_id)
    vocabulary = tokenizer.get_vocab()
    ends |= {vocabulary[name] for name in ("<|im_end|>", "<|eot_id|>") if name in vocabulary}
    return sorted(ends)
