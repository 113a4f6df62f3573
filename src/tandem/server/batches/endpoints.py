"""The endpoints of files and batches."""

import asyncio
import uuid
from typing import NoReturn

import msgspec
from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.types import Message, Receive

from tandem.core.errors import ConfigError, ConflictError, UnsupportedError
from tandem.server.batches.store import KeptBatch
from tandem.server.batches.worker import BatchWorker, now_s
from tandem.server.context import ServerContext
from tandem.server.edge.http_errors import HttpError
from tandem.server.protocol.batches import (
    Batch,
    BatchList,
    BatchRequest,
    DeletedFile,
    FileList,
)

__all__ = [
    "cancel_batch",
    "create_batch",
    "delete_file",
    "get_batch",
    "get_file",
    "get_file_content",
    "list_batches",
    "list_files",
    "upload_file",
]

_encode = msgspec.json.Encoder().encode
_decoder = msgspec.json.Decoder(BatchRequest)
_UNITS_S = {"m": 60, "h": 3600, "d": 86400}
_MAX_FIELDS = 16
_FORM_BYTES = 1 << 16
"""Largest size in bytes of an upload's multipart form beside the file in it."""
_MAX_LISTED = 100


def _answer(document: msgspec.Struct) -> Response:
    return Response(_encode(document), media_type="application/json")


def _find_worker(context: ServerContext) -> BatchWorker:
    if context.batches is None:
        what = "files and batches are switched off (server.batch_bytes is 0)"
        raise UnsupportedError("server.batches", what)
    return context.batches


def _find_owner(context: ServerContext, http: Request) -> str:
    return context.find_owner(http).hex()


async def upload_file(context: ServerContext, http: Request) -> Response:
    """Store a file for a batch."""
    store = _find_worker(context).store
    _check_form(http.headers.get("content-type"))
    limit = context.config.batch_bytes + _FORM_BYTES
    bounded = Request(http.scope, _bound_receive(http.receive, limit))
    try:
        async with (
            asyncio.timeout(context.config.request_timeout_s),
            bounded.form(max_files=1, max_fields=_MAX_FIELDS) as form,
        ):
            upload, purpose = form.get("file"), form.get("purpose")
            if not isinstance(upload, UploadFile):
                raise ConfigError("server.files", "the form has no file", field="file")
            if not isinstance(purpose, str) or not 1 <= len(purpose) <= 64:
                raise ConfigError("server.files", "purpose is missing: batch", field="purpose")
            name = (upload.filename or "file")[:256]
            file = await asyncio.to_thread(
                store.add_file,
                _find_owner(context, http),
                name,
                purpose,
                upload.file,
                context.now_unix_s(),
            )
    except HTTPException as error:
        what = f"the body is no form with a file: {error.detail}"
        raise ConfigError("server.files", what) from error
    except TimeoutError as error:
        raise HttpError(408, "the file did not arrive in time", code="body_timeout") from error
    return _answer(file)


def _check_form(content_type: str | None) -> None:
    """Refuse a body that is no multipart form, or a form of another encoding than UTF-8: Python has
    codecs that decode in the square of the length, and the form's parser would take any by name.
    """
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data":
        raise ConfigError("server.files", "the body is no form with a file: multipart/form-data")
    charset = options.get(b"charset", b"utf-8")
    if charset.lower() not in (b"utf-8", b"utf8", b"us-ascii"):
        what = f"a form in {charset[:40].decode(errors='replace')!r}: give one in UTF-8"
        raise UnsupportedError("server.files", what, field="charset")


def _bound_receive(receive: Receive, limit: int) -> Receive:
    total = 0

    async def receive_some() -> Message:
        nonlocal total
        message = await receive()
        total += len(message.get("body", b""))
        if total > limit:
            _refuse_size(limit)
        return message

    return receive_some


