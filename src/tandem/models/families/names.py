"""Readers for checkpoints whose tensor names differ from those of transformers' modules.

transformers knows the names of each family's checkpoints and renames them by patterns. In addition,
Mixtral's hub checkpoints call an expert's matrices ``w1``, ``w3`` and ``w2``; models that take
images call their decoder ``model.language_model``; OLMo's hybrids have other names for layer norms;
they and Kimi-Linear store a convolution each for queries, keys and values. Classifiers call their
head ``score``. Embedding models are often stored without their head and without the prefix
``model.``.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tandem.kernels.interfaces import Shard, WeightReader
from tandem.kernels.weights.blocks import CodedMatrix
from tandem.kernels.weights.formats import WeightFormat
from tandem.models.sources.source import TensorEntry

__all__ = ["IMAGE_PARTS", "RenamedReader", "rename_reader"]

DECODER = "model.language_model."
WHOLE_DECODER = "language_model."
IMAGE_PARTS = (
    "model.visual.",
    "visual.",
    "model.vision_tower.",
    "vision_tower.",
    "model.multi_modal_projector.",
    "multi_modal_projector.",
    "model.vision_model.",
    "vision_model.",
    "model.vision_embedder.",
    "model.embed_vision.",
    "model.audio_tower.",
    "model.embed_audio.",
)
"""Prefixes of tensors that process images or sound beside a decoder."""
HYBRID_NORMS = {
    ".input_layernorm.": ".attention_layer_norm.",
    ".post_attention_layernorm.": ".feedforward_layer_norm.",
}
_EXPERT = re.compile(r"(\.experts\.\d+\.)(gate|up|down)_proj\.")
_W1 = re.compile(r"\.experts\.\d+\.w1\.")
_MATRICES = {"gate": "w1", "up": "w3", "down": "w2"}


class RenamedReader:
    """A ``WeightReader`` that translates transformers' module names to the checkpoint's names.

    Args:
        reader: reads the checkpoint's tensors.
        rename: returns the checkpoint's name for a module's tensor name, or for a prefix of names.
    """

    def __init__(self, reader: WeightReader, rename: Callable[[str], str]) -> None:
        self._reader = reader
        self._rename = rename
        self.dtype: torch.dtype = reader.dtype
        self.device: torch.device = reader.device
        self.execution = reader.execution

    def has(self, name: str) -> bool:
        """Return True if the checkpoint has the tensor under the checkpoint's own name for it."""
        return self._reader.has(self._rename(name))

    def read_into(self, name: str, out: Tensor, shard: Shard | None = None) -> None:
        """Read a tensor, asked for by the module's name, under the checkpoint's name for it."""
        self._reader.read_into(self._rename(name), out, shard)

    def find_storage(self, name: str) -> str:
        """Return a description of how the checkpoint codes the tensor; empty for plain values."""
        return self._reader.find_storage(self._rename(name))

    def find_format(self, name: str) -> WeightFormat | None:
        """Return the weight format that can hold the tensor's stored codes unchanged; None if there
        is none.
        """
        return self._reader.find_format(self._rename(name))

    def read_packed(
        self, name: str, expert_id: int | None = None, shard: Shard | None = None
    ) -> CodedMatrix:
        """Return the codes of a tensor, read under the checkpoint's name for it."""
        return self._reader.read_packed(self._rename(name), expert_id, shard)

    def skip(self, prefix: str) -> None:
        """Mark tensors as used whose checkpoint names start with the renamed prefix, so that they
        do not count as left over after loading.
        """
        self._reader.skip(self._rename(prefix))


class ConvolutionReader(RenamedReader):
    """A reader for checkpoints that store a convolution in three parts: queries, keys and values.

    Args:
        reader: reads the checkpoint's tensors.
        entries: the checkpoint's tensors by name.
        rename: as in ``RenamedReader``; the three parts keep their names.
    """

    def __init__(
        self,
        reader: WeightReader,
        entries: Mapping[str, TensorEntry],
        rename: Callable[[str], str] = str,
    ) -> None:
        super().__init__(reader, rename)
        self._entries = entries

    def has(self, name: str) -> bool:
        """Return True if the checkpoint has the tensor, or the three parts of a convolution."""
        return super().has(name) or bool(self._find_parts(name))

    def read_into(self, name: str, out: Tensor, shard: Shard | None = None) -> None:
        """Read a tensor; a convolution is concatenated from its three parts."""
        parts = [] if shard is not None or super().has(name) else self._find_parts(name)
        sizes = [self._entries[part].shape[0] for part in parts]
        if not parts or sum(sizes) != len(out):
            # The base class's reader raises an error that names the missing tensor.
            super().read_into(name, out, shard)
            return
        for part, own in zip(parts, out.split(sizes), strict=True):
            super().read_into(part, own)

    def _find_parts(self, name: str) -> list[str]:
        """Return the names of a convolution's three parts; empty for other tensors."""
        if not name.endswith(CONVOLUTION):
            return []
        stem = name.removesuffix("conv1d.weight")
        parts = [f"{stem}{part}_conv1d.weight" for part in "qkv"]
        return parts if all(part in self._entries for part in parts) else []


