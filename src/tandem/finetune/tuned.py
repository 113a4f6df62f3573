"""A model with an adapter in this process, which generates answers and scores texts.

It is meant for trying out an adapter; a server is faster at many requests.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.core.errors import ConfigError
from tandem.finetune.data.examples import IGNORED_LABEL, Example, collate
from tandem.finetune.data.templates import list_ends, load_tokenizer, make_template
from tandem.finetune.training.expert_adapters import open_adapter
from tandem.finetune.training.model import count_weight_bytes, load_frozen

__all__ = ["TunedModel"]


class TunedModel:
    """A checkpoint, with or without an adapter, that generates and scores. Not thread-safe.

    Args:
        model: folder, hub id that was pulled before, or ``demo``.
        adapter: folder of an adapter in PEFT's format; None: the model alone.
        template: name of a template, as in a recipe; None: the checkpoint's chat template.
        is_bf16: True for tensors in bfloat16, False for float32.
        expert_format: weight format of routed experts, as for ``load_frozen``.
        num_threads: threads of the kernels; None: as many as the machine allows.

    Raises: the errors of ``load_frozen``, ``open_adapter`` and ``make_template``.
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
        eos = frozen.checkpoint.spec.eos_token_ids
        self._ends = list_ends(eos, self._template, self._tokenizer)
        self._model = frozen.model
        if adapter is not None:
            # open_adapter checks the adapter's files before PEFT reads them.
            self._model = open_adapter(frozen.model, Path(adapter))
        self._model.eval()
        self._context: int = self._model.config.max_position_embeddings

    def answer(
        self,
        messages: list[dict[str, str]],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        seed: int | None = None,
    ) -> str:
        """Generate the answer to a conversation, and return its text.

        Args:
            messages: the conversation, each with ``role`` and ``content``.
            max_tokens: most tokens of the answer; the end of the context may cut it shorter.
            temperature: temperature of sampling; 0: always the most likely token.
            seed: seed of sampling; None: torch's random generator as it is.

        Raises: ConfigError: the prompt is longer than the model's context.
        """
        ids = self._template.encode_prompt(messages)
        if len(ids) + 1 > self._context:
            raise ConfigError(
                "finetune.answer", f"{len(ids)} tokens: the context has {self._context}"
            )
        if seed is not None:
            torch.manual_seed(seed)
        answer = self._generate(ids, max_tokens, self._ends, temperature)
        return self._tokenizer.decode(answer, skip_special_tokens=True)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in memory."""
        return count_weight_bytes(self._model)

    def generate(
        self,
        prompts: Sequence[list[int]],
        max_tokens: int,
        end_ids: Sequence[int],
        on_answer: Callable[[], None],
    ) -> list[list[int]]:
        """Return the greedy answer to each prompt, all in token ids; see ``EvaluatedModel``."""
        answers: list[list[int]] = []
        for prompt in prompts:
            answers.append(self._generate(prompt, max_tokens, end_ids, 0.0))
            on_answer()
        return answers

    def compute_logprobs(self, example: Example) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the tokens of a row that have a label (those to predict) and the log-probabilities
        at their positions, as one piece; see ``EvaluatedModel``.
        """
        batch = collate([example], 0)
        labels = batch.pop("labels")[0, 1:]
        is_scored = labels != IGNORED_LABEL
        with torch.no_grad():
            logits = self._model(**batch).logits[0, :-1][is_scored].float()
        yield labels[is_scored], torch.nn.functional.log_softmax(logits, -1)

    def _generate(
        self, ids: list[int], max_tokens: int, end_ids: Sequence[int], temperature: float
    ) -> list[int]:
        sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None}
        sampling["top_k"] = None
        if temperature > 0:
            sampling = {"do_sample": True, "temperature": temperature}
        prompt = torch.tensor([ids])
        with torch.no_grad():
            out = self._model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=min(max_tokens, self._context - len(ids)),
                eos_token_id=list(end_ids),
                pad_token_id=self._tokenizer.pad_token_id,
                use_cache=True,
                **sampling,
            )
        return out[0, len(ids) :].tolist()
