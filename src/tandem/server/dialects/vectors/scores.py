"""The endpoints POST /v1/score and /v1/rerank, for models with a head of one label."""

from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import numpy as np
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from tandem.core.errors import ConfigError, UnsupportedError
from tandem.core.wire import Pooling
from tandem.server.context import ServedModel, ServerContext
from tandem.server.dialects.vectors.task import (
    PooledPrompt,
    VectorTask,
    answer_vectors,
    count_tokens,
    make_options,
    plan_vectors,
)
from tandem.server.protocol.vectors import (
    Document,
    PoolingRequest,
    RankedDocument,
    RerankReply,
    RerankRequest,
    Score,
    ScoreList,
    ScoreRequest,
)

__all__ = ["answer_rerank", "answer_score"]

_score_decoder = msgspec.json.Decoder(ScoreRequest)
_rerank_decoder = msgspec.json.Decoder(RerankRequest)


async def answer_score(context: ServerContext, http: Request) -> Response:
    """Score pairs of texts."""
    return await answer_vectors(context, http, _score_decoder, _plan_score)


async def answer_rerank(context: ServerContext, http: Request) -> Response:
    """Rank documents by how well they answer a query."""
    return await answer_vectors(context, http, _rerank_decoder, _plan_rerank)


def _plan_score(context: ServerContext, request: ScoreRequest) -> VectorTask:
    firsts = _read_texts(request, "text_1", "queries")
    seconds = _read_texts(request, "text_2", "documents")
    if len(firsts) == 1:
        firsts *= len(seconds)
    if len(firsts) != len(seconds):
        what = f"{len(firsts)} texts and {len(seconds)}: send one, or as many as of the others"
        raise ConfigError("server.score", what, field="text_1")
    created = context.now_unix_s()
    return _plan(context, request, firsts, seconds, "text_2", partial(_make_list, created))


def _read_texts(request: ScoreRequest, *names: str) -> list[str]:
    given = [(name, value) for name in names if (value := getattr(request, name)) is not None]
    if len(given) != 1:
        what = f"send {' or '.join(names)}, one of them"
        raise ConfigError("server.score", what, field=names[0])
    return [given[0][1]] if isinstance(given[0][1], str) else list(given[0][1])


def _plan_rerank(context: ServerContext, request: RerankRequest) -> VectorTask:
    texts = [each if isinstance(each, str) else each.text for each in request.documents]
    make = partial(_make_ranking, request, texts)
    return _plan(context, request, [request.query] * len(texts), texts, "documents", make)


def _plan(
    context: ServerContext,
    request: ScoreRequest | RerankRequest,
    firsts: Sequence[str],
    seconds: Sequence[str],
    field: str,
    make: Callable[[str, ServedModel, Sequence[float], Sequence[PooledPrompt]], msgspec.Struct],
) -> VectorTask:
    model = context.find_model(request.model)
    info = context.ready_info()
    if info.num_labels != 1:
        what = (
            f"the model has a head of {info.num_labels} labels, scores need one of 1"
            if info.num_labels
            else "the model has no head that classifies, so it gives no scores: serve a reranker "
            "(sequence classification with one label)"
        )
        raise UnsupportedError("server.score", what, field="model")
    tokenizer = context.encoder.tokenizer
    pairs = [tokenizer.encode_pair(*pair) for pair in zip(firsts, seconds, strict=True)]
    options = make_options(
        model, "score", request.timeout, name=request.request_id, priority=request.priority
    )
    return VectorTask(
        plan_vectors(context, pairs, Pooling.SCORE, field),
        options,
        model,
        lambda pooled, _: make(options.name, model, _activate(request, pooled), pooled),
    )


def _activate(request: PoolingRequest, pooled: Sequence[PooledPrompt]) -> list[float]:
    logits = np.array([each.vector[0] for each in pooled], np.float64)
    if getattr(request, "use_activation", None) is False:
        return logits.tolist()
    return (1 / (1 + np.exp(-logits))).tolist()


def _make_list(
    created: int,
    name: str,
    model: ServedModel,
    scores: Sequence[float],
    pooled: Sequence[PooledPrompt],
) -> ScoreList:
    return ScoreList(
        id=name,
        created=created,
        model=model.name,
        data=[Score(index=i, score=score) for i, score in enumerate(scores)],
        usage=count_tokens(pooled),
    )


def _make_ranking(
    request: RerankRequest,
    texts: Sequence[str],
    name: str,
    model: ServedModel,
    scores: Sequence[float],
    pooled: Sequence[PooledPrompt],
) -> RerankReply:
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    is_told = request.return_documents is not False
    return RerankReply(
        id=name,
        model=model.name,
        results=[
            RankedDocument(
                index=i,
                relevance_score=scores[i],
                document=Document(texts[i]) if is_told else UNSET,
            )
            for i in order[: request.top_n or None]
        ],
        usage=count_tokens(pooled),
    )