CONVOLUTION = ".conv1d.weight"
"""Ending of a convolution's name in the skeleton; the checkpoint stores it as three tensors,
``q_conv1d``, ``k_conv1d`` and ``v_conv1d``.
"""
FIRST_PART = ".q_conv1d.weight"


def _list_renamings(model_type: str) -> list[tuple[str, str]]:
    """Return transformers' pairs of (pattern of a checkpoint's name, replacement in the
    module's).
    """
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    mapping: Any = get_checkpoint_conversion_mapping(model_type)
    return [
        (rule.source_patterns[0], rule.target_patterns[0])
        for rule in mapping or ()
        # transformers' other conversion rules change values too; the readers of this package do
        # that where it is needed.
        if isinstance(rule, WeightRenaming)
    ]


class MappedReader(RenamedReader):
    """A reader for a checkpoint whose names transformers maps to those of its modules.

    Args:
        reader: reads the checkpoint's tensors.
        stored: checkpoint name by module's tensor name.
    """

    def __init__(self, reader: WeightReader, stored: Mapping[str, str]) -> None:
        super().__init__(reader, self._find)
        self._stored = stored
        # Quantized codes are stored under other tensor names than the weight, so modules are also
        # looked up by their name.
        parts = ((a.rpartition(".")[0], b.rpartition(".")[0]) for a, b in stored.items())
        self._modules = dict(parts)

    def skip(self, prefix: str) -> None:
        """Mark the mapped tensors under a prefix as used, so that they do not count as left over
        after loading.
        """
        for name, stored in self._stored.items():
            if name.startswith(prefix):
                self._reader.skip(stored)

    def _find(self, name: str) -> str:
        if name in self._stored:
            return self._stored[name]
        other = _EXPERT.sub(lambda found: f"{found[1]}{_MATRICES[found[2]]}.", name)
        if other in self._stored:
            return self._stored[other]
        for each in (name, other):
            module, _, ending = each.rpartition(".")
            if module in self._modules:
                return f"{self._modules[module]}.{ending}"
        return name


def _map_names(names: set[str], model_type: str) -> dict[str, str]:
    """Return the checkpoint's names by the module names that transformers' renaming gives."""
    renamings = _list_renamings(model_type)
    stored: dict[str, str] = {}
    for name in names:
        renamed = name
        for pattern, target in renamings:
            renamed = re.sub(pattern, target, renamed)
        stored[renamed] = name
    return stored if len(stored) == len(names) else {}


def _rename_decoder(name: str) -> str:
    return re.sub(r"^model\.", DECODER, name)


def _make_norm_rename(names: set[str]) -> Callable[[str], str]:
    def rename(name: str) -> str:
        if name in names:
            return name
        for ours, theirs in HYBRID_NORMS.items():
            if ours in name and (renamed := name.replace(ours, theirs)) in names:
                return renamed
        return name

    return rename


def _replace_start(name: str, start: str, by: str) -> str:
    return by + name.removeprefix(start) if name.startswith(start) else name


def rename_reader(
    reader: WeightReader, entries: Mapping[str, TensorEntry], model_type: str
) -> WeightReader:
    """Return a reader that accepts the modules' names, whatever the checkpoint's names are.

    Args:
        reader: reads the checkpoint's tensors.
        entries: the checkpoint's tensors by name.
        model_type: the configuration's model type.
    """
    known = set(entries)
    if "score.weight" in known:
        reader = RenamedReader(reader, partial(_replace_start, start="lm_head.", by="score."))
    if "embed_tokens.weight" in known:
        reader = RenamedReader(reader, partial(_replace_start, start="model.", by=""))
    if any(name.startswith(f"{WHOLE_DECODER}model.") for name in known):
        return RenamedReader(reader, lambda name: WHOLE_DECODER + name)
    if any(name.startswith(DECODER) for name in known):
        return RenamedReader(reader, _rename_decoder)
    if any(norm in name for name in known for norm in HYBRID_NORMS.values()):
        return ConvolutionReader(reader, entries, _make_norm_rename(known))
    if any(name.endswith(FIRST_PART) for name in known):
        reader = ConvolutionReader(reader, entries)
    stored = _map_names(known, model_type)
    is_renamed = any(a != b for a, b in stored.items()) or any(map(_W1.search, known))
    return MappedReader(reader, stored) if is_renamed else reader
