"""Conversion of a ``tokenizer.json`` to GGUF metadata: the inverse of ``tokenizer``.

llama.cpp knows the splitting of text only by a name. The name is chosen whose tokenizer, built from
the metadata to be written, gives the model's own tokens for some probe texts; if there is none, the
file states that it has no vocabulary, since a wrong one would give other tokens.
"""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import tokenizers

from tandem.core.errors import TandemError
from tandem.models.gguf.tokenizer import (
    CONTROL,
    PREFIX,
    TEMPLATE_KEY,
    TEMPLATE_NAMES_KEY,
    TOOL_TEMPLATE_KEY,
    USER_DEFINED,
    build_tokenizer,
)
from tandem.models.sources.gguf_header import Value
from tandem.models.tokenizing.splittings import SPLITTINGS

__all__ = ["NO_VOCABULARY", "make_vocabulary"]

NO_VOCABULARY: dict[str, Value] = {f"{PREFIX}model": "no_vocab"}
NORMAL, UNUSED, BYTE = 1, 5, 6
"""Token types in addition to those of ``tokenizer``."""

PROBES = (
    "Hello, world! How's it going? I'll say: don't.",
    "  leading and trailing   spaces \t tabs\n\nlines\r\n  \n and 12345 6.78e9 numbers",
    "def f(x_1):\n    return [i ** 2 for i in range(x_1)]  # comment\n\n\n",
    "Größe, naïve, ça va? ÀÉÎ McDonald's iPhone HTTPServer camelCase",
    "你好,世界。こんにちは、元気ですか? 안녕하세요",
    "Привет, мир! مرحبا بالعالم שלום עולם नमस्ते",
    "🚀 (normal) 😶‍🌫️ ∑∞ €100 ½ x² __init__ a/b\\c <html> {json: [1,2]} 3333333",
)
"""Probe texts that different splitting patterns split differently."""


def make_vocabulary(
    backend: tokenizers.Tokenizer,
    special: dict[str, str],
    template: str | None,
    tool_template: str | None,
    size: int,
) -> dict[str, Value] | None:
    """Return the tokenizer's metadata; None if metadata cannot describe it.

    Args:
        backend: the model's tokenizer.
        special: special tokens, such as ``{"eos_token": "</s>"}``.
        template: chat template; None: none.
        tool_template: chat template for conversations with tools; None: no other.
        size: rows of the embedding, of which some may have no token.
    """
    document = json.loads(backend.to_str())
    model = document["model"]
    if model.get("type") != "BPE" or any(i >= size for i in model["vocab"].values()):
        return None
    metadata = _list_tokens(document, size)
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = backend.token_to_id(special.get(f"{name}_token", ""))
        if token_id is not None:
            metadata[f"{PREFIX}{key}_token_id"] = token_id
    if template is not None:
        metadata[TEMPLATE_KEY] = template
    if tool_template is not None:
        metadata[TEMPLATE_NAMES_KEY] = ["tool_use"]
        metadata[TOOL_TEMPLATE_KEY] = tool_template
    for form in _list_forms(model, metadata):
        if _encodes_alike(backend, form):
            return form
    return None


def _list_tokens(document: dict[str, Any], size: int) -> dict[str, Value]:
    vocabulary: dict[str, int] = document["model"]["vocab"]
    tokens = [f"[PAD{i}]" for i in range(size)]
    types = np.full(size, UNUSED, np.int32)
    for token, i in vocabulary.items():
        tokens[i], types[i] = token, NORMAL
    for added in document["added_tokens"]:
        if added["id"] < size:
            tokens[added["id"]] = added["content"]
            types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    if document["model"].get("byte_fallback"):
        for byte in range(256):
            i = vocabulary.get(f"<0x{byte:02X}>")
            if i is not None:
                types[i] = BYTE
    return {f"{PREFIX}tokens": tokens, f"{PREFIX}token_type": types}


def _list_forms(model: dict[str, Any], metadata: dict[str, Value]) -> Iterator[dict[str, Value]]:
    """Yield candidates of metadata for how text is split, of which the caller keeps the one that
    reproduces the tokenizer.
    """
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    if model.get("byte_fallback"):
        tokens = metadata[f"{PREFIX}tokens"]
        assert isinstance(tokens, list)
        scores = -np.arange(len(tokens), dtype=np.float32)
        kind: dict[str, Value] = {f"{PREFIX}model": "llama", f"{PREFIX}scores": scores}
        forms = [kind | {f"{PREFIX}add_space_prefix": has} for has in (True, False)]
    else:
        kind = {f"{PREFIX}model": "gpt2", f"{PREFIX}merges": merges}
        forms = [kind | {f"{PREFIX}pre": pre} for pre in _list_names()]
    for form in forms:
        for has_bos in (False, True):
            yield metadata | form | {f"{PREFIX}add_bos_token": has_bos}


def _list_names() -> list[str]:
    """Return the first name of each way of splitting text."""
    names: dict[tuple[object, ...], str] = {}
    for name, rule in SPLITTINGS.items():
        if rule.form == "bytes":
            names.setdefault((rule.patterns, rule.is_gpt2, rule.is_nfc, rule.keeps_whole), name)
    return list(names.values())


def _encodes_alike(backend: tokenizers.Tokenizer, metadata: dict[str, Value]) -> bool:
    try:
        other = build_tokenizer(metadata, "the file").backend
    except TandemError:
        return False
    return all(
        backend.encode(text).ids == other.encode(text).ids
        and _split(backend, text) == _split(other, text)
        for text in PROBES
    )


def _split(backend: tokenizers.Tokenizer, text: str) -> list[str]:
    """Return the pieces into which text is split before merging."""
    if backend.pre_tokenizer is None:
        return [text]
    return [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
