"""Destinations of the values of a get: new ``bytes``, memory of the caller, or ranges cut out.

Small values are read side by side into scratch memory, and copied from there; those that
``BatchRead`` calls direct are read to where they shall be.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tandem._native import BatchRead
from tandem._native import LocationCache as NativeCache
from tandem.core.errors import ConfigError, ShapeError, TandemError
from tandem.store.client.buffers import Part, Result, ResultPool, ScratchPool, StoreBuffer
from tandem.store.formats import layout
from tandem.store.formats.checksum import checksum_table, make_table
from tandem.store.interfaces import Piece

__all__ = ["RESULT_BYTES", "Destination", "NewBytes", "OneBuffer", "Ranges", "SeveralParts"]

DIRECT_BYTES = 32 * 1024
"""Larger values are read to where they shall be; smaller ones side by side, and copied."""
RESULT_BYTES = 256 * 1024
"""Values of this size or more are received where they are given out, without a copy."""

Direct = Sequence[tuple[int, int, int]]
"""For each direct value its index, its address there, and its bytes."""
Received = contextlib.AbstractContextManager[list[Piece]]
NOTHING: Received = contextlib.nullcontext([])


class Destination(ABC):
    """The destination of the values of one get; one endpoint after the other is read from.

    Args:
        keys: of the objects.
        direct_bytes: values of this size or more are direct.
        empty: the result of a value without bytes.
    """

    takes_remembered = True
    """True if places that are remembered may be read from: a size that does not fit is then asked
    for, since the object may have another one by now."""

    def __init__(self, keys: Sequence[str], direct_bytes: int, empty: bytes | int) -> None:
        self.keys = keys
        self.batch = BatchRead(keys, direct_bytes)
        self.results: list[Any] = [None] * len(keys)
        """By key; an error is the result of what could not be read."""
        self.empty = empty

    def refuse(self, index: int, size: int) -> TandemError | None:
        """Return what is wrong with an object of this size."""
        return None

    def is_unread(self, index: int) -> bool:
        """Return True if none of its bytes is asked for."""
        return False

    @abstractmethod
    def receive(self, direct: Direct, pool: ScratchPool) -> Received:
        """Lend registered memory for direct values; inside, what to read of them."""
        ...

    @abstractmethod
    def check(self, scratch: StoreBuffer) -> None:
        """Drop, in the batch, what differs from its checksum. May run in another thread."""
        ...

    @abstractmethod
    def finish(self, scratch: StoreBuffer, now_s: float, cache: NativeCache) -> None:
        """Set the results of what was not dropped, and whose lease holds."""
        ...


class NewBytes(Destination):
    """Values that are given out as ``bytes``."""

    def __init__(self, keys: Sequence[str], pool: ResultPool) -> None:
        super().__init__(keys, RESULT_BYTES, b"")
        self._pool = pool
        self._lent: dict[int, Result] = {}

    def receive(self, direct: Direct, pool: ScratchPool) -> Received:
        """See ``Destination``."""
        self._lent = {}
        return self._lend(direct) if direct else NOTHING

    @contextlib.contextmanager
    def _lend(self, direct: Direct) -> Generator[list[Piece]]:
        with self._pool.lend([length for _, _, length in direct]) as results:
            pieces: list[Piece] = []
            for result, (index, at, length) in zip(results, direct, strict=True):
                self._lent[index] = result
                pieces.append((result.buffer.handle, 0, at, length))
            yield pieces

    def check(self, scratch: StoreBuffer) -> None:
        """See ``Destination``."""
        self.batch.check_values(scratch.array, None)
        for index, result in self._lent.items():
            self.batch.check_direct(index, checksum_table(make_table([result.buffer.array])))

    def finish(self, scratch: StoreBuffer, now_s: float, cache: NativeCache) -> None:
        """See ``Destination``."""
        for index in self.batch.finish(self.results, scratch.array, now_s, cache):
            self.results[index] = self._lent[index].value


class OneBuffer(Destination):
    """Values that are read into one registered buffer, each into one part; results are bytes."""

    def __init__(self, keys: Sequence[str], buffer: StoreBuffer, parts: Sequence[Part]) -> None:
        super().__init__(keys, DIRECT_BYTES + 1, 0)
        self._buffer = buffer
        self._offsets = [part.offset for part in parts]
        self._rooms = [part.nbytes for part in parts]
        self.batch.aim(self._offsets, self._rooms, buffer.nbytes)

    def refuse(self, index: int, size: int) -> TandemError | None:
        """See ``Destination``."""
        return _refuse_room(self.keys[index], size, self._rooms[index])

    def receive(self, direct: Direct, pool: ScratchPool) -> Received:
        """See ``Destination``."""
        handle, offsets = self._buffer.handle, self._offsets
        return contextlib.nullcontext(
            [(handle, offsets[index], at, length) for index, at, length in direct]
        )

    def check(self, scratch: StoreBuffer) -> None:
        """See ``Destination``."""
        self.batch.check_values(scratch.array, self._buffer.array)

    def finish(self, scratch: StoreBuffer, now_s: float, cache: NativeCache) -> None:
        """See ``Destination``."""
        memory = self._buffer.array
        self.batch.finish_into(self.results, scratch.array, memory, now_s, cache)


class SeveralParts(Destination):
    """Values that are each read into any number of parts of any buffers; results are bytes."""

    takes_remembered = False

    def __init__(self, keys: Sequence[str], parts_of: Sequence[Sequence[Part]]) -> None:
        super().__init__(keys, 1, 0)
        self._parts_of = parts_of
        self._rooms = [sum(part.nbytes for part in parts) for parts in parts_of]
        self._views: dict[int, list[npt.NDArray[np.uint8]]] = {}

    def refuse(self, index: int, size: int) -> TandemError | None:
        """See ``Destination``."""
        return _refuse_room(self.keys[index], size, self._rooms[index])

    def receive(self, direct: Direct, pool: ScratchPool) -> Received:
        """See ``Destination``."""
        self._views = {}
        pieces: list[Piece] = []
        for index, at, size in direct:
            self.results[index] = self.refuse(index, size)
            if self.results[index] is None:
                pieces += self._list_pieces(index, at, size)
        return contextlib.nullcontext(pieces)

    def _list_pieces(self, index: int, at: int, size: int) -> list[Piece]:
        pieces: list[Piece] = []
        views = self._views[index] = []
        for part in self._parts_of[index]:
            length = min(size, part.nbytes)
            if length:
                pieces.append((part.buffer.handle, part.offset, at, length))
                views.append(part.view[:length])
            at += length
            size -= length
        return pieces

    def check(self, scratch: StoreBuffer) -> None:
        """See ``Destination``."""
        for index, views in self._views.items():
            self.batch.check_direct(index, checksum_table(make_table(views)))

    def finish(self, scratch: StoreBuffer, now_s: float, cache: NativeCache) -> None:
        """See ``Destination``."""
        for index in self.batch.finish(self.results, scratch.array, now_s, cache):
            if index in self._views:
                self.results[index] = sum(view.size for view in self._views[index])


class _Cut(NamedTuple):
    """The place of an object's table, and of the chunks that have a range, in the memory lent."""

    table_at: int
    num_chunks: int
    """Number of chunks of the whole value."""
    value_at: int
    begin: int
    """First of the chunks, in the value."""
    num_bytes: int


