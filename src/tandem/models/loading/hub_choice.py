"""Names of models on a hub as people write them, and the choice among a repository's GGUF files.

``org/name:Q4_K_M``, ``hf.co/org/name`` and the address of a page are understood. A repository often
has a model in many quantizations, each a file or several parts; which one is meant is told by its
tag, or by a file's name.
"""

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import NamedTuple

from tandem.core.errors import NotFoundError
from tandem.models.sources.gguf_files import PART, SUFFIX

__all__ = ["GgufChoice", "HubName", "choose_gguf", "list_choices", "parse_hub_name"]

WHERE = "models.pull"
SITE = re.compile(r"(?:https?://)?(?:hf\.co|huggingface\.co)/", re.IGNORECASE)
NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<tag>[\w.-]+))?", re.ASCII)
TAG = re.compile(
    r"(?<![a-z0-9])((?:ud-)?i?q\d\w*|tq\d\w*|mxfp4\w*|bf16|fp?16|fp?32)(?![a-z0-9])", re.IGNORECASE
)
"""Pattern of a quantization in the name of a file."""
OTHER_PARTS = ("mmproj", "imatrix")
"""Beginnings of GGUF files that are no models: projectors of images, statistics."""
LATEST = "latest"
"""Tag that Ollama adds where none is given."""


class HubName(NamedTuple):
    """A repository, and the quantization that is meant; empty: none is named."""

    repo: str
    tag: str


class GgufChoice(NamedTuple):
    """A model of a repository: one file, or all parts of one."""

    tag: str
    """Its quantization, by its file's name; empty if that tells none."""
    files: tuple[str, ...]
    size_bytes: int


def parse_hub_name(text: str) -> HubName | None:
    """Return what a text names on a hub; None if it has not the form of such a name."""
    match = NAME.fullmatch(SITE.sub("", text, count=1).rstrip("/"))
    if match is None:
        return None
    tag = match["tag"] or ""
    return HubName(match["repo"], "" if tag == LATEST else tag)


def list_choices(sizes: Mapping[str, int]) -> list[GgufChoice]:
    """Return the GGUF models among a repository's files, small ones first.

    Args:
        sizes: bytes by path in the repository.
    """
    groups: dict[str, list[str]] = {}
    for name in sorted(sizes):
        base = PurePosixPath(name).name
        if not base.lower().endswith(SUFFIX) or base.lower().startswith(OTHER_PARTS):
            continue
        match = PART.fullmatch(base)
        stem = base.removesuffix(SUFFIX) if match is None else match["stem"]
        groups.setdefault(str(PurePosixPath(name).with_name(stem)), []).append(name)
    found = [
        GgufChoice(_find_tag(stem), tuple(names), sum(sizes[name] for name in names))
        for stem, names in groups.items()
    ]
    return sorted(found, key=lambda choice: (choice.size_bytes, choice.files))


def choose_gguf(name: HubName, choices: list[GgufChoice], file: str = "") -> GgufChoice:
    """Return the model that is meant.

    Args:
        name: the repository, and the tag if one was given.
        choices: its models.
        file: name of a file, or of a part; empty: none was given.

    Raises:
        NotFoundError: none is meant, or several may be; the text lists them with their sizes.
    """
    meant = choices
    wanted = file or name.tag
    if file:
        meant = [c for c in choices if any(f == file or f.endswith(f"/{file}") for f in c.files)]
    elif name.tag:
        tag = name.tag.lower()
        meant = [choice for choice in choices if choice.tag.lower() == tag]
    if len(meant) == 1:
        return meant[0]
    listed = "".join(f"\n  {_describe(choice)}" for choice in meant or choices)
    if not choices:
        raise NotFoundError(WHERE, f"{name.repo} has no GGUF file")
    if not meant:
        raise NotFoundError(WHERE, f"{name.repo} has no {wanted}; there are:{listed}")
    tags = [choice.tag for choice in meant if choice.tag]
    example = f"{name.repo}:{tags[0]}" if len(set(tags)) == len(meant) else "--file NAME"
    raise NotFoundError(
        WHERE, f"{name.repo} has {len(meant)} models, name one, as {example}:{listed}"
    )


def _find_tag(stem: str) -> str:
    tags = TAG.findall(PurePosixPath(stem).name) or TAG.findall(stem)
    return tags[-1].upper() if tags else ""


def _describe(choice: GgufChoice) -> str:
    parts = f", {len(choice.files)} parts" if len(choice.files) > 1 else ""
    size = f"{choice.size_bytes / 1e9:.2f} GB" if choice.size_bytes else "size unknown"
    return f"{choice.tag or '-':<10} {size:>10}  {next(iter(choice.files))}{parts}"
