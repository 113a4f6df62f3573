"""Incremental decoding of token ids to text, which never emits half a character.

There are two methods. Byte-level vocabularies (GPT-2, Qwen, Llama 3, DeepSeek) map each token to
bytes, so a table and an incremental UTF-8 decoder are exact and cost one lookup per token. All
others use the tokenizer's own decoder over a short window of ids. In both, the concatenation of all
pieces equals the decoding of the whole. Not thread-safe; one detokenizer per generation.
"""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

__all__ = ["ByteDetokenizer", "Detokenizer", "WindowDetokenizer"]


class Detokenizer(Protocol):
    """Incremental decoding of one sequence of token ids."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Add tokens; return the new text that no later token can change, possibly none."""
        ...

    def flush(self) -> str:
        """End the sequence; return the remaining text, with incomplete characters as U+FFFD."""
        ...


class ByteDetokenizer:
    """Detokenizer for vocabularies whose tokens are byte strings.

    Args:
        token_bytes: returns the bytes of a token id.
        skip: ids that add no text.
        context: the tokens before the sequence; a character split between context and sequence is
            returned whole, in the first piece.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        skip: frozenset[int],
        context: Sequence[int] = (),
    ) -> None:
        self._token_bytes = token_bytes
        self._skip = skip
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        # A UTF-8 character has at most four bytes, so the last four tokens of the context contain
        # the beginning of an unfinished one.
        for token_id in context[-4:]:
            if token_id not in skip:
                self._decode(token_bytes(token_id))

    def feed(self, token_ids: Sequence[int]) -> str:
        """Add tokens; return the text that no later token can change, possibly none."""
        skip, token_bytes = self._skip, self._token_bytes
        return self._decode(b"".join([token_bytes(i) for i in token_ids if i not in skip]))

    def flush(self) -> str:
        """End the sequence; an incomplete character becomes U+FFFD."""
        return self._decode(b"", True)


class WindowDetokenizer:
    """Detokenizer for all other decoders, which decodes a window that begins before the new tokens.

    A decoder may treat the first token of its input specially (SentencePiece strips its space), so
    the tokens of the last piece remain in the window, and only the text after theirs is new.

    Args:
        decode: the tokenizer's own decoder, ids to text.
        skip: ids that add no text.
        is_byte: returns True if a token is a raw byte of a byte-fallback vocabulary. A run of such
            tokens is decoded as a whole (one bad byte spoils all of it), so it is held until its
            end.
        context: the tokens before the sequence, whose text is not repeated.
    """

    _CONTEXT_TOKENS = 6

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        skip: frozenset[int],
        is_byte: Callable[[int], bool],
        context: Sequence[int] = (),
    ) -> None:
        self._decode = decode
        self._skip = skip
        self._is_byte = is_byte
        self._window = [i for i in context if i not in skip][-self._CONTEXT_TOKENS :]
        self._num_read = len(self._window)
        self._seen_text = decode(self._window) if self._window else ""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Add tokens; return the text that no later token can change, possibly none."""
        self._window += [i for i in token_ids if i not in self._skip]
        if len(self._window) == self._num_read or self._is_byte(self._window[-1]):
            return ""
        return self._advance(can_wait=True)

    def flush(self) -> str:
        """End the sequence; an incomplete character becomes U+FFFD."""
        return self._advance(can_wait=False)

    def _advance(self, *, can_wait: bool) -> str:
        text = self._decode(self._window)
        # The tokenizer's decoder shows an unfinished character as U+FFFD, so such a text waits for
        # more tokens.
        if len(text) <= len(self._seen_text) or (can_wait and text.endswith("�")):
            return ""
        piece = text[len(self._seen_text) :]
        self._window = self._window[self._num_read :]
        self._num_read = len(self._window)
        self._seen_text = self._decode(self._window)
        return piece
