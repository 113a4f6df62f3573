"""Running a coroutine on the event loop of another thread."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from tandem.core.errors import PeerLostError

__all__ = ["call_on_loop"]

T = TypeVar("T")


async def call_on_loop(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T], where: str
) -> T:
    """Return the result of ``work``, which runs on ``loop``; from any other loop.

    Args:
        loop: of another thread.
        work: closed if it cannot run.
        where: names the caller in the error.

    Raises: PeerLostError (that loop has ended); what ``work`` raises.
    """
    try:
        future = asyncio.run_coroutine_threadsafe(work, loop)
    except RuntimeError as error:
        work.close()
        raise PeerLostError(where, "the instance is stopping") from error
    return await asyncio.wrap_future(future)
