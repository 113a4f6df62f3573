"""What the splittings of texts are compared with llama.cpp's by: vocabularies, and its departures.

No vocabulary of a model is needed to compare splittings. In these, the bytes between any two
neighbouring characters of the strings may merge: so where one tokenizer parts a text and another
does not, a token crosses the place. Of three characters of one byte only two merge, by rank: a
second vocabulary has the opposite ranks.
"""

import functools
import hashlib
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
from odd_strings import BOUNDARIES, PIECES, draw_boundaries

from tandem.models.tokenizing.splittings import SPLITTINGS, Splitting

NUM_FEW = 300
"""Strings of which a digest is made that takes little time."""


def spell_bytes() -> list[str]:
    """Return GPT-2's letter for each byte."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    letters = {byte: chr(byte) for byte in printed}
    letters |= {byte: chr(256 + number) for number, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]


@functools.cache
def make_vocabularies() -> list[tuple[list[str], list[str]]]:
    """Return the tokens and the merges of two vocabularies.

    Longer tokens that no merges make are used only where a whole piece of text is looked up.
    """
    letters = spell_bytes()
    neighbours = {
        (left.encode()[-1], right.encode()[0])
        for text in draw_boundaries()
        for left, right in itertools.pairwise(text)
    }
    pairs = [(letters[left], letters[right]) for left, right in sorted(neighbours)]
    random.Random(20_27).shuffle(pairs)
    # llama.cpp takes some markup for control tokens.
    texts = [text for text in PIECES + BOUNDARIES if not text.startswith("<")]
    texts = ["".join(letters[byte] for byte in text.encode()) for text in texts]
    known = {*letters, *(left + right for left, right in pairs)}
    whole = sorted({text for text in texts if text not in known})
    return [
        (
            [*letters, *(left + right for left, right in ranked), *whole],
            [f"{left} {right}" for left, right in ranked],
        )
        for ranked in (pairs, pairs[::-1])
    ]


def make_metadata(pre: str, number: int) -> dict[str, object]:
    """Return the metadata of a file with one of the vocabularies, which names its splitting."""
    tokens, merges = make_vocabularies()[number]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": np.ones(len(tokens), np.int32),
    }


def write_vocabulary(path: Path, pre: str, number: int) -> None:
    """Write the metadata as a GGUF file."""
    metadata = make_metadata(pre, number)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(metadata["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(metadata["tokenizer.ggml.tokens"])
    writer.add_token_types(metadata["tokenizer.ggml.token_type"].tolist())
    writer.add_token_merges(metadata["tokenizer.ggml.merges"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def digest(encodings: Sequence[list[int]]) -> str:
    """Return a short digest of the tokens of many texts."""
    found = hashlib.sha256()
    for ids in encodings:
        found.update(np.array([*ids, -1], "<i4").tobytes())
    return found.hexdigest()[:16]


# How llama.cpp departs from the patterns of the models' own tokenizers.

CONTRACTIONS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPACE = r"&&[^\s]]+"
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_SIGNS = "[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_DIGITS = r"[^\p{N}]*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_HAN = (
    "\u4e00-\u9fff\u3400-\u4dbf\U00020000-\U0002a6df\U0002a700-\U0002b73f\U0002b740-\U0002b81f"
    "\U0002b820-\U0002ceaf\U0002ceb0-\U0002ebef\uf900-\ufaff\U0002f800-\U0002fa1f"
)
_WORD = rf"[\p{{L}}&&[^{_HAN}]]+{CONTRACTIONS}?"


def _by_case(upper: str, lower: str, ending: str, digits: str) -> str:
    words = rf"{upper}*{lower}+{ending}|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{ending}"
    return rf"[^\r\n\p{{L}}\p{{N}}]?{words}|{digits}|{_SLASHES}"


_ASCII_CASE = (r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]")
_MARKED_CASE = (r"[\p{L}\p{M}&&[^a-z]]", r"[\p{L}\p{M}&&[^A-Z]]")
_NO_CASE = (r"[\p{L}\p{M}]", r"[\p{L}\p{M}]")
_ENDED = f"{CONTRACTIONS}?"
_O200K = (_by_case(*_ASCII_CASE, _ENDED, r"\p{N}{1,3}"),)


def imitate(name: str) -> Splitting:
    """Return the rule by which llama.cpp splits text for a name.

    It is that of the table but for these, each of which departs from the pattern of the models'
    own tokenizers:

    - Contractions have ASCII letters, where ignoring case also finds the long s.
    - Text is never normalized, as Qwen's, Cohere's and OLMo's tokenizers do (NFC).
    - Letters beyond ASCII are of both cases, and marks are no letters (gpt-4o and its kin, tekken);
      they are for granite, and for tiny_aya and youtu no letter has a case.
    - kimi-k2 parts no words by case, knows fewer Han characters, and takes no mark for a letter.
    - Spaces beyond ASCII are none of the characters that a range holds (DeepSeek's two).
    - What stands before a number goes with its first digits (afmoe, tiny_aya), and a range of
      afmoe's begins at U+8C48, to which NFC has changed its U+F900.
    - Digits beyond ASCII are not grouped (superbpe).
    - A piece that is a token is merged all the same, as tiktoken and tokenizers made of its files
      do not (llama4, kimi-k2); of glm4 later releases know it.
    """
    rule = SPLITTINGS[name]
    patterns = tuple(_spell_contractions(pattern) for pattern in rule.patterns)
    keeps_whole = rule.keeps_whole and name not in ("llama4", "kimi-k2", "glm4")
    if name in ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"):
        patterns = _O200K
    elif name == "granite-embed-multi-97m":
        patterns = (_by_case(*_MARKED_CASE, _ENDED, r"\p{N}{1,3}"),)
    elif name == "tekken":
        patterns = (_by_case(*_ASCII_CASE, "", r"\p{N}"),)
    elif name == "youtu":
        patterns = (patterns[0], _by_case(*_NO_CASE, _ENDED, r"\p{N}"))
    elif name in ("tiny_aya", "cohere2moe"):
        patterns = (_DIGITS, _by_case(*_NO_CASE, _ENDED, r"\p{N}{1,3}"))
    elif name == "kimi-k2":
        words = rf"[{_HAN}]+|{_WORD}|[^\r\n\p{{L}}\p{{N}}]{_WORD}"
        patterns = (rf"{words}|\p{{N}}{{1,3}}|{_REST}",)
    elif name in ("deepseek-llm", "deepseek-coder"):
        spaces = {
            f"{start}{each}": f"{start}{each[:-2]}{_SPACE}"
            for each in (_CJK, _SIGNS)
            for start in ("", r"\s?")
        }
        patterns = tuple(spaces.get(pattern, pattern) for pattern in patterns)
    elif name == "afmoe":
        patterns = (_DIGITS, patterns[1].replace("\uf900-\ufaff", "\u8c48-\ufaff"), patterns[2])
    elif name == "superbpe":
        patterns = (patterns[0], "(?=([0-9]{3})+(?![0-9]))")
    return replace(rule, patterns=patterns, keeps_whole=keeps_whole, is_nfc=False)


def _spell_contractions(pattern: str) -> str:
    for each in ("(?i:'s|'t|'re|'ve|'m|'ll|'d)", "'(?i:[sdmt]|ll|ve|re)"):
        pattern = pattern.replace(each, CONTRACTIONS)
    return pattern
