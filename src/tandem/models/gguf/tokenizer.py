"""The tokenizer of a GGUF file's metadata, built for the ``tokenizers`` library.

Three kinds exist: byte-level BPE with its merges (``gpt2``), SentencePiece's BPE (``llama``), whose
merges follow from the scores of the pieces, and Gemma 4's (``gemma4``), in SentencePiece's form but
with merges. llama.cpp identifies the splitting of text before BPE by a name,
``tokenizer.ggml.pre`` (``SPLITTINGS``). An unknown name is refused, since another pattern gives
other tokens.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from tandem.core.errors import ConfigError, CorruptionError, UnsupportedError
from tandem.models.sources.gguf_files import GgufFiles
from tandem.models.sources.gguf_header import Value
from tandem.models.tokenizing.splittings import SPLITTINGS

__all__ = ["GgufTokenizer", "build_tokenizer", "find_end_tokens", "load_gguf_tokenizer"]

_logger = logging.getLogger(__name__)

WHERE = "tokenizer.load"
PREFIX = "tokenizer.ggml."
TEMPLATE_KEY = "tokenizer.chat_template"
TOOL_TEMPLATE_KEY = f"{TEMPLATE_KEY}.tool_use"
TEMPLATE_NAMES_KEY = "tokenizer.chat_templates"
"""Key of the list of the names of further templates."""

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
"""Token types that are not produced by merges."""

END_TOKENS = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<turn|>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|return|>",
        "<|call|>",
        "<|user|>",
    }
)
"""Control tokens that end a turn, even if the file names another end token."""
STRIPPED_AFTER = frozenset({"phi3", "phimoe"})
"""Architectures whose SentencePiece tokenizers drop blanks after an added token, which no metadata
says.
"""
NOT_STRIPPED_AFTER = frozenset({"<unk>", "<s>", "<|endoftext|>"})
"""Added tokens of these that keep the blanks."""
OF_FAMILY = {"<|user|>": ("glm4", "glm4moe")}
"""Control tokens that end a turn only in some architectures."""


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """The tokenizer that the metadata of a GGUF file describes."""

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    """Special tokens by name, such as ``{"bos_token": "<s>"}``."""
    chat_template: str | None
    tool_template: str | None
    """Chat template for conversations with tools; None: there is no other."""


def load_gguf_tokenizer(path: Path) -> GgufTokenizer:
    """Build the tokenizer of a GGUF file.

    Raises:
        ConfigError: the metadata has no tokenizer, or its parts do not fit together.
        UnsupportedError: an unknown kind or splitting.
        CorruptionError: as for ``GgufFiles.open``; a token occurs twice.
    """
    return build_tokenizer(GgufFiles.open(path).metadata, path.name)


def build_tokenizer(metadata: Mapping[str, Value], name: str) -> GgufTokenizer:
    """Build the tokenizer of a file's metadata; ``name`` is the file's name, for errors.

    Raises: the errors of ``load_gguf_tokenizer``.
    """
    tokens = _list_tokens(metadata)
    kind = metadata.get(f"{PREFIX}model")
    make = {
        "gpt2": _make_byte_level,
        "llama": _make_sentencepiece,
        "gemma4": _make_gemma4,
    }.get(str(kind))
    if make is None:
        raise UnsupportedError(
            WHERE,
            f"{name} has a tokenizer of kind {kind!r}: gpt2, llama and gemma4 are known; name a "
            "folder that holds the model's tokenizer.json beside the GGUF file",
        )
    try:
        backend = make(metadata, tokens)
        if kind == "gpt2" and f"{PREFIX}pre" not in metadata:
            _logger.warning(
                "event=gguf_splitting_unknown file=%s note=%r",
                name,
                f"the file does not say how text is split ({PREFIX}pre): if the model was trained "
                "otherwise, prompts become other tokens; convert it anew, or name a folder that "
                "holds its tokenizer.json beside it",
            )
        special = _find_special(metadata, tokens)
        _add_tokens(backend, metadata, tokens, special)
        _frame(backend, metadata, special, is_sentencepiece=kind != "gpt2")
    except (ConfigError, UnsupportedError):
        raise
    except Exception as error:
        # The tokenizers library raises bare Exception if a merge names a token that the vocabulary
        # lacks.
        text = f"the tokenizer of {name} cannot be built: {error}"
        raise ConfigError(WHERE, text) from error
    template = metadata.get(TEMPLATE_KEY)
    tool_template = metadata.get(TOOL_TEMPLATE_KEY)
    return GgufTokenizer(
        backend,
        {f"{key}_token": tokens[token_id] for key, token_id in special.items()},
        template if isinstance(template, str) else None,
        tool_template if isinstance(tool_template, str) else None,
    )


def find_end_tokens(metadata: Mapping[str, Value], architecture: str) -> list[int]:
    """Return the ids of all tokens that end a text, the file's own end token first."""
    tokens, types = metadata.get(f"{PREFIX}tokens"), metadata.get(f"{PREFIX}token_type")
    named = [metadata.get(f"{PREFIX}{name}_token_id") for name in ("eos", "eot", "eom")]
    ids = [token_id for token_id in named if type(token_id) is int]
    if isinstance(tokens, list) and isinstance(types, np.ndarray) and len(types) == len(tokens):
        for token_id in np.flatnonzero(types == CONTROL).tolist():
            token = tokens[token_id]
            if token in END_TOKENS and architecture in OF_FAMILY.get(token, (architecture,)):
                ids.append(token_id)
    return list(dict.fromkeys(ids))


