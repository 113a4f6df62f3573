"""Destinations of the values of a get: new ``bytes``, the caller's buffers, or ranges of values.

Small values are read one behind the other into scratch memory, and copied from there. Large ones,
which ``BatchRead`` calls direct, are read into their destination.
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
"""Values up to this size are read into scratch memory and copied. Larger ones are read into their
destination.
"""
RESULT_BYTES = 256 * 1024
"""Values of at least this size are read into the ``bytes`` that the get returns, without a copy."""

Direct = Sequence[tuple[int, int, int]]
"""For each direct value: its index, its remote address, and its length in bytes."""
Received = contextlib.AbstractContextManager[list[Piece]]
NOTHING: Received = contextlib.nullcontext([])


class Destination(ABC):
    """The destination of the values of one get. The hosts' endpoints are read one after the other.

    Args:
        keys: the objects' keys.
        direct_bytes: values of at least this size are direct: read to where they belong, without
            scratch memory.
        empty: the result for an empty value.
    """

    takes_remembered = True
    """True if cached locations may be used: an object whose size does not fit is then looked up
    again, since it may have been replaced.
    """

    def __init__(self, keys: Sequence[str], direct_bytes: int, empty: bytes | int) -> None:
        self.keys = keys
        self.batch = BatchRead(keys, direct_bytes)
        self.results: list[Any] = [None] * len(keys)
        """The results by index of the key. An object that could not be read has an error."""
        self.empty = empty

    def refuse(self, index: int, size: int) -> TandemError | None:
        """Return an error if an object of this size does not fit the request; else None."""
        return None

    def is_unread(self, index: int) -> bool:
        """Return True if none of the object's bytes need to be read for this get."""
        return False

    @abstractmethod
    def receive(self, direct: Direct, pool: ScratchPool) -> Received:
        """Lend registered memory for the direct values, which are large and skip the scratch
        memory. The context provides the pieces to read: pairs of a remote and a local range.
        """
        ...

    @abstractmethod
    def check(self, scratch: StoreBuffer) -> None:
        """Verify checksums, and drop from the batch the values that differ. May run in another
        thread.
        """
        ...

    @abstractmethod
    def finish(self, scratch: StoreBuffer, now_s: float, cache: NativeCache) -> None:
        """Set the results of the values that ``check`` did not drop and whose leases, which keep
        their bytes in place, still hold.
        """
        ...


class NewBytes(Destination):
    """A destination that returns values as new ``bytes``."""

    def __init__(self, keys: Sequence[str], pool: ResultPool) -> None:
        super().__init__(keys, RESULT_BYTES, b"")
        self._pool = pool
        self._lent: dict[int, Result] = {}

    def receive(self, direct: Direct, pool: ScratchPool) -> Received:
        """Lend ``bytes`` objects of the result pool for direct values (large ones, which skip the
        scratch memory).
        """
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
        """Verify the checksums of the values in scratch memory and in the lent ``bytes``, and drop
        from the batch those that differ.
        """
        self.batch.check_values(scratch.array, None)
        for index, result in self._lent.items():
            self.batch.check_direct(index, checksum_table(make_table([result.buffer.array])))

    def finish(self, scratch: StoreBuffer, now_s: float, cache: NativeCache) -> None:
        """Set the results: copies out of scratch memory, and the lent ``bytes``."""
        for index in self.batch.finish(self.results, scratch.array, now_s, cache):
            self.results[index] = self._lent[index].value


class OneBuffer(Destination):
    """A destination of values in one registered buffer, each in one part. The results are lengths
    in bytes.
    """

    def __init__(self, keys: Sequence[str], buffer: StoreBuffer, parts: Sequence[Part]) -> None:
        super().__init__(keys, DIRECT_BYTES + 1, 0)
        self._buffer = buffer
        self._offsets = [part.offset for part in parts]
        self._rooms = [part.nbytes for part in parts]
        self.batch.aim(self._offsets, self._rooms, buffer.nbytes)

    def refuse(self, index: int, size: int) -> TandemError | None:
        """Return a ShapeError if the value is larger than its part."""
        return _refuse_room(self.keys[index], size, self._rooms[index])

    def receive(self, direct: Direct, pool: ScratchPool) -> Received:
        """Provide the pieces that read direct values (large ones) straight into their parts of the
        buffer.
        """
        handle, offsets = self._buffer.handle, self._offsets
        return contextlib.nullcontext(
            [(handle, offsets[index], at, length) for index, at, length in direct]
        )

    def check(self, scratch: StoreBuffer) -> None:
        """Verify the checksums of the values in scratch memory and in the buffer, and drop from the
        batch those that differ.
        """
        self.batch.check_values(scratch.array, self._buffer.array)

    def finish(self, scratch: StoreBuffer, now_s: float, cache: NativeCache) -> None:
        """Copy values from scratch memory into the buffer, and set the results."""
        memory = self._buffer.array
        self.batch.finish_into(self.results, scratch.array, memory, now_s, cache)


