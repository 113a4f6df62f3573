"""Adds the tokenizer of a ``tokenizer.json`` to a GGUF file, as llama.cpp's converter does."""

import json
from collections.abc import Callable
from pathlib import Path

import gguf

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def byte_level(path: Path, pre: str | None, **ids: int) -> Callable[[gguf.GGUFWriter], None]:
    """Return what adds a byte-level BPE; ``ids`` are of special tokens, by name.

    ``pre`` names the splitting of text; None: the file does not say.
    """
    document = json.loads(path.read_text(encoding="utf-8"))
    model, added = document["model"], document["added_tokens"]
    vocabulary = model["vocab"] | {token["content"]: token["id"] for token in added}
    kinds = {t["content"]: CONTROL if t["special"] else USER_DEFINED for t in added}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([kinds.get(token, NORMAL) for token in tokens])
        writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in model["merges"]])
        for name, token_id in ids.items():
            getattr(writer, f"add_{name}_token_id")(token_id)

    return add
