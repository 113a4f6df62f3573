"""Builds GGUF files byte by byte, true ones and such as no writer would make."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

F32, F16, Q8_0 = 0, 1, 8
UINT32, STRING, ARRAY = 4, 8, 9


def pack_text(text: bytes | str) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def pack_value(value: Any) -> bytes:
    """A number as uint32, a text as a string, bytes as they are."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, int):
        return struct.pack("<II", UINT32, value)
    return struct.pack("<I", STRING) + pack_text(value)


@dataclass
class Tensor:
    """A tensor's description and bytes; ``offset`` None is where the one before it ends."""

    name: str
    shape: Sequence[int] = (4, 8)
    """Inputs last, as everywhere here."""
    kind: int = F32
    data: bytes = bytes(128)
    offset: int | None = None


@dataclass
class Gguf:
    """A file in parts, each of which can be made wrong."""

    metadata: Sequence[tuple[str, Any]] = (("general.architecture", "llama"),)
    tensors: Sequence[Tensor] = field(default_factory=lambda: [Tensor("a"), Tensor("b")])
    magic: bytes = b"GGUF"
    version: int = 3
    alignment: int = 32
    num_tensors: int | None = None
    num_pairs: int | None = None
    tail: bytes = b""

    def change(self, **changes: Any) -> "Gguf":
        return replace(self, **changes)

    def build(self) -> bytes:
        def count(stated: int | None, actual: Sequence[Any]) -> int:
            return len(actual) if stated is None else stated

        out = self.magic + struct.pack("<I", self.version)
        out += struct.pack("<Q", count(self.num_tensors, self.tensors))
        out += struct.pack("<Q", count(self.num_pairs, self.metadata))
        for key, value in self.metadata:
            out += pack_text(key) + pack_value(value)
        position, bodies = 0, b""
        for tensor in self.tensors:
            offset = position if tensor.offset is None else tensor.offset
            sizes = list(reversed(tensor.shape))
            out += pack_text(tensor.name) + struct.pack("<I", len(sizes))
            out += struct.pack(f"<{len(sizes)}Q", *sizes)
            out += struct.pack("<IQ", tensor.kind, offset)
            bodies += tensor.data + bytes(-len(tensor.data) % self.alignment)
            position = len(bodies)
        return out + bytes(-len(out) % self.alignment) + bodies + self.tail

    def write(self, path: Path) -> Path:
        path.write_bytes(self.build())
        return path
