"""The endpoints POST /v1/embeddings and Ollama's /api/embed and /api/embeddings."""

import base64
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from tandem.core.errors import ConfigError
from tandem.core.wire import Pooling
from tandem.server.api.prompts import read_prompts
from tandem.server.context import ChoicePlan, ServedModel, ServerContext
from tandem.server.dialects.ollama import find_ollama_model, write_ollama_error
from tandem.server.dialects.vectors.task import (
    PooledPrompt,
    VectorTask,
    answer_vectors,
    count_tokens,
    make_options,
    plan_vectors,
)
from tandem.server.protocol.vectors import (
    Embedding,
    EmbeddingList,
    EmbeddingRequest,
    EmbedReply,
    EmbedRequest,
    OldEmbedReply,
    OldEmbedRequest,
)

__all__ = ["answer_embed", "answer_embeddings", "answer_old_embed", "read_pooling"]

_decoder = msgspec.json.Decoder(EmbeddingRequest)
_embed_decoder = msgspec.json.Decoder(EmbedRequest)
_old_decoder = msgspec.json.Decoder(OldEmbedRequest)
_NS = 1_000_000_000


async def answer_embeddings(context: ServerContext, http: Request) -> Response:
    """Return the embeddings of texts."""
    return await answer_vectors(context, http, _decoder, _plan)


async def answer_embed(context: ServerContext, http: Request) -> Response:
    """Return the embeddings of texts in Ollama's form."""
    return await answer_vectors(context, http, _embed_decoder, _plan_embed, write_ollama_error)


async def answer_old_embed(context: ServerContext, http: Request) -> Response:
    """Return the embedding of a text in the form of Ollama's older endpoint."""
    return await answer_vectors(context, http, _old_decoder, _plan_old, write_ollama_error)


def read_pooling(folder: Path | None) -> Pooling:
    """Return the pooling that a sentence-transformers checkpoint configures; by default the last
    token's.

    Raises:
        ConfigError: its file is not JSON.
    """
    path = None if folder is None else folder / "1_Pooling" / "config.json"
    if path is None or not path.exists():
        return Pooling.LAST
    try:
        stated = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("server.read_pooling", f"{path}: {error}") from error
    is_mean = isinstance(stated, dict) and stated.get("pooling_mode_mean_tokens") is True
    return Pooling.MEAN if is_mean else Pooling.LAST


def _plan(context: ServerContext, request: EmbeddingRequest) -> VectorTask:
    model = context.find_model(request.model)
    info = context.ready_info()
    prompts, _ = read_prompts(request.input, info.vocab_size, "input")
    ids = context.encoder.encode(
        prompts,
        add_special_tokens=request.add_special_tokens is not False,
        max_model_len=info.max_model_len,
        field="input",
    )
    pooling = context.pooling if request.pooling is None else Pooling(request.pooling)
    _check_dimensions(request.dimensions, info.hidden_size)
    return VectorTask(
        plan_vectors(context, ids, pooling, "input"),
        make_options(
            model, "embd", request.timeout, name=request.request_id, priority=request.priority
        ),
        model,
        partial(_make_list, request, model),
    )


def _make_list(
    request: EmbeddingRequest, model: ServedModel, pooled: Sequence[PooledPrompt], _: float
) -> EmbeddingList:
    data: list[Embedding] = []
    for index, each in enumerate(pooled):
        vector = each.vector[: request.dimensions]
        if request.normalize is not False:
            vector = _normalize(vector)
        if request.encoding_format == "base64":
            told: str | list[float] = base64.b64encode(vector.astype("<f4").tobytes()).decode()
        else:
            told = vector.tolist()
        data.append(Embedding(index=index, embedding=told))
    return EmbeddingList(data=data, model=model.name, usage=count_tokens(pooled))


def _plan_embed(context: ServerContext, request: EmbedRequest) -> VectorTask:
    model = find_ollama_model(context, request.model)
    info = context.ready_info()
    texts = [request.input] if isinstance(request.input, str) else request.input
    limit = None if request.truncate is not False else info.max_model_len
    ids = context.encoder.encode(texts, add_special_tokens=True, max_model_len=limit, field="input")
    if request.truncate is not False:
        ids = [each[: info.max_model_len] for each in ids]
    _check_dimensions(request.dimensions, info.hidden_size)
    return VectorTask(
        plan_vectors(context, ids, context.pooling, "input"),
        make_options(model, "ollama", request.timeout),
        model,
        partial(_make_embed_reply, request, model),
    )


def _make_embed_reply(
    request: EmbedRequest, model: ServedModel, pooled: Sequence[PooledPrompt], took_s: float
) -> EmbedReply:
    return EmbedReply(
        model=model.name,
        embeddings=[_normalize(each.vector[: request.dimensions]).tolist() for each in pooled],
        total_duration=round(took_s * _NS),
        prompt_eval_count=count_tokens(pooled).prompt_tokens,
    )


def _plan_old(context: ServerContext, request: OldEmbedRequest) -> VectorTask:
    model = find_ollama_model(context, request.model)
    max_len = context.ready_info().max_model_len
    plans: list[ChoicePlan] = []
    if request.prompt:
        ids = context.encoder.encode(
            [request.prompt], add_special_tokens=True, max_model_len=None, field="prompt"
        )
        prompts = [each[:max_len] for each in ids]
        plans = plan_vectors(context, prompts, context.pooling, "prompt")
    return VectorTask(
        plans,
        make_options(model, "ollama", request.timeout),
        model,
        lambda pooled, _: OldEmbedReply(
            embedding=[x for each in pooled for x in each.vector.tolist()]
        ),
    )


def _check_dimensions(asked: int | None, hidden_size: int) -> None:
    if asked is not None and asked > hidden_size:
        what = f"dimensions is {asked}, the model's vectors have {hidden_size}"
        raise ConfigError("server.embeddings", what, field="dimensions")


def _normalize(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    exact = vector.astype(np.float64)
    length = np.sqrt((exact * exact).sum())
    # A zero vector has no direction and cannot be scaled to length 1: it is returned unchanged.
    return (exact / length if length else exact).astype(np.float32)
