"""Filling in the middle of a text: the special tokens of models that were trained for it.

They are recognised by name in the vocabulary, because no checkpoint's configuration names them.
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
"""Tokens before the prefix, before the suffix and before the middle, by family."""
_SUFFIX_FIRST = ("[SUFFIX]", "[PREFIX]")
"""Codestral's tokens: the suffix comes first, and the answer continues the prefix."""


@dataclass(frozen=True, slots=True)
class MiddleTokens:
    """The special tokens that mark the parts around a middle.

    Attributes:
        start_ids: ids that begin every sequence, such as a beginning-of-text token.
        prefix_id: id before the prefix.
        suffix_id: id before the suffix.
        middle_id: id before the middle; None if the suffix comes first.
    """

    start_ids: tuple[int, ...]
    prefix_id: int
    suffix_id: int
    middle_id: int | None

    def join(
        self, prefix: Sequence[int], suffix: Sequence[int], *, adds_special: bool
    ) -> list[int]:
        """Return the prompt whose answer is the middle between two texts.

        Args:
            prefix: ids of the text before the middle.
            suffix: ids of the text after the middle.
            adds_special: True to begin with ``start_ids``.
        """
        start = self.start_ids if adds_special else ()
        if self.middle_id is None:
            return [*start, self.suffix_id, *suffix, self.prefix_id, *prefix]
        return [*start, self.prefix_id, *prefix, self.suffix_id, *suffix, self.middle_id]


def find_middle_tokens(tokenizer: Tokenizer) -> MiddleTokens:
    """Return the special tokens with which a vocabulary marks the parts around a middle.

    Raises:
        UnsupportedError: it has no known ones.
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
    """Return True if a vocabulary has known tokens for filling in the middle."""
    return any(
        all(tokenizer.find_id(mark) is not None for mark in marks)
        for marks in (*_MARKS, _SUFFIX_FIRST)
    )
