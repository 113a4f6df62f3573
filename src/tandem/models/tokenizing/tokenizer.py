"""The tokenizer of a checkpoint: text to ids and back, and its chat template.

``tokenizer.json`` is read by the ``tokenizers`` library (transformers takes seconds to import and
is only the fallback). A ``Tokenizer`` is immutable and thread-safe.
"""

import json
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders
from tokenizers.pre_tokenizers import ByteLevel

from tandem.core.errors import ConfigError, NotFoundError, UnsupportedError
from tandem.models.gguf.tokenizer import load_gguf_tokenizer
from tandem.models.sources.gguf_files import find_gguf
from tandem.models.tokenizing import tiktoken_file
from tandem.models.tokenizing.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from tandem.models.tokenizing.settings import DEFAULT_TEMPLATE, TOOL_TEMPLATE, read_settings

__all__ = ["Tokenizer", "find_gguf_vocabulary", "load_tokenizer"]

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    tiktoken_file.FILE_NAME,
    "vocab.json",
    "vocab.txt",
)


class Tokenizer:
    """A checkpoint's vocabulary, with encoding and decoding.

    Args:
        backend: the library's tokenizer, borrowed; padding and truncation are switched off.
        special_tokens: special tokens, such as ``{"bos_token": "<s>"}``, visible to the chat
            template.
        chat_template: jinja2 source, or None if the checkpoint has none.
        tool_template: source of the template for conversations with tools; None: there is no
            other.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: dict[str, str] | None = None,
        chat_template: str | None = None,
        tool_template: str | None = None,
    ) -> None:
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self.special_tokens = special_tokens if special_tokens is not None else {}
        self.chat_template = chat_template
        self.tool_template = tool_template
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        """Ids of tokens that are not text, such as the ends of turns."""
        self._added_ids = frozenset(added)
        steps = _list_steps(backend.decoder)
        self._is_byte_level = "ByteLevel" in steps and set(steps) <= {"ByteLevel", "Fuse"}
        self._has_byte_fallback = "ByteFallback" in steps
        self._byte_of = _byte_alphabet()
        self.token_bytes = lru_cache(maxsize=2**18)(self._find_bytes)
        """Cached function that returns the bytes of a token id; in a vocabulary of texts, the UTF-8
        of the token's text.
        """

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of ``text``.

        Raises:
            ConfigError: the text is not valid Unicode (a lone surrogate).
        """
        try:
            # Of the tokenizers library's encoders only the batch ones release the GIL.
            batch = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return batch[0].ids
        except UnicodeEncodeError as error:
            raise ConfigError("tokenizer.encode", f"text is not Unicode: {error}") from error

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Return the ids of two texts, combined as the tokenizer combines pairs.

        Raises:
            ConfigError: a text is not valid Unicode (a lone surrogate).
        """
        try:
            return self._backend.encode_batch_fast([(first, second)])[0].ids
        except UnicodeEncodeError as error:
            raise ConfigError("tokenizer.encode", f"text is not Unicode: {error}") from error

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of ``token_ids``, all of them in [0, vocab_size)."""
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return detokenizer.feed(token_ids) + detokenizer.flush()

    def detokenizer(
        self,
        *,
        skip_special_tokens: bool = True,
        shown_ids: frozenset[int] = frozenset(),
        context: Sequence[int] = (),
        is_exact: bool = False,
    ) -> Detokenizer:
        """Return a detokenizer for a sequence that follows the ``context`` tokens.

        Special tokens in ``shown_ids`` are not skipped. With ``is_exact`` the text has the bytes of
        the tokens, as grammars see them; a decoder may drop a space at the beginning.
        """
        skip = self.special_ids - shown_ids if skip_special_tokens else frozenset[int]()
        if self._is_byte_level or is_exact:
            return ByteDetokenizer(self.token_bytes, skip, context)
        decode = partial(self._backend.decode, skip_special_tokens=False)
        return WindowDetokenizer(decode, skip, self._is_byte, context)

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The tokenizers library's object; must not be changed."""
        return self._backend

    def find_special_ids(self, texts: Iterable[str]) -> frozenset[int]:
        """Return the ids of special tokens whose names occur in one of ``texts``."""
        names = {i: self.token_name(i) for i in self.special_ids}
        return frozenset(i for i, name in names.items() if any(name in text for text in texts))

    def find_id(self, token: str) -> int | None:
        """Return the id of a token in the vocabulary's spelling; None if there is none."""
        return self._backend.token_to_id(token)

    def split_special(self, text: str) -> list[tuple[str, int | None]]:
        """Split a text at its special tokens; return (part, id), with id None for plain text."""
        names = {self.token_name(i): i for i in self.special_ids}
        pattern = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True) if name)
        parts = re.split(f"({pattern})", text) if pattern else [text]
        return [(part, names.get(part)) for part in parts if part]

    def token_name(self, token_id: int) -> str:
        """Return a token in the vocabulary's spelling; empty for an id without a token."""
        token = self._backend.id_to_token(token_id)
        return token if token is not None else ""

    def token_text(self, token_id: int) -> str:
        """Return a token's own text, with U+FFFD for incomplete characters."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def _is_byte(self, token_id: int) -> bool:
        return self._has_byte_fallback and _raw_byte(self.token_name(token_id)) is not None

    def _find_bytes(self, token_id: int) -> bytes:
        token = self.token_name(token_id)
        if self._is_byte_level:
            # As in the tokenizers library's decoder, a token with a character outside the byte
            # alphabet stands for its own text.
            try:
                spelled = bytes([self._byte_of[char] for char in token])
            except KeyError:
                return token.encode()
            return token.encode() if self._is_plain(token_id, token, spelled) else spelled
        if self._has_byte_fallback and (byte := _raw_byte(token)) is not None:
            return byte
        return token.replace("\u2581", " ").encode()

    def _is_plain(self, token_id: int, token: str, spelled: bytes) -> bool:
        """Return True if a token of a byte-level vocabulary is an added one, whose name is its text
        and not in the alphabet of bytes.

        Args:
            token_id: id of the token.
            token: name of the token.
            spelled: bytes that the name spells in the alphabet.
        """
        if token.isascii() or token_id not in self._added_ids:
            return False
        if self._backend.model.token_to_id(token) != token_id:
            return True
        # It is a token of the model as well, which merges may make of bytes.
        return len(token) > 1 and not _is_text(spelled)


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _list_steps(decoder: decoders.Decoder | None) -> list[str]:
    """Return the kinds of a decoder's steps, those of sequences within it in place."""

    def list_kinds(stated: dict[str, Any]) -> list[str]:
        if stated["type"] != "Sequence":
            return [stated["type"]]
        return [kind for step in stated["decoders"] for kind in list_kinds(step)]

    return [] if decoder is None else list_kinds(json.loads(decoder.__getstate__()))


