"""A file that records which experts each token chose in each layer. It has expert ids and no text.

Layout in docs/design/models/expert_trace.md. The writer appends whole records. At its size limit or
at the first error it stops for good, and serving goes on without a trace. One thread writes.
"""

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from tandem.core.errors import CorruptionError, NotFoundError
from tandem.engine.bounded_file import BoundedFile

__all__ = [
    "MAX_TRACE_BYTES",
    "TraceHeader",
    "TraceRecord",
    "TraceWriter",
    "open_trace",
    "read_decodes",
]


FORMAT_NAME = "tandem-expert-trace"
MAX_TRACE_BYTES = 1 << 30
"""Largest size of a trace. Qwen3-30B-A3B writes about a megabyte per thousand decoded tokens, so a
gibibyte is more than a replay needs."""
MAX_HEADER_BYTES = 1 << 16
MAX_RECORD_TOKENS = 1 << 20
LENGTH = struct.Struct("<I")
Size = Annotated[int, Meta(ge=1, le=65_535)]


class TraceHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first line of a trace of expert choices: the model's layers with experts, and their
    sizes.
    """

    format: Literal["tandem-expert-trace"] = FORMAT_NAME
    version: Literal[1] = 1
    model: str
    layers: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1, max_length=4096)]
    """Indexes of the layers that have experts."""
    num_experts: Size
    top_k: Size


class TraceRecord(msgspec.Struct, frozen=True):
    """The experts that the tokens of one step chose; one line of a trace."""

    is_output: NDArray[np.bool_]
    """[T]: True for an output token, False for a token of a prompt."""
    choices: NDArray[np.uint16]
    """[M, T, K]: expert ids by layer, token and rank in the router's choice."""


class TraceWriter:
    """The writer of a new trace file.

    Args:
        path: file to create. An existing file is not overwritten: ``path.1`` and so on is used.
        header: the model's layers and sizes.
        max_bytes: largest size of the file; later steps are not written.

    Raises: ConfigError (the file cannot be made).
    """

    def __init__(
        self, path: Path, header: TraceHeader, *, max_bytes: int = MAX_TRACE_BYTES
    ) -> None:
        # Only the owner may read the file: the experts chosen reveal something of the text.
        self._file = BoundedFile(path, max_bytes, name="expert_trace", field="engine.expert_trace")
        self.path = self._file.path
        self._file.write(msgspec.json.encode(header) + b"\n")

    def write(self, choices: NDArray[np.int64], is_output: NDArray[np.bool_]) -> None:
        """Append the choices of a step; do nothing if the file is full or has failed.

        Args:
            choices: expert ids, [M, T, K].
            is_output: True for output tokens, [T].
        """
        if self._file.is_open:
            head = LENGTH.pack(len(is_output)) + is_output.tobytes()
            self._file.write(head + choices.astype("<u2").tobytes())

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()


def open_trace(path: Path) -> tuple[TraceHeader, Iterator[TraceRecord]]:
    """Return a trace's header and its records, read one by one.

    A record that is cut off is taken as the end of the trace, because its writer was killed.

    Raises: NotFoundError (the file cannot be opened); CorruptionError (it is not such a trace; also
        while records are read).
    """
    try:
        with path.open("rb") as file:
            line = file.readline(MAX_HEADER_BYTES)
    except OSError as error:
        raise NotFoundError("engine.read_trace", f"{path}: {error.strerror}") from error
    try:
        header = msgspec.json.decode(line, type=TraceHeader)
    except msgspec.DecodeError as error:
        what = f"{path} does not begin as a trace of experts: {error}"
        raise CorruptionError("engine.read_trace", what) from error
    return header, _read_records(path, header, len(line))


def _read_records(path: Path, header: TraceHeader, offset: int) -> Iterator[TraceRecord]:
    num_layers, top_k = len(header.layers), header.top_k
    with path.open("rb") as file:
        file.seek(offset)
        while len(head := file.read(LENGTH.size)) == LENGTH.size:
            (num_tokens,) = LENGTH.unpack(head)
            if not 0 < num_tokens <= MAX_RECORD_TOKENS:
                what = f"{path}: a step of {num_tokens} tokens"
                raise CorruptionError("engine.read_trace", what)
            size = num_tokens * (1 + 2 * num_layers * top_k)
            body = file.read(size)
            if len(body) < size:
                return
            kinds = np.frombuffer(body, np.uint8, num_tokens)
            ids = np.frombuffer(body, "<u2", offset=num_tokens)
            if kinds.max() > 1 or ids.max() >= header.num_experts:
                what = f"{path}: an expert or kind of token that the header does not know"
                raise CorruptionError("engine.read_trace", what)
            yield TraceRecord(kinds.astype(np.bool_), ids.reshape(num_layers, num_tokens, top_k))


def read_decodes(records: Iterable[TraceRecord], num_layers: int) -> list[list[list[int]]]:
    """Return, by layer and step, the distinct experts that output tokens chose, in order of id.

    Tokens of prompts are left out, because they choose most experts and do not use a cache of
    experts. Steps without output tokens are left out.
    """
    layers: list[list[list[int]]] = [[] for _ in range(num_layers)]
    for record in records:
        if record.is_output.any():
            for layer, ids in zip(layers, record.choices[:, record.is_output], strict=True):
                layer.append(np.unique(ids).tolist())
    return layers
