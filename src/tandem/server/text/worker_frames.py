"""The child's side of ``bounded_process``: frames, errors and the limit of memory."""

import resource
from collections.abc import Callable
from typing import BinaryIO

import msgspec

__all__ = ["answer", "limit_memory", "read_frame", "write_answer"]


def limit_memory(num_bytes: int) -> None:
    """Limit the address space of this process."""
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))


def read_frame(source: BinaryIO) -> bytes | None:
    """Read one frame (4-byte length, content) from the stream; None at its end."""
    header = source.read(4)
    if len(header) < 4:
        return None
    return source.read(int.from_bytes(header, "big"))


def write_answer(target: BinaryIO, reply: tuple[bool, str]) -> None:
    """Write one answer as a frame to the stream."""
    payload = msgspec.msgpack.encode(reply)
    target.write(len(payload).to_bytes(4, "big") + payload)
    target.flush()


def answer(work: Callable[[], str]) -> tuple[bool, str]:
    """Run ``work``; return (True, its text), or (False, the text of its error)."""
    try:
        return True, work()
    except MemoryError:
        return False, "out of memory"
    except ValueError as error:
        # Its text alone says what is wrong with a client's input.
        return False, str(error)[:2000]
    except Exception as error:  # noqa: BLE001 - the error text is returned.
        return False, f"{type(error).__name__}: {error}"[:2000]
