"""Filling in the middle of a text: the tokens of the models that were trained for it.

A table by the names of the tokens, as no checkpoint says in its configuration that it has them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.core.errors import UnsupportedError
from tandem.models.tokenizing.tokenizer import Tokenizer

__all__ = ["MiddleTokens", "find_middle_tokens", "has_middle_tokens"]

_MARKS = (
    # Marks of three groups of models: Qwen and CodeGemma; StarCoder, Granite and StableCode; GLM.
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    # DeepSeek's order is begin, prefix, hole, suffix, end: the hole's mark stands before the
    # suffix, and the middle is generated after the end's mark.
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    # Code Llama's marks begin with its vocabulary's space mark.
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)
"""Before the prefix, before the suffix, before the middle, by family."""
_SUFFIX_FIRST = ("[SUFFIX]", "[PREFIX]")
"""Codestral: the suffix comes first, and the answer goes on behind the prefix."""


@dataclass(frozen=True, slots=True)
class MiddleTokens:
    """A vocabulary's marks of the parts around a middle.

    Attributes:
        start_ids: begin each sequence, such as a mark of its beginning.
        prefix_id: stands before the prefix.
        suffix_id: stands before the suffix.
        middle_id: stands before the middle; None where the suffix comes first.
    """

    start_ids: tuple[int, ...]
    prefix_id: int
    suffix_id: int
    middle_id: int | None

    def join(
        self, prefix: Sequence[int], suffix: Sequence[int], *, adds_special: bool
    ) -> list[int]:
        """Return the prompt whose answer is the middle of two texts.

        Args:
            prefix: ids of the text before it.
            suffix: ids of the text behind it.
            adds_special: ``start_ids`` come first.
        """
        start = self.start_ids if adds_special else ()
        if self.middle_id is None:
            return [*start, self.suffix_id, *suffix, self.prefix_id, *prefix]
        return [*start, self.prefix_id, *prefix, self.suffix_id, *suffix, self.middle_id]


def find_middle_tokens(tokenizer: Tokenizer) -> MiddleTokens:
    """Return the tokens with which a vocabulary marks a middle.

    Raises:
        UnsupportedError: it has none that are known.
    """
    find = tokenizer.find_id
    start_ids = tuple(tokenizer.encode("", add_special_tokens=True))
    for marks in _MARKS:
        prefix_id, suffix_id, middle_id = map(find, marks)
        if prefix_id is not None and suffix_id is not None and middle_id is not None:
            return MiddleTokens(start_ids, prefix_id, suffix_id, middle_id)
    suffix_id, prefix_id = map(find, _SUFFIX_FIRST)
    if suffix_id is not None and prefix_id is not None:
        return MiddleTokens(start_ids, prefix_id, suffix_id, None)
    known = ", ".join(marks[0] for marks in (*_MARKS, _SUFFIX_FIRST))
    raise UnsupportedError(
        "server.find_middle_tokens",
        f"the model cannot fill in a middle: its tokenizer has no {known}: leave suffix out",
        field="suffix",
    )


def has_middle_tokens(tokenizer: Tokenizer) -> bool:
    """Return whether a vocabulary marks middles in a way that is known."""
    return any(
        all(tokenizer.find_id(mark) is not None for mark in marks)
        for marks in (*_MARKS, _SUFFIX_FIRST)
    )
