"""Matrices of a skeleton that the checkpoint has as codes, and the weight formats that hold them.

Read from the headers of the weights if they are present, else from the ``quantization_config``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tandem.core.errors import NotFoundError
from tandem.kernels.interfaces import WeightReader
from tandem.kernels.operators.experts import is_down, list_expert_weights
from tandem.kernels.weights.formats import BLOCK_ROWS, WeightFormat, pair_formats
from tandem.kernels.weights.recode import join_formats
from tandem.models.families import Checkpoint
from tandem.models.families.names import rename_reader
from tandem.models.planning.quantization import Quantization
from tandem.models.planning.roles import RawMatrix
from tandem.models.sources.containers import open_source
from tandem.models.sources.gguf_files import find_gguf
from tandem.models.sources.source import WeightSource

__all__ = ["StoredMatrix", "StoredModel", "read_stored"]


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """The checkpoint's storage of a matrix, and whether its codes can be kept."""

    storage: str = ""
    """Description of the codes, for plans; empty for plain values."""
    weight_format: WeightFormat | None = None
    """Weight format that holds the codes unchanged; None: they are decoded, or there are none."""
    why: str = ""
    """Reason why codes are decoded, to be appended to their description; empty if they are kept."""


@dataclass(frozen=True, slots=True)
class StoredModel:
    """Storage of a quantized checkpoint's matrices; empty for a checkpoint of plain values."""

    matrices: Mapping[str, StoredMatrix] = field(default_factory=dict)
    """Storage of matrices that are multiplied, by the skeleton's module."""
    size_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes in the file, by the skeleton's module; empty if the weights are absent."""

    @property
    def has_any_codes(self) -> bool:
        """True if the checkpoint stores some matrix as codes."""
        return any(matrix.storage for matrix in self.matrices.values())

    def find(self, name: str) -> list[StoredMatrix]:
        """Return how the checkpoint stores the matrices of a module and of the modules below it."""
        below = f"{name}."
        return [m for key, m in self.matrices.items() if key == name or key.startswith(below)]

    def find_format(self, name: str) -> WeightFormat | None:
        """Return the weight format that holds the stored codes of all matrices of a module; None if
        there is no such format.
        """
        formats = {matrix.weight_format for matrix in self.find(name)}
        return formats.pop() if len(formats) == 1 else None

    def is_mixed(self, name: str) -> bool:
        """Return True if all matrices of a module are stored as codes, in more than one weight
        format.
        """
        formats = {matrix.weight_format for matrix in self.find(name)}
        return len(formats) > 1 and None not in formats

    def has_codes(self, name: str) -> bool:
        """Return True if some matrix of a module is stored as codes that one of our weight formats
        holds unchanged.
        """
        return any(matrix.weight_format is not None for matrix in self.find(name))


def read_stored(checkpoint: Checkpoint, raw: list[RawMatrix]) -> StoredModel:
    """Return the storage of a checkpoint's quantized matrices; empty if it has plain values only.

    Raises: the errors of ``open_source``, except if the weights are absent.
    """
    quantization = checkpoint.quantization
    if quantization is None and find_gguf(checkpoint.folder) is None:
        return StoredModel()
    raw = [m for m in raw if m.role not in ("router", "gates")]
    try:
        source = open_source(checkpoint.folder, quantization=quantization)
    except NotFoundError:
        if quantization is None:
            raise
        return StoredModel({m.module: _foresee(quantization, m) for m in raw})
    with source:
        reader = rename_reader(source, source.entries, checkpoint.config.model_type)
        found = {m.module: _look_up(reader, m) for m in raw}
        # A tied head may use the codes of the embedding, whose tensor it shares.
        shared = next((found[m.module] for m in raw if m.role == "embedding"), StoredMatrix())
        found |= {m.module: shared for m in raw if m.role == "head" and m.is_shared}
        return StoredModel(found, _count_bytes(source, {matrix.module for matrix in raw}))


def _look_up(reader: WeightReader, matrix: RawMatrix) -> StoredMatrix:
    """Return how a matrix is stored, read from the headers of the checkpoint's weight files."""
    names = [f"{matrix.module}.weight"]
    if matrix.role == "experts":
        names = list_expert_weights(reader, matrix.module, matrix.shape[0])
    storage = {reader.find_storage(name) for name in names} - {""}
    if not storage:
        return StoredMatrix()
    if matrix.role == "experts":
        formats = {name: reader.find_format(name) for name in names}
        gate_up = [held for name, held in formats.items() if not is_down(name)]
        down = [held for name, held in formats.items() if is_down(name)]
        held = _pair_down(join_formats(gate_up), join_formats(down))
    else:
        held = join_formats([reader.find_format(name) for name in names])
    words = " and ".join(sorted(storage))
    return _judge(matrix, words, held)


def _pair_down(held: WeightFormat | None, down: WeightFormat | None) -> WeightFormat | None:
    """Return the format of experts whose gate and up are held in one format and whose down in
    another; None if the two differ and one is no integer format.
    """
    if held is None or down is None:
        return None
    is_pair = held == down or (held.is_integer and down.is_integer)
    return pair_formats(held, down) if is_pair else None


def _judge(matrix: RawMatrix, storage: str, held: WeightFormat | None) -> StoredMatrix:
    """Decide whether a matrix keeps its codes, or is decoded because operators reorder or
    split it.
    """
    why = ""
    if held is None:
        why = "which no format here holds"
    elif matrix.role == "embedding" and held.bits == 8 and held.has_minimum:
        why = "whose zero points would be rounded"
    elif matrix.role in ("q_up", "head_matrices"):
        why = "as latent attention orders rows and takes heads apart"
    elif held.has_blocks and matrix.role in ("qkv", "gate_up"):
        is_whole = matrix.shape[0] % BLOCK_ROWS == 0
        why = "" if is_whole else "whose blocks do not end where the stacked parts do"
    return StoredMatrix(storage, None if why else held, why)


def _foresee(quantization: Quantization, matrix: RawMatrix) -> StoredMatrix:
    """Return how a matrix will be stored in a checkpoint whose weights are absent, by its
    configuration alone.
    """
    name = matrix.module
    if matrix.role == "experts" and quantization.method != "mxfp4":
        name = f"{matrix.module}.0.gate_proj"
    scheme = quantization.find_scheme(name)
    is_value = matrix.role in ("head", "embedding") or (
        quantization.method == "mxfp4" and matrix.role != "experts"
    )
    if scheme is None or is_value:
        return StoredMatrix()
    held = scheme.find_format(matrix.shape[-1])
    return _judge(matrix, str(scheme), held)


def _count_bytes(source: WeightSource, modules: set[str]) -> dict[str, int]:
    sizes = dict.fromkeys(modules, 0)
    for name, size_bytes in source.list_sizes().items():
        holder = name
        while holder and holder not in modules:
            holder = holder.rpartition(".")[0]
        if holder:
            sizes[holder] += size_bytes
    return sizes
