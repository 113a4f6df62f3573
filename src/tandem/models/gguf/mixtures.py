"""The type of each tensor of a GGUF file, by llama.cpp's mixtures such as Q4_K_M.

The rules are those of ``llama_tensor_get_type`` in llama.cpp's src/llama-quant.cpp, without an
importance matrix: the head, and in some mixtures values, down projections and the first and last
layers, get more bits than the rest. Vectors, norms and routers are not quantized.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from tandem.models.sources.gguf_header import BLOCK_SIZES

__all__ = ["MIXTURES", "Mixture", "ModelSizes", "choose_types"]


@dataclass(frozen=True, slots=True)
class Mixture:
    """A mixture of llama.cpp, such as q4_k_m: a rule that gives each tensor of a file its type."""

    name: str
    kind: str
    """Type of tensors for which no rule names another."""
    file_type: int
    """llama.cpp's number of the mixture, ``general.file_type``."""


MIXTURES = {
    mixture.name: mixture
    for mixture in (
        Mixture("q4_0", "Q4_0", 2),
        Mixture("q4_1", "Q4_1", 3),
        Mixture("q8_0", "Q8_0", 7),
        Mixture("q5_0", "Q5_0", 8),
        Mixture("q5_1", "Q5_1", 9),
        Mixture("q2_k", "Q2_K", 10),
        Mixture("q3_k_s", "Q3_K", 11),
        Mixture("q3_k_m", "Q3_K", 12),
        Mixture("q3_k_l", "Q3_K", 13),
        Mixture("q4_k_s", "Q4_K", 14),
        Mixture("q4_k_m", "Q4_K", 15),
        Mixture("q5_k_s", "Q5_K", 16),
        Mixture("q5_k_m", "Q5_K", 17),
        Mixture("q6_k", "Q6_K", 18),
        Mixture("iq4_nl", "IQ4_NL", 25),
        Mixture("iq4_xs", "IQ4_XS", 30),
    )
}
"""Mixtures by their names in ``llama-quantize``."""

NARROWER = {
    **dict.fromkeys(("Q2_K", "Q3_K", "IQ4_XS"), "IQ4_NL"),
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}
"""Replacement types, with blocks of 32 weights, for rows whose length is no multiple of a
superblock's 256.
"""

NOT_CODED = (
    *("_norm.weight", "ffn_gate_inp.weight", "ssm_conv1d.weight", "shortconv.conv.weight"),
    *("position_embd.weight", "token_types.weight"),
)
"""Suffixes of tensors that are not quantized."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a model on which a mixture's choice of tensor types depends."""

    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    num_experts: int = 0

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // max(self.num_kv_heads, 1)

    @property
    def is_70b(self) -> bool:
        """True if llama.cpp treats the model as a 70B model."""
        return self.architecture in ("llama", "qwen2") and self.num_layers == 80


def choose_types(
    mixture: Mixture, sizes: ModelSizes, tensors: Mapping[str, tuple[int, ...]]
) -> dict[str, str]:
    """Return the type of each tensor.

    Args:
        mixture: one of ``MIXTURES``.
        sizes: the model's sizes.
        tensors: shapes by llama.cpp's names, outputs first.
    """
    values = sorted(
        (name for name in tensors if "attn_v.weight" in name or "attn_qkv.weight" in name),
        key=_find_layer,
    )
    places = {name: i for i, name in enumerate(values)}
    rules = _Rules(mixture, sizes, "output.weight" in tensors, places)
    return {name: _fit(rules.choose(name), name, shape) for name, shape in tensors.items()}


def _find_layer(name: str) -> int:
    return int(name.split(".")[1]) if name.startswith("blk.") else 0


def _fit(kind: str, name: str, shape: tuple[int, ...]) -> str:
    """Return a type that fits the tensor: the given one, a narrower one, or an unquantized one."""
    *rows, inputs = shape
    if not name.endswith("weight") or prod(rows) == 1 or name.endswith(NOT_CODED):
        return "F32"
    if inputs % BLOCK_SIZES[kind][0]:
        kind = NARROWER.get(kind, kind)
    return "F16" if inputs % BLOCK_SIZES[kind][0] else kind


@dataclass(frozen=True, slots=True)
class _Rules:
    mixture: Mixture
    sizes: ModelSizes
    has_output: bool
    value_places: Mapping[str, int]

    def choose(self, name: str) -> str:
        if name == "output.weight" or (name == "token_embd.weight" and not self.has_output):
            return "Q8_0" if self.mixture.kind == "Q8_0" else "Q6_K"
        if "attn_v.weight" in name:
            return self._choose_values(self.value_places[name])
        if "attn_k.weight" in name and self.sizes.num_experts == 8:
            return "Q8_0"
        if "ffn_down" in name:
            return self._choose_down(_find_layer(name))
        if "attn_output.weight" in name:
            return self._choose_output()
        if "attn_qkv.weight" in name:
            wide = {"q3_k_m": "Q4_K", "q3_k_l": "Q4_K", "q4_k_m": "Q5_K", "q5_k_m": "Q6_K"}
            return wide.get(self.mixture.name, self.mixture.kind)
        return self.mixture.kind

    def _uses_more(self, i: int, count: int) -> bool:
        eighth = count // 8
        return i < eighth or i >= 7 * count // 8 or (i - eighth) % 3 == 2

    def _choose_values(self, i: int) -> str:
        if self.sizes.num_experts == 8:
            return "Q8_0"
        name, kind = self.mixture.name, self.mixture.kind
        if name == "q2_k":
            kind = "Q4_K" if self.sizes.group >= 4 else "Q3_K"
        elif name == "q3_k_m":
            kind = "Q5_K" if i < 2 else "Q4_K"
        elif name == "q3_k_l" or (name in ("iq4_nl", "iq4_xs") and self.sizes.group >= 4):
            kind = "Q5_K"
        elif name in ("q4_k_m", "q5_k_m") and self._uses_more(i, len(self.value_places)):
            kind = "Q6_K"
        elif name == "q4_k_s" and i < 4:
            kind = "Q5_K"
        return "Q5_K" if self.sizes.is_70b and kind in ("Q3_K", "Q4_K") else kind

    def _choose_down(self, layer: int) -> str:
        name, count = self.mixture.name, self.sizes.num_layers
        if name == "q2_k":
            return "Q3_K"
        if name == "q3_k_m":
            return "Q5_K" if layer < count // 16 else "Q4_K"
        if name == "q3_k_l":
            return "Q5_K"
        if name in ("q4_k_m", "q5_k_m") and self._uses_more(layer, count):
            return "Q6_K"
        if name in ("iq4_nl", "iq4_xs", "q4_k_s") and layer < count // 8:
            return "Q5_K"
        return self.mixture.kind

    def _choose_output(self) -> str:
        name, kind = self.mixture.name, self.mixture.kind
        if self.sizes.num_experts == 8:
            few = ("q2_k", "q3_k_s", "q3_k_m", "iq4_nl", "q4_k_s", "q4_k_m", "iq4_xs")
            return "Q5_K" if name in few else kind
        return {"q2_k": "Q3_K", "q3_k_m": "Q4_K", "q3_k_l": "Q5_K"}.get(name, kind)
