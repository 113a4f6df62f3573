"""The rules by which llama.cpp's pre-tokenizers split text before BPE, as one table by name.

A GGUF file names its rule (``tokenizer.ggml.pre``). Names and what belongs to each are those of
llama.cpp as of ``llama-cpp-python`` 0.3.36. Where it departs from the pattern of the models' own
``tokenizer.json`` or tiktoken file, which its sources often quote beside an adaptation to
``std::regex``, the model's own counts, since with it the model was trained. ``imitate`` of
``tests/real/splittings_beside.py`` lists all that departs, and no other difference is left.
"""

from dataclasses import dataclass, replace
from typing import Literal

__all__ = ["KIMI_K2", "SPLITTINGS", "Splitting"]

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+",
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*",
)
_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

LLAMA3 = (rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",)
QWEN2 = (rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",)
_ENDINGS = [rf"{part}{_CONTRACTIONS}?" for part in _CASED]
O200K = ("|".join([*_ENDINGS, rf"\p{{N}}{{1,3}}|{_SLASHES}"]),)
TEKKEN = ("|".join([*_CASED, rf"\p{{N}}|{_SLASHES}"]),)
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_OTHER_CASES = (
    "\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c88\u2d00-\u2d2d\ua790-\uab68"
    "\U00010570-\U000105bc\U00016e40-\U0001dfff"
)
"""Letters with case that DeepSeek-LLM's pattern does not treat as such, being newer than
its list.
"""
DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?(?:(?![{_OTHER_CASES}])[\p{{Lu}}\p{{Ll}}\p{{Lt}}])+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}+",
)
"""Patterns by which DeepSeek-LLM's tokenizer splits text before BPE."""
_NO_HAN = r"\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
_KIMI_UPPER, _KIMI_LOWER = rf"[\p{{Lu}}\p{{Lt}}{_NO_HAN}]", rf"[\p{{Ll}}{_NO_HAN}]"
KIMI_K2 = (
    "|".join(
        (
            r"[\p{Han}]+",
            rf"[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}*{_KIMI_LOWER}+{_CONTRACTIONS}?",
            rf"[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}+{_KIMI_LOWER}*{_CONTRACTIONS}?",
            r"\p{N}{1,3}",
            _REST,
        )
    ),
)
"""Pattern of Kimi-K2, also for its tiktoken files: Chinese apart, words by case, at most three
digits.
"""
DIGITS = (r"\p{N}",)
"""Pattern that splits digits before GPT-2's own pattern."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_THREE_DIGITS = "[0-9][0-9][0-9]"
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_SIGN_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
)
_DIGIT_GROUPS = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
"""Groups of three digits, counted from the end of a number."""
DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", _THREE_DIGITS)
"""Patterns of llama.cpp for files that do not name their splitting."""
FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, _THREE_DIGITS)
DEEPSEEK_CODER = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}",
)
SPARK = (
    r"\p{N}{1,3}",
    _CJK,
    rf"{_SIGN_WORDS}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+",
    r"\p{N}",
)
YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+"
    "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    f"|[\u3105-\u312f]+|{_CJK}",
    "|".join([*_ENDINGS, rf"\p{{N}}|{_SLASHES}"]),
)
JAIS2 = (
    rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|"
    + "".join(rf"\s{{{count}}}(?!\S)|" for count in (512, 256, 128, 64, 32, 16, 8, 4))
    + r"\s{1,2}(?!\S)|\s{1}",
)
QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
BLOOM = (" ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+",)
CHAMELEON = (
    "<sentinel:[0-9]+>",
    "(?:IMGIMG)(?:A|B|C|D|E|F|G|H|I){1,4}Z",
    "[\\t\\n]|    |  ",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
)
TINY_AYA = (r"\d{1,3}(?=(?:\d{3})*\b)", *O200K)
SUPERBPE = (r"\p{N}+", r"(?=(\d{3})+(?!\d))")
BAILING = (
    rf"'(?i:[sdmt]|ll|ve|re)|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+",
)
SEED_CODER = (
    rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
)
UFAKZEKA = (rf"{_WORDS}|\p{{N}}|{_REST}",)
AFMOE = (
    _DIGIT_GROUPS,
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af"
    "\u1100-\u11ff]+",
    rf"{_SIGN_WORDS}| ?[\p{{P}}\p{{S}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
EXAONE_MOE = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
)
MINICPM5 = (r"\p{N}{1,3}", rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}+|{_REST}")
LINES = r"[^\n]+|[\n]+"


@dataclass(frozen=True, slots=True)
class Splitting:
    """A rule that splits text into pieces, within each of which BPE merges."""

    patterns: tuple[str, ...] = ()
    """Patterns that are applied in turn; empty: GPT-2's only."""
    is_gpt2: bool = False
    """True if the pieces are then split by GPT-2's pattern."""
    is_nfc: bool = False
    """True if text is first normalized to NFC."""
    keeps_whole: bool = False
    """True if a piece of text that is itself a token is used as that token, without BPE merges."""
    has_bos: bool = False
    """True if text begins with the BOS token unless the file says otherwise."""
    form: Literal["bytes", "text", "spaces"] = "bytes"
    """Spelling of tokens: GPT-2's alphabet of bytes, plain text, or SentencePiece's text, in
    which spaces are marked."""


