"""Metadata of a GGUF file, whose numbers are checked against the file's contents when read."""

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from tandem.core.errors import ConfigError, UnsupportedError
from tandem.models.sources.gguf_header import GgufTensor, Value

__all__ = ["WHERE", "Config", "Facts", "show"]

Config = dict[str, Any]

WHERE = "models.read_gguf"

POSITIONS = (
    "context_length",
    "attention.sliding_window",
    "rope.scaling.original_context_length",
)
"""Keys of counts of positions, which no tensor bounds; all other counts are sizes of tensors."""
NEUTRAL: dict[str, tuple[float, ...]] = {
    "attention.causal": (1,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "router_logit_softcapping": (0,),
}
"""Keys that change what any architecture computes, with the values that change nothing."""
MAX_POSITIONS = 1 << 31
MAX_FLOAT = float(np.finfo(np.float32).max)


class Facts:
    """Metadata of one architecture, by the part of the key after the architecture's name.

    Args:
        metadata: the file's metadata.
        tensors: tensors of all parts, by llama.cpp's names.
        rope_factors: values of the tensors with divisors of RoPE frequencies, by name.
    """

    def __init__(
        self,
        metadata: Mapping[str, Value],
        tensors: Mapping[str, GgufTensor],
        rope_factors: Mapping[str, list[float]],
    ) -> None:
        architecture = metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise ConfigError(WHERE, f"general.architecture is {architecture!r}: need a name")
        self.architecture = architecture
        self.metadata = metadata
        self.tensors = tensors
        self.rope_factors = rope_factors
        self._read: set[str] = set()
        self._max_size = max((prod(tensor.shape) for tensor in tensors.values()), default=0)

    def find(self, key: str) -> Value | None:
        """Return a metadata value by its key without the architecture's name; None if it is
        missing.
        """
        self._read.add(key)
        return self.metadata.get(f"{self.architecture}.{key}")

    def require_read(self) -> None:
        """Check that no value which would change the answer was left unread.

        Raises: UnsupportedError (one was; the text names its key).
        """
        for key, neutral in NEUTRAL.items():
            name = f"{self.architecture}.{key}"
            value = self.metadata.get(name)
            is_neutral = isinstance(value, (int, float)) and value in neutral
            if key not in self._read and value is not None and not is_neutral:
                what = f"{name} is {show(value)}: models of this architecture run only without"
                raise UnsupportedError(WHERE, what, field=name)

    def count(self, key: str, default: int | None = None) -> int:
        """Return a whole number, at most the number of weights of the file's largest tensor.

        An array with a value for each layer must have equal values.

        Raises: ConfigError (it is missing without a default, no whole number, too large, or differs
            between layers).
        """
        value = self.find(key)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        if value is None and default is not None:
            return default
        most = MAX_POSITIONS if key in POSITIONS else self._max_size
        if type(value) is not int or not 0 <= value <= most:
            raise ConfigError(
                WHERE, f"{self.architecture}.{key} is {show(value)}: need a number up to {most}"
            )
        return value

    def count_where_any(self, key: str, default: int) -> int:
        """Return the number that some layers have, from an array in which other layers have 0.

        Raises: ConfigError (layers have different numbers, or the number is too large).
        """
        value = self.find(key)
        if not isinstance(value, np.ndarray) or not value.any():
            return self.count(key, default)
        some = value[value != 0]
        if value.dtype.kind not in "iu" or (some != some[0]).any():
            raise ConfigError(WHERE, f"{self.architecture}.{key} is {show(value)} of several kinds")
        number = some[0].item()
        if not 0 < number <= self._max_size:
            raise ConfigError(WHERE, f"{self.architecture}.{key} is {number}: too large")
        return number

    def list_counts(self, key: str, length: int) -> list[int]:
        """Return a number for each layer, from an array or from a single number.

        Args:
            key: metadata key.
            length: number of layers; an array may be longer.

        Raises: ConfigError (there are too few numbers).
        """
        value = self.find(key)
        if not isinstance(value, np.ndarray):
            return [self.count(key)] * length
        is_fit = value.dtype.kind in "iub" and len(value) >= length
        if not is_fit or (value.size and not 0 <= value.min() <= value.max() <= self._max_size):
            raise ConfigError(
                WHERE, f"{self.architecture}.{key} is {show(value)}: need {length} numbers"
            )
        return [int(number) for number in value[:length]]

    @property
    def num_layers(self) -> int:
        """Number of decoder layers, without those that predict further tokens, which are not
        run.
        """
        return self.count("block_count") - self.count("nextn_predict_layers", 0)

    def list_rope_factors(self, name: str) -> list[float] | None:
        """Return the values of a tensor with divisors of RoPE frequencies, rounded as ``number``
        does; None if there is no such tensor.
        """
        values = self.rope_factors.get(name)
        return None if values is None else [_round_single(value) for value in values]

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number, rounded to the decimals that are significant in the file's float32.

        Raises: ConfigError (the value is missing without a default, or no number).
        """
        value = self.find(key)
        if value is None and default is not None:
            return default
        if (
            not isinstance(value, (int, float))
            or isinstance(value, bool)
            or not abs(value) <= MAX_FLOAT
        ):
            raise ConfigError(WHERE, f"{self.architecture}.{key} is {show(value)}: need a number")
        return _round_single(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """Return a boolean metadata value, or the default if it is missing. Raises: ConfigError (it
        is no boolean).
        """
        value = self.find(key)
        if value is None:
            return default
        if not isinstance(value, (bool, int)):
            raise ConfigError(WHERE, f"{self.architecture}.{key} is {show(value)}: need a flag")
        return bool(value)

    def has(self, tensor: str) -> bool:
        """Return True if the file has a tensor of llama.cpp's name."""
        return tensor in self.tensors

    @property
    def head_dim(self) -> int:
        """Items of a key in one head. Raises: ConfigError (it would be 0)."""
        per_head = self.count("embedding_length") // self.num_heads
        size = self.count("attention.key_length", per_head)
        if not size:
            raise ConfigError(WHERE, f"heads of {self.architecture} have no weights")
        return size

    @property
    def num_heads(self) -> int:
        """Number of query heads. Raises: ConfigError (it is 0)."""
        heads = self.count("attention.head_count")
        if not heads:
            raise ConfigError(WHERE, f"{self.architecture}.attention.head_count is 0")
        return heads


def _round_single(value: float) -> float:
    """Return a value of float32 with the decimals that are significant in it."""
    return float(np.format_float_positional(np.float32(value), unique=True))


def show(value: object) -> str:
    """Return a metadata value as text for an error message."""
    return f"an array of {len(value)}" if isinstance(value, (list, np.ndarray)) else repr(value)
