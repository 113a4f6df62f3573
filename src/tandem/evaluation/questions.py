"""Records in the form that the engine needs: prompts, and reference answers in tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.core.errors import ConfigError
from tandem.finetune.data.examples import Example, encode
from tandem.finetune.data.records import load_dataset
from tandem.finetune.data.templates import list_ends, load_tokenizer, make_template
from tandem.models.families import Checkpoint

__all__ = ["Questions", "read_questions"]


@dataclass(frozen=True, slots=True)
class Questions:
    """The valid rows of a data file, tokenized: prompts to answer, and reference answers to
    score.
    """

    tokenizer: Any
    """The tokenizer, from transformers."""
    prompts: tuple[list[int], ...]
    """Token ids up to each row's last answer, which the model is to generate."""
    questions: tuple[str, ...]
    """Text of each row's last question."""
    references: tuple[str, ...]
    """Text of each row's last answer."""
    examples: tuple[Example, ...]
    """Whole rows whose answers are scored; a row whose answer is cut off entirely has no example.
    """
    end_ids: tuple[int, ...]
    """Tokens that end an answer."""
    num_bad_rows: int

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of an answer's tokens."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True).strip()


def read_questions(
    checkpoint: Checkpoint,
    data: str,
    *,
    dataset_dir: Path,
    template: str | None,
    max_samples: int | None,
    cutoff_len: int,
) -> Questions:
    """Read records, render them with the chat template and tokenize them.

    Args:
       checkpoint: its tokenizer and chat template are used.
       data: a file, or a name in ``dataset_info.json`` of ``dataset_dir``.
       dataset_dir: a dataset folder.
       template: name of a template, as in a recipe; None takes the checkpoint's own.
       max_samples: most rows to read; None reads all.
       cutoff_len: most tokens of a scored row.

    Raises: the errors of ``load_dataset`` and ``make_template``; ConfigError (a prompt fills the
    context).
    """
    tokenizer = load_tokenizer(checkpoint)
    rendering = make_template(tokenizer, template)
    records = load_dataset(data, dataset_dir, max_samples)
    context = checkpoint.spec.max_position_embeddings
    prompts: list[list[int]] = []
    for number, row in enumerate(records.conversations, 1):
        messages = [{"role": m.role, "content": m.content} for m in row.messages[:-1]]
        prompts.append(rendering.encode_prompt(messages))
        if len(prompts[-1]) >= context:
            what = f"row {number} asks in {len(prompts[-1])} tokens, the model's context has "
            what += f"{context}: leave it out"
            raise ConfigError("evaluation.read_questions", what, field="data")
    cutoff_len = min(cutoff_len, context)
    encoded = [encode(row, rendering, cutoff_len=cutoff_len) for row in records.conversations]
    return Questions(
        tokenizer=tokenizer,
        prompts=tuple(prompts),
        questions=tuple(row.messages[-2].content for row in records.conversations),
        references=tuple(row.answer for row in records.conversations),
        examples=tuple(example for example in encoded if example is not None),
        end_ids=tuple(list_ends(checkpoint.spec.eos_token_ids, rendering, tokenizer)),
        num_bad_rows=len(records.bad_rows),
    )
