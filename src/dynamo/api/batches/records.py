"""Records: files and batches in OpenAI's format, and as stored with their owners."""

import re
import secrets
from collections.abc import Mapping
from typing import Any

import msgspec

FILE_ID = re.compile(r"file-[0-9a-f]{24}")
BATCH_ID = re.compile(r"batch_[0-9a-f]{24}")

UPLOADED, PRODUCED = "batch", "batch_output"
"""Purposes of files."""

VALIDATING, IN_PROGRESS, FINALIZING, CANCELLING = "validating", "in_progress", "finalizing", "cancelling"
COMPLETED, FAILED, EXPIRED, CANCELLED = "completed", "failed", "expired", "cancelled"
ENDS = frozenset({COMPLETED, FAILED, EXPIRED, CANCELLED})
"""Final statuses of a batch."""

COMPLETION_WINDOW = "24h"
COMPLETION_WINDOW_S = 24 * 3600


class FileObject(msgspec.Struct, kw_only=True):
    """A file, as returned to clients."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: str = "processed"
    expires_at: int | None = None


class FilePage(msgspec.Struct, kw_only=True):
    """One page of files."""

    object: str = "list"
    data: list[FileObject]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class FileDeleted(msgspec.Struct, kw_only=True):
    """Confirmation of a deleted file."""

    id: str
    object: str = "file"
    deleted: bool = True


class FileRecord(msgspec.Struct, kw_only=True):
    """A file, as stored."""

    file: FileObject
    owner: str | None = None
    """Owner id of its API key, if keys are configured; earlier releases stored names."""


class LineError(msgspec.Struct, kw_only=True):
    """An error of an input file."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class LineErrors(msgspec.Struct, kw_only=True):
    """All errors of an input file."""

    object: str = "list"
    data: list[LineError]


class RequestCounts(msgspec.Struct, kw_only=True):
    """Progress of a batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchObject(msgspec.Struct, kw_only=True):
    """A batch, as returned to clients."""

    id: str
    object: str = "batch"
    endpoint: str
    model: str | None = None
    errors: LineErrors | None = None
    input_file_id: str
    completion_window: str = COMPLETION_WINDOW
    status: str = VALIDATING
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
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None


class BatchPage(msgspec.Struct, kw_only=True):
    """One page of batches."""

    object: str = "list"
    data: list[BatchObject]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class BatchRecord(msgspec.Struct, kw_only=True):
    """A batch, as stored."""

    batch: BatchObject
    owner: str | None = None
    output_expires_after_s: int | None = None

    @property
    def has_ended(self) -> bool:
        return self.batch.status in ENDS


class ExpiresAfter(msgspec.Struct, forbid_unknown_fields=True):
    """Expiry of a file."""

    anchor: str
    seconds: int


class BatchRequest(msgspec.Struct, kw_only=True):
    """Request to create a batch."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


def new_id(prefix: str) -> str:
    """Return an unguessable id."""
    return f"{prefix}{secrets.token_hex(12)}"


def result_line(request_id: str, custom_id: str, *, response: Mapping[str, Any] | None, error: Any) -> dict[str, Any]:
    """Return one line of an output or error file."""
    return {"id": request_id, "custom_id": custom_id, "response": response, "error": error}