def _list_tokens(metadata: Mapping[str, Value]) -> list[str]:
    tokens = metadata.get(f"{PREFIX}tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ConfigError(
            WHERE,
            "the GGUF file has no tokenizer: name a folder that holds tokenizer.json beside it",
        )
    if len(set(tokens)) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if tokens.index(token) != i)
        raise CorruptionError(WHERE, f"token {twice!r} is in the GGUF file's vocabulary twice")
    return tokens


def _list_types(metadata: Mapping[str, Value], num_tokens: int) -> list[int]:
    types = metadata.get(f"{PREFIX}token_type")
    if types is None:
        return [1] * num_tokens
    if not isinstance(types, np.ndarray) or len(types) != num_tokens:
        raise ConfigError(WHERE, f"token_type of the GGUF file is not of {num_tokens} tokens")
    return types.tolist()


def _make_byte_level(metadata: Mapping[str, Value], tokens: list[str]) -> tokenizers.Tokenizer:
    name = metadata.get(f"{PREFIX}pre", "default")
    splitting = SPLITTINGS.get(name) if isinstance(name, str) else None
    if splitting is None:
        raise UnsupportedError(
            WHERE,
            f"the GGUF file's tokenizer splits text by {name!r}, which is not known here: name a "
            "folder that holds the model's tokenizer.json beside the file",
        )
    if splitting.form == "spaces":
        return _make_gemma4(metadata, tokens)
    pairs = _list_merges(metadata)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, pairs, ignore_merges=splitting.keeps_whole)
    )
    if splitting.is_nfc:
        backend.normalizer = normalizers.NFC()
    steps = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in splitting.patterns
    ]
    if splitting.form == "text":
        backend.pre_tokenizer = pre_tokenizers.Sequence([*steps])
        backend.decoder = decoders.Fuse()
        return backend
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting.is_gpt2)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, last])
    backend.decoder = decoders.ByteLevel()
    return backend


def _list_merges(metadata: Mapping[str, Value]) -> list[tuple[str, str]]:
    merges = metadata.get(f"{PREFIX}merges")
    if not isinstance(merges, list):
        raise ConfigError(WHERE, "the GGUF file's tokenizer has no merges")
    return [_split_merge(merge) for merge in merges]


def _split_merge(merge: str) -> tuple[str, str]:
    # Split at the first space: in a byte-level vocabulary no token contains a space.
    left, _, right = merge.partition(" ")
    return left, right