class SeveralParts(Destination):
    """A destination of values that are each read into any number of parts of any buffers. The
    results are lengths in bytes.
    """

    takes_remembered = False

    def __init__(self, keys: Sequence[str], parts_of: Sequence[Sequence[Part]]) -> None:
        super().__init__(keys, 1, 0)
        self._parts_of = parts_of
        self._rooms = [sum(part.nbytes for part in parts) for parts in parts_of]
        self._views: dict[int, list[npt.NDArray[np.uint8]]] = {}

    def refuse(self, index: int, size: int) -> TandemError | None:
        """Return a ShapeError if the value is larger than its parts."""
        return _refuse_room(self.keys[index], size, self._rooms[index])

    def receive(self, direct: Direct, pool: ScratchPool) -> Received:
        """Provide the pieces that read each value straight into its parts; one that does not fit
        gets an error as its result.
        """
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
        """Verify the checksums of the values in their parts, and drop from the batch those that
        differ.
        """
        for index, views in self._views.items():
            self.batch.check_direct(index, checksum_table(make_table(views)))

    def finish(self, scratch: StoreBuffer, now_s: float, cache: NativeCache) -> None:
        """Set the results to the lengths of the values that were read."""
        for index in self.batch.finish(self.results, scratch.array, now_s, cache):
            if index in self._views:
                self.results[index] = sum(view.size for view in self._views[index])


class _Cut(NamedTuple):
    """Offsets in scratch memory of an object's checksum table, and of the chunks that cover a
    range.
    """

    table_at: int
    num_chunks: int
    """Number of chunks of the whole value."""
    value_at: int
    begin: int
    """Offset of the first of these chunks in the value."""
    num_bytes: int


class Ranges(Destination):
    """A destination that returns ranges of values as ``bytes``.

    Whole chunks and the whole checksum table are read, since a part of either proves nothing.
    """

    takes_remembered = False

    def __init__(self, keys: Sequence[str], ranges: Sequence[tuple[int, int]]) -> None:
        super().__init__(keys, 1, b"")
        self._ranges = ranges
        self._cuts: dict[int, _Cut] = {}
        self._memory = np.empty(0, np.uint8)

    def refuse(self, index: int, size: int) -> TandemError | None:
        """Return a ConfigError if the range leaves the value."""
        offset, length = self._ranges[index]
        if offset + length <= size:
            return None
        return ConfigError(
            "store.get",
            f"range [{offset}, {offset + length}) of {self.keys[index]!r}, which has {size} bytes",
            field="length",
        )

    def is_unread(self, index: int) -> bool:
        """Return True if the object's range is empty, so that nothing is read."""
        return self._ranges[index][1] == 0

    @contextlib.contextmanager
    def receive(self, direct: Direct, pool: ScratchPool) -> Generator[list[Piece]]:
        """Lend scratch memory for each range: for its object's checksum table, and for the chunks
        of the value that cover the range.
        """
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
            # An extent has the checksum table in front of the value, so the table's address is
            # below the value's.
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
        """Verify the chunks that cover each range with the object's table of chunk checksums."""
        for index, cut in self._cuts.items():
            table = self._memory[cut.table_at : cut.table_at + 4 * cut.num_chunks].tobytes()
            chunks = make_table([self._memory[cut.value_at : cut.value_at + cut.num_bytes]])
            first = 4 * (cut.begin // layout.CHUNK_BYTES)
            whole = table[:first] + chunks + table[first + len(chunks) :]
            self.batch.check_direct(index, checksum_table(whole))

    def finish(self, scratch: StoreBuffer, now_s: float, cache: NativeCache) -> None:
        """Set the results: copies of the ranges out of scratch memory."""
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