def _raw_byte(token: str) -> bytes | None:
    """Return the byte for a token such as ``<0xE4>``; None for other tokens."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes.fromhex(token[3:5])
        except ValueError:
            return None
    return None


def _byte_alphabet() -> dict[str, int]:
    """Return the byte for each character of a byte-level vocabulary.

    Source: GPT-2's ``bytes_to_unicode``: printable bytes are themselves, the other 68 are numbered
    upwards from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet |= {chr(0x100 + position): byte for position, byte in enumerate(others)}
    assert set(alphabet) == set(ByteLevel.alphabet()), "tokenizers changed its byte alphabet"
    return alphabet


def find_gguf_vocabulary(folder: Path) -> Path | None:
    """Return the GGUF file whose metadata has the tokenizer of a checkpoint, a folder or a file;
    None if the folder has a tokenizer in files of its own, or no GGUF file.
    """
    if any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    return find_gguf(folder)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of a checkpoint folder, or of its GGUF file.

    ``tokenizer.json`` alone decides how text is encoded and which tokens surround it; like
    transformers 5, this ignores ``add_bos_token`` in other files.

    Raises:
        NotFoundError: the folder has neither ``tokenizer.json`` nor files that can be converted.
        ConfigError: a file cannot be read.
        UnsupportedError: a tokenizer that only its own code can read, or of an unknown kind.
    """
    gguf = find_gguf_vocabulary(folder)
    if gguf is not None:
        found = load_gguf_tokenizer(gguf)
        return Tokenizer(
            found.backend,
            special_tokens=found.special_tokens,
            chat_template=found.chat_template,
            tool_template=found.tool_template,
        )
    settings = read_settings(folder)
    path = folder / "tokenizer.json"
    if path.exists():
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:
            raise ConfigError("tokenizer.load", f"{path} cannot be read: {error}") from error
    elif (folder / tiktoken_file.FILE_NAME).exists():
        alphabet = {byte: char for char, byte in _byte_alphabet().items()}
        backend = tiktoken_file.build_tokenizer(folder, settings.raw, alphabet)
    else:
        backend = _convert_tokenizer(folder)
    return Tokenizer(
        backend,
        special_tokens=settings.special_tokens,
        chat_template=settings.templates.get(DEFAULT_TEMPLATE),
        tool_template=settings.templates.get(TOOL_TEMPLATE),
    )


def _convert_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """Let transformers build a fast tokenizer from older files (``tokenizer.model``, vocab.txt).

    Raises: NotFoundError (there is no tokenizer); UnsupportedError (it has no fast form, or
        transformers is not installed).
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise UnsupportedError(
            "tokenizer.load",
            f"{folder} has no tokenizer.json, and transformers is not installed to convert it",
        ) from error
    try:
        loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:
        raise NotFoundError("tokenizer.load", f"no tokenizer in {folder}: {error}") from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise UnsupportedError(
            "tokenizer.load",
            f"{type(loaded).__name__} in {folder} has no fast form: add a tokenizer.json",
        )
    return backend
