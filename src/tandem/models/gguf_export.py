"""Writing of a checkpoint as GGUF in one of llama.cpp's mixtures: ``tandem convert --to q4_k_m``.

Names and rearrangements are the inverse of ``gguf.names``; ``gguf.mixtures`` chooses each tensor's
type. One weight is in memory at a time, or one expert. The new folder holds the GGUF file and
copies of the checkpoint's other files.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tandem.core.errors import UnsupportedError
from tandem.kernels.interfaces import Shard, WeightReader
from tandem.models.codecs.gguf_quantizers import quantize_rows
from tandem.models.export import (
    COPIED,
    INDEX,
    Draft,
    ExportReport,
    check_absent,
    check_room,
    explain_write,
)
from tandem.models.families import Checkpoint, open_checkpoint, read_json
from tandem.models.families.names import rename_reader
from tandem.models.gguf.metadata import (
    check_metadata,
    list_rope_factors,
    make_metadata,
    read_sizes,
)
from tandem.models.gguf.mixtures import MIXTURES, choose_types
from tandem.models.gguf.names import How
from tandem.models.gguf.origins import Origin, list_origins, list_tensors
from tandem.models.gguf.vocabulary import NO_VOCABULARY, make_vocabulary
from tandem.models.sources.containers import open_source
from tandem.models.sources.gguf_header import Value
from tandem.models.sources.gguf_writer import PlannedTensor, write_gguf
from tandem.models.sources.source import Progress, WeightSource
from tandem.models.tokenizing.tokenizer import load_tokenizer

__all__ = ["export_gguf"]

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

WHERE = "models.export"
EXPERTS = ".mlp.experts."


def export_gguf(
    path_or_id: str | Path, to: str, out: Path, *, progress: Progress | None = None
) -> ExportReport:
    """Write a checkpoint as a GGUF file.

    Args:
        path_or_id: a folder, or a hub id that was pulled before.
        to: a name of ``MIXTURES``, such as ``q4_k_m``.
        out: the folder to make; it must not exist, nor be written by another conversion.
        progress: called after each tensor of the file.

    Raises:
        NotFoundError, CorruptionError: errors of the source.
        ConfigError: ``out`` exists or is being written.
        UnsupportedError: a model that GGUF cannot describe, or one that is GGUF already.
        CapacityError: the disk is full.
    """
    checkpoint = open_checkpoint(path_or_id)
    mixture = MIXTURES[to]
    check_absent(out)
    if checkpoint.folder.is_file():
        what = f"{checkpoint.folder.name} is GGUF: it runs as it is; convert its original"
        raise UnsupportedError(WHERE, what)
    name = checkpoint.folder.resolve().name
    origins = list_origins(checkpoint.config)
    metadata = make_metadata(checkpoint.config, name, mixture.file_type)
    shapes = list_tensors(checkpoint.config)
    factors = list_rope_factors(checkpoint.config)
    shapes |= {name: values.shape for name, values in factors.items()}
    check_metadata(checkpoint.config, metadata, shapes)
    kinds = choose_types(mixture, read_sizes(checkpoint.config), shapes)
    planned = [PlannedTensor(tensor, kinds[tensor], shape) for tensor, shape in shapes.items()]
    vocabulary, note = _list_vocabulary(checkpoint)
    with ExitStack() as stack:
        source: WeightSource = stack.enter_context(
            open_source(checkpoint.folder, quantization=checkpoint.quantization)
        )
        pool = stack.enter_context(ThreadPoolExecutor(len(os.sched_getaffinity(0))))
        reader = rename_reader(source, source.entries, checkpoint.config.model_type)
        maker = _Maker(checkpoint.config, reader, origins, factors, pool, planned, progress)
        try:
            with Draft(out) as draft:
                check_room(out, sum(tensor.size_bytes for tensor in planned))
                path = draft.folder / f"{name}-{mixture.name.upper()}.gguf"
                with path.open("wb") as file:
                    write_gguf(file, metadata | vocabulary, planned, maker.make)
                _write_rest(draft.folder, checkpoint)
                draft.publish()
        except OSError as error:
            raise explain_write(error, out) from error
        return ExportReport(
            folder=str(out),
            weight_format=mixture.name,
            num_tensors=len(planned),
            num_coded=sum(tensor.kind not in ("F32", "F16") for tensor in planned),
            size_bytes=sum(tensor.size_bytes for tensor in planned),
            source_bytes=sum(entry.end - entry.begin for entry in source.entries.values()),
            note=note,
        )


def _list_vocabulary(checkpoint: Checkpoint) -> tuple[dict[str, Value], str]:
    """Return the tokenizer's metadata, and a note for the user."""
    tokenizer = load_tokenizer(checkpoint.folder)
    made = make_vocabulary(
        tokenizer.backend,
        tokenizer.special_tokens,
        tokenizer.chat_template,
        tokenizer.tool_template,
        checkpoint.config.vocab_size,
    )
    if made is not None:
        return made, ""
    note = (
        "the folder has the model's tokenizer, the GGUF file has none: llama.cpp knows no way to "
        "split text as the model's does"
    )
    return NO_VOCABULARY, note


