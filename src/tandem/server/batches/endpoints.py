"""The endpoints of files and batches."""

import asyncio
import uuid
from collections.abc import Sequence
from typing import NoReturn, TypeVar

import msgspec
from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive

from tandem.core.errors import ConfigError, NotFoundError, UnsupportedError
from tandem.server.batches.store import BatchStore, KeptBatch, Upload
from tandem.server.batches.transfers import FileAnswer, make_steady
from tandem.server.batches.worker import BatchWorker, now_s
from tandem.server.clients import current_client
from tandem.server.context import ServerContext
from tandem.server.edge.connection import ClientGoneError
from tandem.server.edge.http_errors import HttpError
from tandem.server.protocol.batches import (
    Batch,
    BatchList,
    BatchRequest,
    DeletedBatch,
    DeletedFile,
    FileList,
    FileObject,
)

__all__ = [
    "cancel_batch",
    "create_batch",
    "delete_batch",
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
_LONGEST_TYPE = 1024
"""Largest length of an upload's content type: its parser takes seconds for one of 256 KiB."""
_MAX_LISTED = 100
_MAX_FILES_LISTED = 10_000
_Kept = TypeVar("_Kept", Batch, FileObject)


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
    worker, config = _find_worker(context), context.config
    _check_form(http.headers.get("content-type", ""))
    declared = http.headers.get("content-length", "0")
    if int(declared) > config.batch_bytes + _FORM_BYTES:
        _refuse_size(config.batch_bytes)
    with worker.transfers.take_place(current_client.get()), Upload(worker.store) as room:
        steady = make_steady(http.receive, config.body_timeout_s)
        receive = _bound_receive(steady, room, config.batch_bytes)
        return await _store_upload(context, Request(http.scope, receive), worker.store, room)


async def _store_upload(
    context: ServerContext, http: Request, store: BatchStore, room: Upload
) -> Response:
    try:
        async with (
            asyncio.timeout(context.config.request_timeout_s),
            http.form(max_files=1, max_fields=_MAX_FIELDS) as form,
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
                room,
            )
    except HTTPException as error:
        what = f"the body is no form with a file: {error.detail}"
        raise ConfigError("server.files", what) from error
    except ClientDisconnect as error:
        raise ClientGoneError from error
    except TimeoutError as error:
        raise HttpError(408, "the file did not arrive in time", code="body_timeout") from error
    return _answer(file)


def _check_form(content_type: str) -> None:
    """Refuse a body that is no multipart form, or a form of another encoding than UTF-8: Python has
    codecs that decode in the square of the length, and the form's parser would take any by name.
    """
    if len(content_type) > _LONGEST_TYPE:
        what = (
            f"the content type has {len(content_type)} characters, at most {_LONGEST_TYPE} are read"
        )
        raise ConfigError("server.files", what, field="Content-Type")
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data":
        raise ConfigError("server.files", "the body is no form with a file: multipart/form-data")
    charset = options.get(b"charset", b"utf-8")
    if charset.lower() not in (b"utf-8", b"utf8", b"us-ascii"):
        what = f"a form in {charset[:40].decode(errors='replace')!r}: give one in UTF-8"
        raise UnsupportedError("server.files", what, field="charset")


def _bound_receive(receive: Receive, room: Upload, limit: int) -> Receive:
    """Return a function that receives a form as long as its file fits. What has come counts as
    stored.
    """
    total = 0

    async def receive_some() -> Message:
        nonlocal total
        message = await receive()
        size = len(message.get("body", b""))
        total += size
        if total > limit + _FORM_BYTES:
            _refuse_size(limit)
        room.add(size)
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
    store, owner = _find_worker(context).store, _find_owner(context, http)
    files = await asyncio.to_thread(store.list_files, owner)
    files = [each for each in files if purpose in (None, each.purpose)]
    page, has_more = _take_page(http, files, _MAX_FILES_LISTED, _MAX_FILES_LISTED)
    return _answer(FileList(data=page, has_more=has_more))


def _take_page(
    http: Request, listed: Sequence[_Kept], default: int, most: int
) -> tuple[list[_Kept], bool]:
    """Return the part of a list that a query wants, and whether more follows.

    Raises: ConfigError (the limit is no number or out of range); NotFoundError (nothing has the id
        that the part comes after).
    """
    after, limit = http.query_params.get("after"), http.query_params.get("limit", str(default))
    # The length comes first: Python converts no more than some thousand digits.
    if not (limit.isdecimal() and len(limit) <= 6 and 1 <= int(limit) <= most):
        raise ConfigError("server.list", f"limit is {limit[:20]!r}: 1 to {most}", field="limit")
    begin = 0
    if after:
        begin = next((i for i, each in enumerate(listed, 1) if each.id == after), 0)
        if not begin:
            raise NotFoundError("server.list", f"there is no {after[:100]!r} here", field="after")
    end = begin + int(limit)
    return [*listed[begin:end]], end < len(listed)


async def get_file(context: ServerContext, http: Request) -> Response:
    """Describe a file."""
    store, owner = _find_worker(context).store, _find_owner(context, http)
    return _answer(await asyncio.to_thread(store.find_file, owner, http.path_params["id"]))


async def get_file_content(context: ServerContext, http: Request) -> Response:
    """Return the content of a file."""
    worker, owner = _find_worker(context), _find_owner(context, http)
    store = worker.store
    file = await asyncio.to_thread(store.find_file, owner, http.path_params["id"])
    # A batch's output may grow meanwhile: what there is now is sent.
    path, size = store.find_path(file.id), file.bytes
    return FileAnswer(path, size, worker.transfers, current_client.get())


async def delete_file(context: ServerContext, http: Request) -> Response:
    """Delete a file, unless a batch still needs it."""
    store, owner = _find_worker(context).store, _find_owner(context, http)
    file_id = http.path_params["id"]
    await asyncio.to_thread(store.delete_file, owner, file_id)
    return _answer(DeletedFile(id=file_id))


async def create_batch(context: ServerContext, http: Request) -> Response:
    """Create a batch: the requests of a file are answered when no other request needs the
    machine.
    """
    worker, owner = _find_worker(context), _find_owner(context, http)
    request = await context.read_request(http, _decoder)
    await asyncio.to_thread(worker.store.find_file, owner, request.input_file_id)
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
    store, owner = _find_worker(context).store, _find_owner(context, http)
    kept = await asyncio.to_thread(store.find_batch, owner, http.path_params["id"])
    return _answer(kept.batch)


async def list_batches(context: ServerContext, http: Request) -> Response:
    """List the caller's batches, the newest first."""
    store, owner = _find_worker(context).store, _find_owner(context, http)
    kept = await asyncio.to_thread(store.list_batches, owner)
    page, has_more = _take_page(http, [each.batch for each in kept], 20, _MAX_LISTED)
    reply = BatchList(
        data=page,
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
        has_more=has_more,
    )
    return _answer(reply)


async def delete_batch(context: ServerContext, http: Request) -> Response:
    """Forget a batch that has ended; its files stay."""
    store, batch_id = _find_worker(context).store, http.path_params["id"]
    await asyncio.to_thread(store.delete_batch, _find_owner(context, http), batch_id)
    return _answer(DeletedBatch(id=batch_id))


async def cancel_batch(context: ServerContext, http: Request) -> Response:
    """Cancel a batch; its answers so far are kept."""
    worker, owner = _find_worker(context), _find_owner(context, http)
    kept = await asyncio.to_thread(worker.store.find_batch, owner, http.path_params["id"])
    await worker.cancel(kept)
    return _answer(kept.batch)
