"""A thousand strings of the kinds that tokenizers split differently, drawn by a seed.

The categories are those of Unicode 3.2, which each Python knows, so that every release draws the
same.
"""

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


def draw_odd_strings(count: int = 1000) -> list[str]:
    """Return strings of every Unicode category, runs of blanks, joiners, code and added tokens."""
    chance = random.Random(20_25)
    by_category: dict[str, list[str]] = {}
    for code in range(sys.maxunicode + 1):
        character = chr(code)
        category = unicodedata.category(character)
        # Surrogates are no text; NUL ends a text of C.
        if category not in ("Cs", "Cn") and code:
            by_category.setdefault(category, []).append(character)
    categories = sorted(by_category)
    strings = []
    for number in range(count):
        category = by_category[categories[number % len(categories)]]
        parts = [chance.choice(category) for _ in range(chance.randint(1, 4))]
        parts += [chance.choice(PIECES) for _ in range(chance.randint(1, 6))]
        parts += [chance.choice(PIECES[:12]) * chance.randint(1, 9)]
        chance.shuffle(parts)
        strings.append("".join(parts))
    return strings
