"""Routes of OpenAI's files and batches: requests in a file, processed in the background (docs/batches.md)."""

import asyncio
import logging
import os
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import msgspec
from msgspec import Struct
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from dynamo.api.batches.limits import KEPT_S
from dynamo.api.batches.lines import ENDPOINTS, LineResponse, RequestLine
from dynamo.api.batches.records import (
    COMPLETION_WINDOW,
    COMPLETION_WINDOW_S,
    UPLOADED,
    BatchObject,
    BatchPage,
    BatchRecord,
    BatchRequest,
    ExpiresAfter,
    FileDeleted,
    FileObject,
    FilePage,
    new_id,
)
from dynamo.core.errors import DynamoException, InvalidArgument, NotFound, StorageError
from dynamo.http.routes.table import (
    Operation,
    PlainHandler,
    RouteContext,
    RouteTable,
    as_json,
    body_of,
    moved,
    owner_of,
    refuse,
)
from dynamo.http.server.gate import Account, KeyMetrics, Keys
from dynamo.protocols.strict import StrictDecoder
from dynamo.serving.bodies import decoded
from dynamo.serving.errors import ErrorAnswer, answer_to
from dynamo.serving.local_requests import LocalRequest
from dynamo.serving.response_stream import RequestHandler

if TYPE_CHECKING:
    from dynamo.api.batches.runner import BatchRunner
    from dynamo.api.batches.store import BatchStore

logger = logging.getLogger(__name__)

OFF = ErrorAnswer(
    404,
    "Files and batches are disabled; start the frontend with --batch-dir DIR (DYN_BATCH_DIR) to enable them",
    code="batches_disabled",
)
UNKNOWN_OWNER = ErrorAnswer(401, "The API key that created this batch is no longer valid", code="invalid_api_key")

PRIORITY = (b"x-dynamo-request-priority", b"-1")
"""Priority of batch lines, below that of every request without a priority."""

FILENAME_CHARS_MAX = 256
PIECE_BYTES = 1 << 18
"""Bytes of a file that are read at a time."""
EXPIRES_S_MIN, EXPIRES_S_MAX = 3600, KEPT_S
FILES_PAGE_MAX = 10_000
BATCHES_PAGE, BATCHES_PAGE_MAX = 20, 100
METADATA_MAX, METADATA_KEY_MAX, METADATA_VALUE_MAX = 16, 64, 512

Shown = TypeVar("Shown", FileObject, BatchObject)

UPLOAD_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"enum": [UPLOADED]},
        "expires_after[anchor]": {"enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": EXPIRES_S_MIN, "maximum": EXPIRES_S_MAX},
    },
}


class StrictBatchRequest(BatchRequest, kw_only=True, forbid_unknown_fields=True):
    """`BatchRequest` that rejects unknown fields."""


_decode_batch = StrictDecoder(StrictBatchRequest).decode


