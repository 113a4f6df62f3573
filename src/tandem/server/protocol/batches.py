"""Requests and responses of OpenAI's files and batches. Field names are the wire names."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tandem.server.protocol import fields

__all__ = [
    "ENDPOINTS",
    "Batch",
    "BatchCounts",
    "BatchError",
    "BatchErrors",
    "BatchLine",
    "BatchList",
    "BatchRequest",
    "DeletedBatch",
    "DeletedFile",
    "FileList",
    "FileObject",
]

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
"""Endpoints that a batch may call."""


_MetadataKey = Annotated[str, Meta(max_length=64)]
_MetadataValue = Annotated[str, Meta(max_length=512)]


class FileObject(msgspec.Struct, kw_only=True):
    """A stored file."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: str = "processed"


class FileList(msgspec.Struct, kw_only=True):
    """The answer of GET /v1/files: the caller's files, newest first."""

    object: str = "list"
    data: list[FileObject]
    has_more: bool = False


class DeletedFile(msgspec.Struct, kw_only=True):
    """The answer of DELETE /v1/files/{id}."""

    id: str
    object: str = "file"
    deleted: bool = True


class BatchRequest(msgspec.Struct, kw_only=True):
    """The body of POST /v1/batches."""

    input_file_id: fields.Name
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
    completion_window: Annotated[str, Meta(pattern="^[1-9][0-9]{0,3}[mhd]$")] = "24h"
    """Time within which the batch should complete, such as "30m"; OpenAI allows only "24h"."""
    metadata: Annotated[dict[_MetadataKey, _MetadataValue], Meta(max_length=16)] | None = None


class BatchCounts(msgspec.Struct):
    """Numbers of a batch's requests by state."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchError(msgspec.Struct, kw_only=True):
    """A reason why a batch failed as a whole."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(msgspec.Struct, kw_only=True):
    """All reasons why a batch failed as a whole."""

    object: str = "list"
    data: list[BatchError]


class Batch(msgspec.Struct, kw_only=True):
    """A batch with its state and progress."""

    id: str
    object: str = "batch"
    endpoint: str
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: str = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: BatchCounts = msgspec.field(default_factory=BatchCounts)
    metadata: dict[str, str] | None = None


class BatchList(msgspec.Struct, kw_only=True):
    """The answer of GET /v1/batches: the caller's batches, newest first."""

    object: str = "list"
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedBatch(msgspec.Struct, kw_only=True):
    """The answer of DELETE /v1/batches/{id}."""

    id: str
    object: str = "batch"
    deleted: bool = True


class BatchLine(msgspec.Struct, kw_only=True):
    """One request of a batch's input file."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: Literal["POST"] = "POST"
    url: str
    body: dict[str, msgspec.Raw]
    """Fields of the request as JSON: they are read by its endpoint, within that one's limits."""
