"""Sampling values of requests that name none.

A checkpoint's authors may recommend values, in ``generation_config.json`` or in the metadata of a
GGUF file. GGUF files are made for programs that sample narrowly where nobody says otherwise, and
small models answer nonsense without that: so conversations with such a file get llama.cpp's values,
and Ollama's at its endpoints. ``do_sample`` of ``generation_config.json`` is ignored: it is a
default of transformers' own generation loop, and would make equal requests give different answers.
"""

import json
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from tandem.core.errors import ConfigError
from tandem.models.sources.gguf_files import GgufFiles, find_gguf
from tandem.server.protocol import fields

__all__ = ["NEUTRAL", "DefaultSampling", "SamplingDefaults", "load_sampling_defaults"]


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling values by the names of the request's fields; None: the neutral value."""

    temperature: fields.Temperature | None = None
    top_p: fields.TopP | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: fields.MinP | None = None
    repetition_penalty: fields.RepetitionPenalty | None = None

    def list_values(self) -> dict[str, float]:
        """Return the values that are set, by their names."""
        values = msgspec.to_builtins(self)
        return {name: value for name, value in values.items() if value is not None}


LLAMA_CPP = SamplingDefaults(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)
"""Source: llama.cpp, ``common_params_sampling``."""
OLLAMA = SamplingDefaults(temperature=0.8, top_k=40, top_p=0.9)
"""Source: Ollama, its page on Modelfiles, but for its ``repeat_penalty``, which looks at 64 tokens;
ours looks at the whole conversation, and would harm long ones."""

_KEYS = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
"""Keys of GGUF metadata. Source: gguf-py, its table of constants."""


class DefaultSampling(NamedTuple):
    """The values for each kind of request."""

    own: SamplingDefaults
    """The values that the checkpoint's authors recommend, for requests whose samples or
    log-probabilities a program works on (scores, rollouts)."""
    chat: SamplingDefaults
    """Values for conversations and for texts to read."""
    ollama: SamplingDefaults
    """Values for requests to ``/api/``."""


NEUTRAL = DefaultSampling(SamplingDefaults(), SamplingDefaults(), SamplingDefaults())
"""Without any recommendation."""


def load_sampling_defaults(place: Path) -> DefaultSampling:
    """Read what a checkpoint recommends.

    Args:
        place: its folder, or its GGUF file.

    Raises:
        ConfigError: ``generation_config.json`` is not JSON, or a value is out of bounds.
    """
    path = place / "generation_config.json"
    file = None if (place / "config.json").is_file() else find_gguf(place)
    recommended: dict[str, Any] = {}
    if path.exists():
        try:
            recommended = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError("sampling.load_defaults", f"{path}: {error}") from error
    elif file is not None:
        path, metadata = file, GgufFiles.open(file).metadata
        recommended = {name: metadata[key] for name, key in _KEYS.items() if key in metadata}
    try:
        own = msgspec.convert(recommended, SamplingDefaults)
    except ValueError as error:
        raise ConfigError("sampling.load_defaults", f"{path}: {error}") from error
    if file is None:
        return DefaultSampling(own, own, own)
    return DefaultSampling(own, _fill(own, LLAMA_CPP), _fill(own, OLLAMA))


def _fill(own: SamplingDefaults, usual: SamplingDefaults) -> SamplingDefaults:
    return msgspec.structs.replace(usual, **own.list_values())