_PLAIN = Splitting(is_gpt2=True)
_SINGLE_DIGITS = Splitting(DIGITS, is_gpt2=True)
_LLAMA3 = Splitting(LLAMA3, keeps_whole=True)
_LLAMA3_WITH_BOS = replace(_LLAMA3, has_bos=True)
_RULES: tuple[tuple[str, Splitting], ...] = (
    (
        "gpt-2 gpt2 phi-2 mpt jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum "
        "modern-bert jina-v1-en jina-v2-code roberta-bpe exaone4 jais trillion granite-docling",
        _PLAIN,
    ),
    ("olmo", replace(_PLAIN, is_nfc=True)),
    ("smollm starcoder refact codeshell exaone minerva-7b mellum2", _SINGLE_DIGITS),
    ("command-r", replace(_SINGLE_DIGITS, is_nfc=True)),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        _LLAMA3_WITH_BOS,
    ),
    ("glm4 glm5", _LLAMA3),
    ("dbrx smaug-bpe chatglm-bpe", Splitting(LLAMA3)),
    ("qwen2 deepseek-r1-qwen f2llmv2", Splitting(QWEN2, is_nfc=True)),
    ("stablelm2 hunyuan solar-open grok-2 kormo megrez", Splitting(QWEN2)),
    ("qwen35", Splitting(QWEN35, is_nfc=True)),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", Splitting(DEEPSEEK_V3)),
    ("deepseek-llm", Splitting(DEEPSEEK_LLM)),
    ("deepseek-coder", Splitting(DEEPSEEK_CODER)),
    ("kimi-k2", Splitting(KIMI_K2, keeps_whole=True)),
    ("gpt-4o kanana2 talkie minimax-m2", Splitting(O200K)),
    ("llama4 granite-embed-multi-97m", Splitting(O200K, keeps_whole=True)),
    ("tiny_aya cohere2moe", Splitting(TINY_AYA)),
    ("tekken", Splitting(TEKKEN, keeps_whole=True, has_bos=True)),
    ("spark2_5", Splitting(SPARK)),
    ("youtu", Splitting(YOUTU, keeps_whole=True)),
    ("falcon", Splitting(FALCON)),
    ("jais-2", Splitting(JAIS2)),
    ("poro-chat bloom gpt3-finnish", Splitting(BLOOM)),
    ("viking", Splitting((*BLOOM, r"\p{N}"))),
    ("chameleon", Splitting(CHAMELEON, is_gpt2=True, has_bos=True)),
    ("superbpe", Splitting(SUPERBPE)),
    ("bailingmoe bailingmoe2 llada-moe", Splitting(BAILING)),
    ("seed-coder", Splitting(SEED_CODER)),
    ("ufakzeka", Splitting(UFAKZEKA)),
    ("afmoe", Splitting(AFMOE)),
    ("laguna", Splitting((LINES, *QWEN2))),
    ("exaone-moe", Splitting(EXAONE_MOE)),
    ("minicpm5", Splitting(MINICPM5, keeps_whole=True)),
    ("default", Splitting(DEFAULT)),
    ("gemma4 granite-embed-multi-311m sarvam-moe", Splitting(form="spaces")),
    ("whitespace", Splitting((r"\S+",), form="text")),
)
SPLITTINGS = {name: rule for names, rule in _RULES for name in names.split()}
"""Splittings by the value of ``tokenizer.ggml.pre``; of equal ones, the most common name first."""