def _refuse_size(limit: int) -> NoReturn:
    raise HttpError(
        413,
        f"the file is longer than {limit} bytes (server.batch_bytes)",
        code="body_too_large",
        headers={"Connection": "close"},
    )


async def list_files(context: ServerContext, http: Request) -> Response:
    """List the caller's files, the newest first."""
    purpose = http.query_params.get("purpose")
    files = _find_worker(context).store.list_files(_find_owner(context, http))
    return _answer(FileList(data=[f for f in files if purpose in (None, f.purpose)]))


async def get_file(context: ServerContext, http: Request) -> Response:
    """Describe a file."""
    store = _find_worker(context).store
    return _answer(store.find_file(_find_owner(context, http), http.path_params["id"]))


async def get_file_content(context: ServerContext, http: Request) -> Response:
    """Return the content of a file."""
    store = _find_worker(context).store
    file = store.find_file(_find_owner(context, http), http.path_params["id"])
    return FileResponse(store.find_path(file.id), media_type="application/octet-stream")


async def delete_file(context: ServerContext, http: Request) -> Response:
    """Delete a file, unless a batch still needs it."""
    store, owner = _find_worker(context).store, _find_owner(context, http)
    file_id = http.path_params["id"]
    for kept in store.list_batches(owner):
        batch = kept.batch
        used = (batch.input_file_id, batch.output_file_id, batch.error_file_id)
        if not kept.is_over and file_id in used:
            what = f"batch {batch.id} needs the file: cancel it first"
            raise ConflictError("server.files", what, field="file_id")
    await asyncio.to_thread(store.delete_file, owner, file_id)
    return _answer(DeletedFile(id=file_id))


async def create_batch(context: ServerContext, http: Request) -> Response:
    """Create a batch: the requests of a file are answered when no other request needs the
    machine.
    """
    worker, owner = _find_worker(context), _find_owner(context, http)
    request = await context.read_request(http, _decoder)
    worker.store.find_file(owner, request.input_file_id)
    created = now_s()
    window = request.completion_window
    batch = Batch(
        id=f"batch_{uuid.uuid4().hex}",
        endpoint=request.endpoint,
        input_file_id=request.input_file_id,
        completion_window=window,
        created_at=created,
        expires_at=created + int(window[:-1]) * _UNITS_S[window[-1]],
        metadata=request.metadata,
    )
    document = _answer(batch)
    await asyncio.to_thread(worker.store.put_batch, KeptBatch(owner, batch))
    worker.notify()
    return document


async def get_batch(context: ServerContext, http: Request) -> Response:
    """Return the state and progress of a batch."""
    store = _find_worker(context).store
    return _answer(store.find_batch(_find_owner(context, http), http.path_params["id"]).batch)


async def list_batches(context: ServerContext, http: Request) -> Response:
    """List the caller's batches, the newest first."""
    kept = _find_worker(context).store.list_batches(_find_owner(context, http))
    batches = [each.batch for each in kept]
    after, limit = http.query_params.get("after"), http.query_params.get("limit", "20")
    # The length comes first: Python converts no more than some thousand digits.
    if not (limit.isdecimal() and len(limit) <= 3 and 1 <= int(limit) <= _MAX_LISTED):
        what = f"limit is {limit[:20]!r}: 1 to {_MAX_LISTED}"
        raise ConfigError("server.batches", what, field="limit")
    if after is not None:
        ids = [batch.id for batch in batches]
        batches = batches[ids.index(after) + 1 :] if after in ids else []
    page = batches[: int(limit)]
    reply = BatchList(
        data=page,
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
        has_more=len(page) < len(batches),
    )
    return _answer(reply)


async def cancel_batch(context: ServerContext, http: Request) -> Response:
    """Cancel a batch; its answers so far are kept."""
    worker = _find_worker(context)
    kept = worker.store.find_batch(_find_owner(context, http), http.path_params["id"])
    await worker.cancel(kept)
    return _answer(kept.batch)