class _Maker:
    """Maker of the bytes of the tensors of a GGUF file, one at a time, from a checkpoint's
    weights.
    """

    def __init__(
        self,
        config: Any,
        reader: WeightReader,
        origins: Mapping[str, Origin],
        factors: Mapping[str, Floats],
        pool: ThreadPoolExecutor,
        planned: list[PlannedTensor],
        progress: Progress | None,
    ) -> None:
        self._config = config
        self._reader = reader
        self._origins = origins
        self._factors = factors
        self._pool = pool
        self._progress = progress
        self._total = sum(tensor.size_bytes for tensor in planned)
        self._done = 0

    def make(self, tensor: PlannedTensor) -> Bytes:
        """Return a tensor's bytes quantized to the type that the plan gives it, and report
        progress.
        """
        parts = [self._code(tensor, values) for values in self._read(tensor.name)]
        self._done += tensor.size_bytes
        if self._progress is not None:
            self._progress(self._done, self._total, tensor.name)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _code(self, tensor: PlannedTensor, values: Floats) -> Bytes:
        if tensor.kind == "F32":
            coded: NDArray[Any] = values
        elif tensor.kind == "F16":
            coded = values.astype(np.float16)
        else:
            coded = quantize_rows(tensor.kind, values, self._pool)
        return np.ascontiguousarray(coded).reshape(-1).view(np.uint8)

    def _read(self, tensor: str) -> Iterator[Floats]:
        """Yield the values of a tensor; experts one after the other."""
        origin = self._origins.get(tensor)
        if origin is None:
            yield self._factors[tensor]
        elif EXPERTS in origin.weight:
            for expert in range(origin.shape[0]):
                yield self._read_expert(origin, expert)
        else:
            values = torch.empty(origin.shape)
            self._reader.read_into(origin.weight, values)
            yield self._rearrange(origin, values.numpy())

    def _read_expert(self, origin: Origin, expert: int) -> Floats:
        count = len(origin.recipe.tensors)
        if self._reader.has(origin.weight):
            values = torch.empty(1, *origin.shape[1:])
            shard = Shard(0, expert, expert + 1, origin.shape[0])
            self._reader.read_into(origin.weight, values, shard)
            return values[0].chunk(count)[origin.part].numpy()
        module, _, word = origin.weight.rpartition(".")
        part = ("gate_proj", "up_proj")[origin.part] if count == 2 else word
        own = torch.empty(origin.shape[1] // count, origin.shape[2])
        self._reader.read_into(f"{module}.{expert}.{part}.weight", own)
        return own.numpy()

    def _rearrange(self, origin: Origin, values: Floats) -> Floats:
        if origin.recipe.how is How.MINUS_ONE:
            return values + 1
        if origin.recipe.how is How.PLAIN:
            return values
        is_query = ".q_proj." in origin.weight
        config = self._config
        heads = config.num_attention_heads if is_query else config.num_key_value_heads
        # transformers rotates the first half of a head against the second, GGUF neighbouring pairs:
        # reorder the rows accordingly.
        halves = values.reshape(heads, 2, len(values) // heads // 2, -1)
        return halves.swapaxes(1, 2).reshape(values.shape)


def _write_rest(folder: Path, checkpoint: Checkpoint) -> None:
    """Copy the checkpoint's other files, which have precedence over the GGUF file's metadata."""
    for path in sorted(checkpoint.folder.iterdir()):
        is_weights = path.name.endswith((INDEX, ".safetensors")) or path.name == "config.json"
        if path.is_file() and path.suffix in COPIED and not is_weights:
            shutil.copyfile(path, folder / path.name)
    config = read_json(checkpoint.folder / "config.json")
    config.pop("quantization_config", None)
    config.pop("compression_config", None)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