def add(routes: RouteTable, context: RouteContext) -> None:
    """Add the routes; without a directory they return an error that names the flag."""
    apis = context.apis
    pages: BatchPages | None = None
    if apis.batch_dir is not None:
        from dynamo.api.batches.runner import BatchRunner
        from dynamo.api.batches.slots import Slots
        from dynamo.api.batches.store import BatchStore

        keys = context.keys
        names = None if keys is None else keys.owner_of_name
        store = BatchStore(apis.batch_dir, apis.batch_limits, owner_of_name=names)
        line_runner = LineRunner(routes.request_handlers, context)
        runner = BatchRunner(
            store,
            line_runner.run,
            Slots(apis.batch_concurrency, lambda: max(0, context.pipeline.inflight - line_runner.running)),
            may_run=lambda: not context.pipeline.is_draining,
        )
        gauge = context.registry.gauge(
            f"{context.metrics_prefix}_batches_running", "Batches that this frontend is running"
        )
        gauge.labels().follow(lambda: runner.running)
        routes.on_start.append(runner.start)
        routes.on_stop.append(runner.close)
        pages = BatchPages(store, runner)

    files, batches = moved("/v1/files", "DYN_HTTP_SVC_FILES_PATH"), moved("/v1/batches", "DYN_HTTP_SVC_BATCHES_PATH")

    def route(method: str, path: str, page: str, operation: Operation) -> None:
        routes.plain(method, path, switched_off if pages is None else guarded(getattr(pages, page)), operation)

    route("POST", files, "upload", Operation("Upload a file", UPLOAD_SCHEMA, FileObject, refusals=(400, 404, 413), body_media="multipart/form-data"))  # fmt: skip
    route("GET", files, "files", Operation("List files", answer=FilePage, refusals=(400, 404), query=FILES_QUERY))
    route("GET", f"{files}/{{id}}", "file", Operation("Get a file", answer=FileObject, refusals=(404,)))
    route("DELETE", f"{files}/{{id}}", "delete", Operation("Delete a file", answer=FileDeleted, refusals=(404, 409)))
    content = Operation("Get a file's content", answer={"type": "string", "format": "binary"}, answer_media="application/octet-stream", refusals=(404,))  # fmt: skip
    route("GET", f"{files}/{{id}}/content", "content", content)
    route("POST", batches, "create", Operation("Create a batch", BatchRequest, BatchObject, refusals=(400, 404, 429)))
    route(
        "GET", batches, "batches", Operation("List batches", answer=BatchPage, refusals=(400, 404), query=BATCHES_QUERY)
    )
    route("GET", f"{batches}/{{id}}", "batch", Operation("Get a batch", answer=BatchObject, refusals=(404,)))
    route("POST", f"{batches}/{{id}}/cancel", "cancel", Operation("Cancel a batch", answer=BatchObject, refusals=(404, 409)))  # fmt: skip


FILES_QUERY: Mapping[str, Mapping[str, Any]] = {
    "purpose": {"type": "string"},
    "limit": {"type": "integer", "minimum": 1, "maximum": FILES_PAGE_MAX},
    "order": {"enum": ["asc", "desc"]},
    "after": {"type": "string"},
}
BATCHES_QUERY: Mapping[str, Mapping[str, Any]] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": BATCHES_PAGE_MAX},
    "after": {"type": "string"},
}


async def switched_off(request: Request) -> Response:
    return refuse(OFF)


def guarded(handler: PlainHandler) -> PlainHandler:
    """Wrap a handler with the request boundary: expected errors become error responses."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except DynamoException as error:
            return refuse(answer_to(error))
        except OSError as error:
            problem = StorageError.of(error, "Files and batches cannot be stored or read now")
            logger.warning("%s %s failed: %s", request.method, request.url.path, error)
            return refuse(answer_to(problem))

    return answer


class LineRunner:
    """Runner of batch lines: calls the handler that serves client requests to the line's endpoint."""

    def __init__(self, handlers: Mapping[str, RequestHandler], context: RouteContext) -> None:
        """`handlers`: the handlers by endpoint, which a batch names by its default path."""
        self._handlers = handlers
        self._keys: Keys | None = context.keys
        self._key_metrics = KeyMetrics(context.registry, context.metrics_prefix)
        self._lines = context.registry.counter(
            f"{context.metrics_prefix}_batch_lines_total", "Batch lines completed", ["status"]
        )
        self.running = 0
        """Number of lines that are running."""

    async def run(self, line: RequestLine, owner: str | None) -> LineResponse:
        """Run one line for the API key that owns its batch, within that key's limits."""
        request_id = str(uuid.uuid4())
        account: Account | None = None
        if owner is not None:
            caller = None if self._keys is None else self._keys.ring.of_owner(owner)
            if caller is None:
                return LineResponse(UNKNOWN_OWNER.status, UNKNOWN_OWNER.body(), request_id)
            too_much = caller.admit(time.monotonic())
            if too_much is not None:
                return LineResponse(429, b"", request_id, too_much.retry_after_s)
            account = Account(caller, self._key_metrics, time.monotonic)
        headers = [PRIORITY, (b"x-dynamo-request-id", request_id.encode())]
        request = LocalRequest(self._handlers[line.url], bytes(line.body), headers, account)
        self.running += 1
        try:
            answer = await request.whole()
        finally:
            self.running -= 1
        is_overload = answer.error is not None and answer.error.label == "overload"
        if answer.status == 503 or is_overload:
            return LineResponse(answer.status, b"", request_id, 0.0)
        self._lines.labels(status=str(answer.status)).inc()
        return LineResponse(answer.status, answer.body, request_id)


