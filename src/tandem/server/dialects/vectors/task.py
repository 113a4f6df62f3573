"""The steps that requests for vectors have in common.

A request is decoded, planned on the threads, and computed in groups of limited size, because it may
have thousands of texts and the engine's queue serves all clients.
"""

from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from tandem.core.errors import CancelledError, ConfigError
from tandem.core.logs import current_request_id
from tandem.core.wire import Pooling, SamplingParams
from tandem.server.context import (
    ChoicePlan,
    RequestOptions,
    ServedModel,
    ServerContext,
    TextOptions,
)
from tandem.server.dialects.options import check_ids
from tandem.server.edge.connection import limit_time, run_while_connected
from tandem.server.edge.http_errors import WriteError, encode_error
from tandem.server.generation import GenerationGroup
from tandem.server.protocol.vectors import VectorUsage

__all__ = [
    "PooledPrompt",
    "VectorTask",
    "answer_vectors",
    "count_tokens",
    "make_options",
    "plan_vectors",
]

_encode = msgspec.json.Encoder().encode
_GROUP = 64
"""Largest number of prompts of one request that are submitted to the engine at a time."""
_MAX_PROMPTS = 2048
"""Largest number of prompts of one request, as at OpenAI."""
_NUMBER_BYTES = 12
"""Estimated bytes of a number of a vector in an answer."""


class VectorBody(Protocol):
    """The fields of a body that are needed before its ``VectorTask`` is made."""

    timeout: float | None


R = TypeVar("R", bound=VectorBody)


@dataclass(frozen=True, slots=True)
class PooledPrompt:
    """The vector that the model made of a prompt."""

    vector: NDArray[np.float32]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class VectorTask:
    """The prompts of a request for vectors, with the form of its answer."""

    plans: list[ChoicePlan]
    options: RequestOptions
    model: ServedModel
    make_document: Callable[[Sequence[PooledPrompt], float], object]
    """Function that makes the answer from the prompts' vectors and the seconds that they took."""


async def answer_vectors(
    context: ServerContext,
    http: Request,
    decoder: msgspec.json.Decoder[R],
    plan: Callable[[ServerContext, R], VectorTask],
    write_error: WriteError = encode_error,
) -> Response:
    """Answer a request for vectors.

    Args:
        context: context of the server.
        http: the request.
        decoder: decoder of the body.
        plan: checks the body and returns its task; it blocks and runs on the threads.
        write_error: encodes an error with its status as an answer.
    """
    http.state.write_error = write_error
    origin = context.note_arrival(http)
    request = await context.read_request(http, decoder)
    task = await context.prepare(http, origin, request.timeout, plan, context, request)
    pooled: list[PooledPrompt] = []
    for first in range(0, len(task.plans), _GROUP):
        plans = task.plans[first : first + _GROUP]
        group = await context.start(plans, task.options, origin, http.receive)
        try:
            pooled += await run_while_connected(http.receive, _collect(group))
        finally:
            await group.close()
    took_s = context.clock.now_s() - origin.arrived_s
    size = sum(_NUMBER_BYTES * len(each.vector) for each in pooled)
    document = await context.shape(size, lambda: _encode(task.make_document(pooled, took_s)))
    return Response(document, media_type="application/json")


async def _collect(group: GenerationGroup) -> list[PooledPrompt]:
    async with limit_time(group.time_limit_s), aclosing(group.pieces()) as pieces:
        async for _ in pieces:
            pass
    found: list[PooledPrompt] = []
    for generation in group.generations:
        if generation.pooled is None:
            raise CancelledError("server.vectors", "the request was aborted")
        vector = np.frombuffer(generation.pooled, "<f4")
        found.append(PooledPrompt(vector, generation.prompt_len))
    return found


def plan_vectors(
    context: ServerContext, prompts: Sequence[list[int]], pooling: Pooling, field: str
) -> list[ChoicePlan]:
    """Return the plans for the prompts of a request; errors name a prompt's index in a list.

    Raises:
        ConfigError: no prompt or too many, or one without a token or beyond the context.
    """
    info = context.ready_info()
    if not 1 <= len(prompts) <= _MAX_PROMPTS:
        what = f"{field} has {len(prompts)} entries: send 1 to {_MAX_PROMPTS}"
        raise ConfigError("server.plan_vectors", what, field=field)
    for index, prompt in enumerate(prompts):
        place = f"{field}[{index}]" if len(prompts) > 1 else field
        if not 1 <= len(prompt) <= info.max_model_len:
            what = f"{place} has {len(prompt)} tokens: send 1 to {info.max_model_len}"
            raise ConfigError("server.plan_vectors", what, field=place)
        check_ids(prompt, info.vocab_size, place)
    sampling = SamplingParams(max_tokens=0, pooling=pooling)
    return [ChoicePlan(prompt, sampling, TextOptions()) for prompt in prompts]


def make_options(
    model: ServedModel,
    prefix: str,
    timeout_s: float | None,
    *,
    name: str | None = None,
    priority: int | None = None,
) -> RequestOptions:
    """Return the options of a request as a whole; ``prefix`` begins the id if the server makes
    one.
    """
    return RequestOptions(
        name=name if name is not None else f"{prefix}-{current_request_id.get()}",
        model=model,
        priority=priority if priority is not None else 0,
        timeout_s=timeout_s,
    )


def count_tokens(pooled: Sequence[PooledPrompt]) -> VectorUsage:
    """Return the number of tokens of all prompts, as usage."""
    count = sum(each.num_tokens for each in pooled)
    return VectorUsage(count, count)