class Ranges(Destination):
    """Ranges of values, which are given out as ``bytes``.

    Whole chunks are read, and the whole table, or nothing of it is proven.
    """

    takes_remembered = False

    def __init__(self, keys: Sequence[str], ranges: Sequence[tuple[int, int]]) -> None:
        super().__init__(keys, 1, b"")
        self._ranges = ranges
        self._cuts: dict[int, _Cut] = {}
        self._memory = np.empty(0, np.uint8)

    def refuse(self, index: int, size: int) -> TandemError | None:
        """See ``Destination``."""
        offset, length = self._ranges[index]
        if offset + length <= size:
            return None
        return ConfigError(
            "store.get",
            f"range [{offset}, {offset + length}) of {self.keys[index]!r}, which has {size} bytes",
            field="length",
        )

    def is_unread(self, index: int) -> bool:
        """See ``Destination``."""
        return self._ranges[index][1] == 0

    @contextlib.contextmanager
    def receive(self, direct: Direct, pool: ScratchPool) -> Generator[list[Piece]]:
        """See ``Destination``."""
        self._cuts = {}
        wanted: list[tuple[int, int]] = []
        memory_bytes = 0
        for index, at, size in direct:
            if (error := self.refuse(index, size)) is not None or self.is_unread(index):
                self.results[index] = self.empty if error is None else error
                continue
            offset, length = self._ranges[index]
            begin = offset // layout.CHUNK_BYTES * layout.CHUNK_BYTES
            end = min(size, layout.count_chunks(offset + length) * layout.CHUNK_BYTES)
            table_bytes = layout.table_bytes(size)
            cut = _Cut(
                memory_bytes,
                layout.count_chunks(size),
                memory_bytes + table_bytes,
                begin,
                end - begin,
            )
            self._cuts[index] = cut
            # The table lies in front of the value.
            wanted += [(at - table_bytes, table_bytes), (at + begin, cut.num_bytes)]
            memory_bytes = cut.value_at + cut.num_bytes
        with pool.lend(memory_bytes) as memory:
            self._memory = memory.array
            pieces: list[Piece] = []
            local = 0
            for remote, length in wanted:
                pieces.append((memory.handle, local, remote, length))
                local += length
            yield pieces

    def check(self, scratch: StoreBuffer) -> None:
        """See ``Destination``."""
        for index, cut in self._cuts.items():
            table = self._memory[cut.table_at : cut.table_at + 4 * cut.num_chunks].tobytes()
            chunks = make_table([self._memory[cut.value_at : cut.value_at + cut.num_bytes]])
            first = 4 * (cut.begin // layout.CHUNK_BYTES)
            whole = table[:first] + chunks + table[first + len(chunks) :]
            self.batch.check_direct(index, checksum_table(whole))

    def finish(self, scratch: StoreBuffer, now_s: float, cache: NativeCache) -> None:
        """See ``Destination``."""
        for index in self.batch.finish(self.results, scratch.array, now_s, cache):
            cut = self._cuts.get(index)
            if cut is not None:
                offset, length = self._ranges[index]
                at = cut.value_at + offset - cut.begin
                self.results[index] = self._memory[at : at + length].tobytes()


def _refuse_room(key: str, size: int, room: int) -> TandemError | None:
    if size <= room:
        return None
    return ShapeError("store.get", f"{key!r} has {size} bytes, the parts hold {room}")