def _make_sentencepiece(metadata: Mapping[str, Value], tokens: list[str]) -> tokenizers.Tokenizer:
    scores = metadata.get(f"{PREFIX}scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(tokens):
        raise ConfigError(WHERE, f"scores of the GGUF file are not of {len(tokens)} tokens")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    unknown = metadata.get(f"{PREFIX}unknown_token_id", 0)
    unknown = unknown if type(unknown) is int and 0 <= unknown < len(tokens) else 0
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocabulary,
            _infer_merges(vocabulary, scores.tolist()),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_prefix = bool(metadata.get(f"{PREFIX}add_space_prefix", True))
    replace = normalizers.Replace(" ", "\u2581")
    prepend = [normalizers.Prepend("\u2581")] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*prepend, replace])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prepend else [])])
    return backend


def _make_gemma4(metadata: Mapping[str, Value], tokens: list[str]) -> tokenizers.Tokenizer:
    unknown = metadata.get(f"{PREFIX}unknown_token_id", 3)
    unknown = unknown if type(unknown) is int and 0 <= unknown < len(tokens) else 0
    backend = tokenizers.Tokenizer(
        models.BPE(
            {token: i for i, token in enumerate(tokens)},
            _list_merges(metadata),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps)
    return backend


def _infer_merges(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Return all pairs of pieces that form a piece, best piece first.

    SentencePiece merges the neighbours whose result has the highest score; ranks of merges are
    equivalent. Of several pairs forming one piece, the pair of earlier pieces comes first.
    """
    merges: list[tuple[float, int, int, str, str]] = []
    for piece, number in vocabulary.items():
        for cut in range(1, len(piece)):
            left, right = vocabulary.get(piece[:cut]), vocabulary.get(piece[cut:])
            if left is not None and right is not None:
                merges.append((-scores[number], left, right, piece[:cut], piece[cut:]))
    merges.sort(key=lambda merge: merge[:3])
    return [(left, right) for *_, left, right in merges]


def _add_tokens(
    backend: tokenizers.Tokenizer,
    metadata: Mapping[str, Value],
    tokens: list[str],
    special: dict[str, int],
) -> None:
    types = _list_types(metadata, len(tokens))
    # Old files give the ends of a text the type of others.
    ends = {special.get("bos"), special.get("eos")}
    is_stripped = (
        metadata.get("general.architecture") in STRIPPED_AFTER
        and metadata.get(f"{PREFIX}model") == "llama"
    )
    backend.add_tokens(
        [
            AddedToken(
                token,
                normalized=False,
                special=kind != USER_DEFINED,
                rstrip=is_stripped and token not in NOT_STRIPPED_AFTER,
            )
            for number, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind in (UNKNOWN, CONTROL, USER_DEFINED) or number in ends
        ]
    )


def _find_special(metadata: Mapping[str, Value], tokens: list[str]) -> dict[str, int]:
    special: dict[str, int] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"{PREFIX}{key}_token_id")
        if type(token_id) is int and 0 <= token_id < len(tokens):
            special[name] = token_id
    return special


def _frame(
    backend: tokenizers.Tokenizer,
    metadata: Mapping[str, Value],
    special: dict[str, int],
    *,
    is_sentencepiece: bool,
) -> None:
    """Set the BOS and EOS tokens that the file requires around text."""
    # If the file does not say, add a BOS token for the same tokenizers as llama.cpp does.
    splitting = SPLITTINGS.get(str(metadata.get(f"{PREFIX}pre")))
    default = is_sentencepiece or (splitting is not None and splitting.has_bos)
    has_bos = bool(metadata.get(f"{PREFIX}add_bos_token", default)) and "bos" in special
    has_eos = bool(metadata.get(f"{PREFIX}add_eos_token", False)) and "eos" in special
    if not has_bos and not has_eos:
        return
    names = ["bos"] * has_bos + ["$A"] + ["eos"] * has_eos
    pair = [*names, *["$B:1" if name == "$A" else f"{name}:1" for name in names]]
    used = [(name, special[name]) for name in ("bos", "eos") if name in names]
    backend.post_processor = processors.TemplateProcessing(
        single=names, pair=pair, special_tokens=used
    )
