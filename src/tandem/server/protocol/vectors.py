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
    "OldEmbedReply",
    "OldEmbedRequest",
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
    """The common fields of requests for vectors."""

    model: fields.Name | None = None
    priority: fields.Priority | None = None
    request_id: fields.Name | None = None
    timeout: fields.Timeout | None = None
    """Time limit in seconds."""


class EmbeddingRequest(PoolingRequest, kw_only=True):
    """The body of POST /v1/embeddings."""

    input: str | list[Any]
    """A text, token ids, or a list of either; ``prompts.read_prompts`` checks lists."""
    encoding_format: Literal["float", "base64"] | None = None
    """Encoding of the vector; base64 is over little-endian float32."""
    dimensions: _Dimensions | None = None
    """Number of leading elements to return, normalised again."""
    user: str | None = None
    add_special_tokens: bool | None = None
    pooling: Literal["last", "mean"] | None = None
    """Kind of pooling, an extension; unset: the checkpoint's, or else the last token's."""
    normalize: bool | None = None
    """True, or unset, to scale vectors to length 1; an extension."""


class VectorUsage(msgspec.Struct):
    """Numbers of tokens of a request."""

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
    """The body of Ollama's POST /api/embed."""

    input: _Texts
    model: fields.Name | None = None
    truncate: bool | None = None
    """True, or unset, to cut a text that exceeds the context."""
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


class OldEmbedRequest(msgspec.Struct, kw_only=True):
    """The body of Ollama's POST /api/embeddings, which older clients use. Without a prompt it asks
    for nothing but the model, and the answer's vector is empty.
    """

    prompt: str = ""
    model: fields.Name | None = None
    options: dict[str, Any] | None = None
    keep_alive: int | float | str | None = None
    timeout: fields.Timeout | None = None


class OldEmbedReply(msgspec.Struct, kw_only=True):
    """The answer of ``OldEmbedRequest``; the vector is not normalized, as Ollama's."""

    embedding: list[float]


class ScoreRequest(PoolingRequest, kw_only=True):
    """The body of POST /v1/score, which asks for scores of pairs of texts, or of one text with each
    of several.
    """

    text_1: _Texts | None = None
    text_2: _Texts | None = None
    queries: _Texts | None = None
    """vLLM's newer name of ``text_1``."""
    documents: _Texts | None = None
    """vLLM's newer name of ``text_2``."""
    use_activation: bool | None = None
    """True, or unset, for the sigmoid of the logit; False for the logit."""


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
    """The body of POST /v1/rerank, in the form of Jina and Cohere."""

    query: str
    documents: Annotated[list[str | Document], Meta(min_length=1, max_length=2**16)]
    top_n: fields.Count | None = None
    """Number of best documents to return; 0 and unset: all."""
    return_documents: bool | None = None
    """True, or unset, to return the documents' texts."""
    use_activation: bool | None = None


class RankedDocument(msgspec.Struct, kw_only=True):
    """A document and its score as an answer to the query."""

    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET


class RerankReply(msgspec.Struct, kw_only=True):
    """The answer of rerank, best document first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: VectorUsage