class BatchPages(Struct, frozen=True):
    """Handlers of files and batches. Each caller sees only its own objects."""

    store: "BatchStore"
    runner: "BatchRunner"

    # Files.

    async def upload(self, request: Request) -> Response:
        """POST /v1/files."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "multipart/form-data":
            raise InvalidArgument("expected multipart/form-data with the fields file and purpose")
        try:
            async with request.form(max_files=1, max_fields=8) as form:
                source, purpose = form.get("file"), form.get("purpose")
                if not isinstance(source, UploadFile):
                    raise InvalidArgument("file: expected a file", param="file")
                if purpose != UPLOADED:
                    raise InvalidArgument(f"purpose {purpose!r}: expected '{UPLOADED}'", param="purpose")
                anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
                kept_s = KEPT_S if anchor is None and seconds is None else lifetime_s(anchor, seconds)
                now = int(time.time())
                file = FileObject(
                    id=new_id("file-"),
                    bytes=0,
                    created_at=now,
                    filename=(source.filename or "upload.jsonl")[:FILENAME_CHARS_MAX],
                    purpose=UPLOADED,
                    expires_at=now + kept_s,
                )
                kept = await asyncio.to_thread(self.store.add_file, source.file, file, owner_of(request))
        except HTTPException as error:  # Raised by Starlette for a malformed form.
            raise InvalidArgument(f"malformed upload: {error.detail}") from None
        return as_json(kept)

    async def files(self, request: Request) -> Response:
        """GET /v1/files."""
        found = await asyncio.to_thread(self.store.files, owner_of(request))
        purpose, order = request.query_params.get("purpose"), request.query_params.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidArgument(f"order {order!r}: expected asc or desc", param="order")
        if purpose is not None:
            found = [one for one in found if one.purpose == purpose]
        if order == "asc":
            found.reverse()
        shown, more = paged(found, request, FILES_PAGE_MAX, FILES_PAGE_MAX)
        return as_json(FilePage(data=shown, has_more=more, **ends_of(shown)))

    async def file(self, request: Request) -> Response:
        """GET /v1/files/{id}."""
        return as_json(await asyncio.to_thread(self.store.file, request.path_params["id"], owner_of(request)))

    async def delete(self, request: Request) -> Response:
        """DELETE /v1/files/{id}."""
        file_id = request.path_params["id"]
        await asyncio.to_thread(self.store.delete_file, file_id, owner_of(request))
        return as_json(FileDeleted(id=file_id))

    async def content(self, request: Request) -> Response:
        """GET /v1/files/{id}/content."""
        file = await asyncio.to_thread(self.store.file, request.path_params["id"], owner_of(request))
        try:
            opened = await asyncio.to_thread(open, self.store.path(file.id), "rb")
        except FileNotFoundError:  # The file was deleted between lookup and open.
            raise NotFound(f"No such File object: {file.id}", param="id", code="file_not_found") from None
        length = {"content-length": str(os.fstat(opened.fileno()).st_size)}
        return StreamingResponse(pieces_of(opened), headers=length, media_type="application/octet-stream")

    # Batches.

    async def create(self, request: Request) -> Response:
        """POST /v1/batches."""
        wanted = checked(await decoded(await body_of(request), _decode_batch))
        owner, now = owner_of(request), int(time.time())
        file = await asyncio.to_thread(self.store.file, wanted.input_file_id, owner)
        if file.purpose != UPLOADED:
            problem = f"input_file_id: {file.id} has the purpose {file.purpose!r}: expected '{UPLOADED}'"
            raise InvalidArgument(problem, param="input_file_id")
        batch = BatchObject(
            id=new_id("batch_"),
            endpoint=wanted.endpoint,
            input_file_id=file.id,
            created_at=now,
            expires_at=now + COMPLETION_WINDOW_S,
            metadata=wanted.metadata,
        )
        after = wanted.output_expires_after
        record = BatchRecord(batch=batch, owner=owner, output_expires_after_s=None if after is None else after.seconds)
        await asyncio.to_thread(self.store.add_batch, record)
        self.runner.nudge()
        return as_json(batch)

    async def batches(self, request: Request) -> Response:
        """GET /v1/batches."""
        found = await asyncio.to_thread(self.store.batches, owner_of(request))
        shown, more = paged([one.batch for one in found], request, BATCHES_PAGE, BATCHES_PAGE_MAX)
        return as_json(BatchPage(data=shown, has_more=more, **ends_of(shown)))

    async def batch(self, request: Request) -> Response:
        """GET /v1/batches/{id}."""
        return as_json(await self._batch(request))

    async def cancel(self, request: Request) -> Response:
        """POST /v1/batches/{id}/cancel."""
        batch = await self._batch(request)
        if BatchRecord(batch=batch).has_ended:
            problem = f"Cannot cancel a batch with status '{batch.status}'"
            return refuse(ErrorAnswer(409, problem, code="batch_has_ended"))
        await asyncio.to_thread(self.store.cancel, batch.id)
        self.runner.nudge()
        return as_json(await self._batch(request))

    async def _batch(self, request: Request) -> BatchObject:
        record = await asyncio.to_thread(self.store.batch, request.path_params["id"], owner_of(request))
        return record.batch


def checked(wanted: BatchRequest) -> BatchRequest:
    """Return the request. Raise `InvalidArgument` that names the invalid field."""
    if wanted.endpoint not in ENDPOINTS:
        problem = f"endpoint {wanted.endpoint!r}: expected one of {', '.join(ENDPOINTS)}"
        raise InvalidArgument(problem, param="endpoint")
    if wanted.completion_window != COMPLETION_WINDOW:
        problem = f"completion_window {wanted.completion_window!r}: expected '{COMPLETION_WINDOW}'"
        raise InvalidArgument(problem, param="completion_window")
    metadata = wanted.metadata or {}
    if (
        len(metadata) > METADATA_MAX
        or any(len(key) > METADATA_KEY_MAX for key in metadata)
        or any(len(value) > METADATA_VALUE_MAX for value in metadata.values())
    ):
        problem = (
            f"metadata: expected at most {METADATA_MAX} pairs, of at most {METADATA_KEY_MAX} and {METADATA_VALUE_MAX}"
            " characters"
        )
        raise InvalidArgument(problem, param="metadata")
    after = wanted.output_expires_after
    if after is not None:
        lifetime_s(after.anchor, after.seconds, "output_expires_after")
    return wanted


def lifetime_s(anchor: Any, seconds: Any, param: str = "expires_after") -> int:
    """Return the lifetime of a file in seconds. Raise `InvalidArgument`."""
    try:
        after = msgspec.convert({"anchor": anchor, "seconds": seconds}, ExpiresAfter, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"{param}: {error}", param=param) from None
    if after.anchor != "created_at" or not EXPIRES_S_MIN <= after.seconds <= EXPIRES_S_MAX:
        problem = f"{param}: expected the anchor created_at and {EXPIRES_S_MIN} to {EXPIRES_S_MAX} seconds"
        raise InvalidArgument(problem, param=param)
    return after.seconds


def paged(found: list[Shown], request: Request, default: int, most: int) -> tuple[list[Shown], bool]:
    """Return the items of a list's page and whether more follow. Raise `InvalidArgument`."""
    text = request.query_params.get("limit", str(default))
    limit = int(text) if text.isascii() and text.isdigit() and len(text) < 9 else 0
    if not 1 <= limit <= most:
        raise InvalidArgument(f"limit {text!r}: expected 1 to {most}", param="limit")
    after = request.query_params.get("after")
    if after is not None:
        place = next((place for place, one in enumerate(found) if one.id == after), None)
        if place is None:
            raise InvalidArgument(f"after {after!r}: no such object", param="after")
        found = found[place + 1 :]
    return found[:limit], len(found) > limit


def ends_of(shown: list[Shown]) -> dict[str, str]:
    """Return the ids of a page's first and last item."""
    return {"first_id": shown[0].id, "last_id": shown[-1].id} if shown else {}


async def pieces_of(file: BinaryIO) -> AsyncIterator[bytes]:
    """Yield the content of an open file and close it; the file may be deleted meanwhile."""
    with file:
        while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
            yield piece
