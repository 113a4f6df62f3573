"""A tokenizer from ``tiktoken.model``, a file of ranked byte strings, as in Kimi's checkpoints.

Such a checkpoint names Python code that reads the file, which is never run. The file holds the
vocabulary; the splitting of text and the ids reserved for special tokens are built in here for the
one known tokenizer class.
"""

import base64
import binascii
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from tandem.core.errors import ConfigError, UnsupportedError
from tandem.models.tokenizing.splittings import KIMI_K2

__all__ = ["FILE_NAME", "KNOWN_CLASS", "build_tokenizer", "spell_bytes"]

FILE_NAME = "tiktoken.model"
KNOWN_CLASS = "TikTokenTokenizer"
"""Value of ``tokenizer_class`` in Kimi-K2, Moonlight and Kimi-Linear."""

NUM_SPECIAL, MOST_SPECIAL = 256, 258
"""Number of special ids that follow the file's ids, and the number in the published code, which
counts two more than the models' vocabularies have.

Of the first, those without a name are ``<|reserved_token_{id}|>``; the last two exist only if they
are named.
"""
MAX_FILE_BYTES, MAX_TOKENS = 64 << 20, 1 << 20


def build_tokenizer(
    folder: Path, settings: dict[str, Any], alphabet: dict[int, str]
) -> tokenizers.Tokenizer:
    """Build the tokenizer of a folder with ``tiktoken.model``.

    Args:
        folder: the checkpoint's folder.
        settings: contents of its ``tokenizer_config.json``.
        alphabet: character for each byte in a byte-level vocabulary.

    Raises:
        UnsupportedError: an unknown tokenizer class.
        ConfigError: the file is damaged, or the settings do not fit it.
    """
    kind = settings.get("tokenizer_class")
    if kind != KNOWN_CLASS:
        raise UnsupportedError(
            "tokenizer.load",
            f"{FILE_NAME} of a {kind!r}: only those of a {KNOWN_CLASS} are read, and no code of a "
            "checkpoint is run: add a tokenizer.json",
        )
    ranks = _read_ranks(folder / FILE_NAME)
    vocab = {spell_bytes(token, alphabet): rank for token, rank in ranks.items()}
    merges = [
        (spell_bytes(left, alphabet), spell_bytes(right, alphabet))
        for left, right in _list_merges(ranks)
    ]
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(KIMI_K2[0]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(_list_special(settings, len(ranks)))
    return backend


def spell_bytes(token: bytes, alphabet: dict[int, str]) -> str:
    """Return a token's bytes as text in a byte-level vocabulary's alphabet."""
    return "".join(alphabet[byte] for byte in token)


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Read lines of a base64 token and its rank; ranks count from 0 without gaps.

    Raises: ConfigError (the file is too large or damaged, or lacks a single byte).
    """
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise ConfigError("tokenizer.load", f"{path} has {size} bytes, more than {MAX_FILE_BYTES}")
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            what = f"{path}, line {number}: not a token in base64 and its rank: {error}"
            raise ConfigError("tokenizer.load", what) from error
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if len(ranks) > MAX_TOKENS or missing or sorted(ranks.values()) != list(range(len(ranks))):
        raise ConfigError(
            "tokenizer.load",
            f"{path} holds {len(ranks)} tokens, {len(missing)} single bytes are missing: need all "
            f"of them, at most {MAX_TOKENS} tokens, and ranks from 0 on without gaps",
        )
    return ranks


def _list_merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return every pair of tokens that forms a token, in the order in which pairs are merged."""
    merges: list[tuple[int, int, int, bytes, bytes]] = []
    for token, rank in ranks.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ranks and right in ranks:
                merges.append((rank, ranks[left], ranks[right], left, right))
    merges.sort()
    return [(left, right) for *_, left, right in merges]


def _list_special(settings: dict[str, Any], first_id: int) -> list[AddedToken]:
    """Return the special tokens in the order of their ids, which follow the file's ids.

    Raises: ConfigError (the settings do not fit the file).
    """
    named = settings.get("added_tokens_decoder") or {}
    if not isinstance(named, dict):
        raise ConfigError("tokenizer.load", "added_tokens_decoder is not an object")
    names: dict[int, str] = {}
    for key, value in named.items():
        content = value.get("content") if isinstance(value, dict) else None
        if not str(key).isdecimal() or not isinstance(content, str) or not content:
            raise ConfigError("tokenizer.load", f"added_tokens_decoder: {key!r} is no id and token")
        names[int(key)] = content
    strange = sorted(names.keys() - set(range(first_id, first_id + MOST_SPECIAL)))
    ids = range(first_id, max([first_id + NUM_SPECIAL - 1, *(names.keys() - set(strange))]) + 1)
    texts = [names.get(i, f"<|reserved_token_{i}|>") for i in ids]
    if strange or len(set(texts)) < len(texts):
        raise ConfigError(
            "tokenizer.load",
            f"special tokens {strange[:3]} beyond ids {ids[0]} to {ids[-1]}, or one name twice",
        )
    return [AddedToken(text, special=True, normalized=False) for text in texts]
