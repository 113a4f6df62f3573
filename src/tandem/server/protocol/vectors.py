"""Requests and responses of embeddings, scores and rankings. Field names are the wire names."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tandem.server.protocol import fields

__all__ = [
    "Document",
    "EmbedReply",
    "EmbedRequest",
    "Embedding",
    "EmbeddingList",
    "EmbeddingRequest",
    "PoolingRequest",
    "RankedDocument",
    "RerankReply",
    "RerankRequest",
    "Score",
    "ScoreList",
    "ScoreRequest",
    "VectorUsage",
]

_Dimensions = Annotated[int, Meta(ge=1, le=fields.MAX_COUNT)]
_Texts = str | Annotated[list[str], Meta(min_length=1, max_length=2**16)]


class PoolingRequest(msgspec.Struct, kw_only=True):
    """The fields that requests for vectors have in common."""

    model: fields.Name | None = None
    priority: fields.Priority | None = None
    request_id: fields.Name | None = None
    timeout: fields.Timeout | None = None
    """Seconds."""


class EmbeddingRequest(PoolingRequest, kw_only=True):
    """POST /v1/embeddings."""

    input: str | list[Any]
    """A text, token ids, or a list of either; lists are checked by ``prompts.read_prompts``."""
    encoding_format: Literal["float", "base64"] | None = None
    """base64 is of little-endian float32."""
    dimensions: _Dimensions | None = None
    """The first so many numbers, normalised again."""
    user: str | None = None
    add_special_tokens: bool | None = None
    pooling: Literal["last", "mean"] | None = None
    """An extension; unset: as the checkpoint says, the last token if it says nothing."""
    normalize: bool | None = None
    """An extension; unset is true."""


class VectorUsage(msgspec.Struct):
    """Tokens of a request."""

    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct, kw_only=True):
    """One vector."""

    object: str = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingList(msgspec.Struct, kw_only=True):
    """The response of embeddings."""

    object: str = "list"
    data: list[Embedding]
    model: str
    usage: VectorUsage


class EmbedRequest(msgspec.Struct, kw_only=True):
    """POST /api/embed, Ollama's."""

    input: _Texts
    model: fields.Name | None = None
    truncate: bool | None = None
    """Unset is true: what is beyond the context is left out."""
    dimensions: _Dimensions | None = None
    options: dict[str, Any] | None = None
    keep_alive: int | float | str | None = None
    timeout: fields.Timeout | None = None


class EmbedReply(msgspec.Struct, kw_only=True):
    """The answer of embed; durations are in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int = 0
    prompt_eval_count: int


class ScoreRequest(PoolingRequest, kw_only=True):
    """POST /v1/score: of each pair, or of one text with each of the others."""

    text_1: _Texts | None = None
    text_2: _Texts | None = None
    queries: _Texts | None = None
    """vLLM's newer name of ``text_1``."""
    documents: _Texts | None = None
    """vLLM's newer name of ``text_2``."""
    use_activation: bool | None = None
    """False gives logits; unset is true, the sigmoid."""


class Score(msgspec.Struct, kw_only=True):
    """The score of one pair."""

    index: int
    object: str = "score"
    score: float


class ScoreList(msgspec.Struct, kw_only=True):
    """The response of score."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Score]
    usage: VectorUsage


class Document(msgspec.Struct):
    """A document of a ranking."""

    text: str


class RerankRequest(PoolingRequest, kw_only=True):
    """POST /v1/rerank, in the form of Jina and Cohere."""

    query: str
    documents: Annotated[list[str | Document], Meta(min_length=1, max_length=2**16)]
    top_n: fields.Count | None = None
    """0 and unset are all."""
    return_documents: bool | None = None
    """Unset is true."""
    use_activation: bool | None = None


class RankedDocument(msgspec.Struct, kw_only=True):
    """A document and how well it answers the query."""

    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET


class RerankReply(msgspec.Struct, kw_only=True):
    """The response of rerank: the best first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: VectorUsage
