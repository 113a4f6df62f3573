"""Strings of the kinds that tokenizers split differently, drawn by a seed.

The categories are those of Unicode 3.2, which each Python knows, so that every release draws the
same.
"""

import functools
import random
import sys
from unicodedata import ucd_3_2_0 as unicodedata

PIECES = [
    " ", "  ", "\t", "\n", "\n\n", "\r\n", " \n", "\n ", "\u3000", "\u00a0", "\u200b", "\u200d",
    "\ufe0f", "\u0301", "e\u0301", "👩\u200d🚀", "🇫🇷", "ﬁ", "İ", "ß", "Ǆ", "a" * 40, "1234567890",
    "3.14", "0x1F", "don't", "I'LL", "'s", "def f(x):\n    return x\n", "    ", "//", "==>", "```",
    "#include <a.h>", "foo_bar", "fooBar", "http://a.b/c?d=1&e", "<|im_start|>", "<|im_end|>",
    "<|endoftext|>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<unused3>", "[INST]",
    "</s>", "<s>", "<0x0A>", "▁", "Ġ", "你好", "こんにちは", "안녕", "שלום", "مرحبا", "नमस्ते",
    "สวัสดี",
    "Ελληνικά", "привет", "½", "²", "№", "—", "…", "“q”", "$", "€", "%", "@", "\\", "\"", "`",
]  # fmt: skip

BOUNDARIES = [
    "\r", "\x0b", "\x0c", "\x85", "\u2028", "\u1680", "\u2003", " \r\n \n ", "\n \n", "\t\n",
    " '", " s", "É", "ÀÉ", "éA", "aÉb", "ñ", "ÑO", "ǅ", "ʰ", "ª", "٣", "१२३", "৪", "๕", "Ⅻ",
    "①", "３４", "𝟙", "12", "1", "12345678901", "1 234,567", "'S", "'tis", "'Re", "'lL", "ſ",
    "K", "'ſ", "a's", "É's", "Hello", "WORLD", "HTTPServer", "iPhone", "\u0300\u0301",
    "\u0903", "\u093f", "ำ", "\u20e3", "_", "__init__", " .", "...", "!?\n", "/\n/", "\n//",
    " /", "。", "，", "·", "+", "=", "~", "^", "|", "<", "$1", "¥", "©", "🙂", "🏻", "�",
    "\ue000", "\u0378", "\U000e0041", "\xad", "\u061c", "漢字", "かな", "カナ", "ㄅ", "㈠",
    "々", "〇", "𠀀", "\uf900", "⺀", "ㄱ", "ㆎ", "Ა", "ა", "ꮿ", "Ꭰ", "ա", "Ա", "ჲ", "𞤀", "𐐨",
    "<sentinel:12>", "IMGIMGABZ", "(", ")", "।", "،", "a b c", "x  y",
]  # fmt: skip
"""Neighbours that some splitting parts and another does not."""


@functools.cache
def draw_odd_strings(count: int = 1000) -> list[str]:
    """Return strings of every Unicode category, runs of blanks, joiners, code and added tokens."""
    return _draw(count, PIECES, random.Random(20_25), ("Cs", "Cn"))


@functools.cache
def draw_boundaries(count: int = 1500) -> list[str]:
    """Return strings full of places that splittings treat differently, of every category."""
    return _draw(count, PIECES + BOUNDARIES, random.Random(20_26), ("Cs",))


def _draw(
    count: int, pieces: list[str], chance: random.Random, left_out: tuple[str, ...]
) -> list[str]:
    by_category: dict[str, list[str]] = {}
    for code in range(sys.maxunicode + 1):
        character = chr(code)
        category = unicodedata.category(character)
        # Surrogates are no text; NUL ends a text of C.
        if category not in left_out and code:
            by_category.setdefault(category, []).append(character)
    categories = sorted(by_category)
    strings = []
    for number in range(count):
        category = by_category[categories[number % len(categories)]]
        parts = [chance.choice(category) for _ in range(chance.randint(1, 4))]
        parts += [chance.choice(pieces) for _ in range(chance.randint(1, 6))]
        parts += [chance.choice(pieces[:12]) * chance.randint(1, 9)]
        chance.shuffle(parts)
        strings.append("".join(parts))
    return strings
