"""A checkpoint with ``tiktoken.model`` is read as its own code would, and that code is not run.

Method: a small vocabulary made here by merging the most frequent pairs; the ``tiktoken`` package,
with the pattern as Kimi's code has it, is the oracle.
"""

import base64
import json
import random
from collections import Counter
from itertools import pairwise

import pytest

from tandem.core.errors import ConfigError, TandemError, UnsupportedError
from tandem.models.tokenizing.tokenizer import load_tokenizer

CORPUS = (
    "The cat sat on the mat. THE CAT's 12345 mats, isn't it? I'LL go\n\n  def main(): return 0\n"
    "世界你好，我们的世界。汉字 and English 混合 grüße Ünïcode ÀÉ\u0301 😀😀 hello   world\t\tx\r\n"
)
NAMES = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 5: "<|im_user|>"}
PATTERN = "|".join(
    [
        r"""[\p{Han}]+""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"""
        r"""[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"""
        r"""[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)


def make_ranks(num_merges: int = 120) -> dict[bytes, int]:
    """Bytes, and the pairs that were most frequent, over the whole text as if it were one word."""
    ranks = {bytes([i]): i for i in range(256)}
    parts = [bytes([b]) for b in (CORPUS * 2).encode()]
    for _ in range(num_merges):
        pairs = Counter(pairwise(parts))
        joined = next(a + b for (a, b), _ in pairs.most_common() if a + b not in ranks)
        ranks[joined] = len(ranks)
        merged = []
        while parts:
            take = 2 if len(parts) > 1 and parts[0] + parts[1] == joined else 1
            merged.append(b"".join(parts[:take]))
            del parts[:take]
        parts = merged
    return ranks


@pytest.fixture(scope="module")
def ranks():
    return make_ranks()


def write_folder(folder, ranks, *, kind="TikTokenTokenizer", names=NAMES, lines=None):
    if lines is None:
        lines = [base64.b64encode(token) + b" %d" % rank for token, rank in ranks.items()]
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    added = {str(len(ranks) + i): {"content": name, "special": True} for i, name in names.items()}
    settings = {
        "tokenizer_class": kind,
        "added_tokens_decoder": added,
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    # Running it would be noticed.
    (folder / "tokenization_kimi.py").write_text("raise SystemExit('code of a checkpoint ran')")


def test_texts_are_encoded_as_by_tiktoken(tmp_path, ranks):
    tiktoken = pytest.importorskip("tiktoken")
    write_folder(tmp_path, ranks)
    ours = load_tokenizer(tmp_path)
    special = {
        NAMES.get(i, f"<|reserved_token_{len(ranks) + i}|>"): len(ranks) + i for i in range(256)
    }
    theirs = tiktoken.Encoding(
        name="test", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special
    )
    assert ours.vocab_size == theirs.n_vocab == len(ranks) + 256
    assert ours.special_tokens == {"bos_token": "[BOS]", "eos_token": "[EOS]"}
    generator = random.Random(0)
    alphabet = [*CORPUS, *NAMES.values(), "\u00a0", "\x00", "ﬁ", "𠀀", "'RE", "  ", "<|im", "1"]
    texts = [CORPUS, "", " "] + [
        "".join(generator.choices(alphabet, k=generator.randint(1, 60))) for _ in range(300)
    ]
    for text in texts:
        ids = theirs.encode(text, allowed_special="all")
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == text
    assert ours.decode([len(ranks) + 2, 65], skip_special_tokens=True) == "A"


def test_the_pattern_matters(tmp_path, ranks):
    """The comparison above would notice Chinese joined with letters."""
    write_folder(tmp_path, ranks)
    tokenizer = load_tokenizer(tmp_path)
    joined = tokenizer.encode("x世界y")
    apart = [*tokenizer.encode("x"), *tokenizer.encode("世界"), *tokenizer.encode("y")]
    assert joined == apart


def test_another_class_of_tokenizer_is_refused_by_name(tmp_path, ranks):
    write_folder(tmp_path, ranks, kind="QWenTokenizer")
    with pytest.raises(UnsupportedError, match="QWenTokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "lines",
    [
        [b"not base64 1"],
        [b"QQ== x"],
        [b"QQ=="],
        [b"QQ== 0"],
        [base64.b64encode(bytes([i])) + b" %d" % (2 * i) for i in range(256)],
        [base64.b64encode(bytes([i])) + b" %d" % i for i in range(255)],
    ],
)
def test_a_damaged_file_is_refused(lines, tmp_path, ranks):
    write_folder(tmp_path, ranks, lines=lines)
    with pytest.raises(ConfigError, match=r"tiktoken\.model"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("names", [{300: "[BOS]"}, {0: "[BOS]", 1: "[BOS]"}, {0: ""}])
def test_special_tokens_that_do_not_fit_are_refused(names, tmp_path, ranks):
    write_folder(tmp_path, ranks, names=names)
    with pytest.raises(TandemError):
        load_tokenizer(tmp_path)
