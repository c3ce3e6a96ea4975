"""Lines of batches: validation of input files, with one request per line as a JSON object, and responses. Pure."""

from collections.abc import Callable, Iterable, Iterator

import msgspec
from msgspec import Struct, field

from dynamo.api.batches.records import LineError
from dynamo.core.codec import UNREADABLE, json_decode, json_decoder
from dynamo.core.errors import InvalidArgument

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
CUSTOM_ID_CHARS_MAX = 512
LINES_MAX = 50_000  # OpenAI's limit.
VALUE_BYTES_MAX = 4096
ERRORS_MAX = 100  # Further errors are not reported.


class LineBody(msgspec.Struct):
    """Fields of a request that are checked before it runs. The others are skipped: decoding them may take seconds."""

    model: msgspec.Raw = msgspec.Raw(b"null")
    stream: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def model_name(self) -> str:
        """Return the model; empty without a name."""
        name = _short(self.model)
        return name if isinstance(name, str) else ""

    @property
    def is_streamed(self) -> bool:
        """Return whether the response is streamed."""
        return bool(_short(self.stream))


class BatchLine(msgspec.Struct):
    """One request of a batch."""

    custom_id: str
    method: str
    url: str
    body: LineBody


class RequestLine(msgspec.Struct):
    """Accepted line, as it is run."""

    custom_id: str
    url: str
    body: msgspec.Raw
    """Request body as the file contains it; the endpoint decodes it."""


class LineResponse(Struct, frozen=True):
    """Response to one line."""

    status: int
    body: bytes
    request_id: str
    retry_after_s: float | None = None
    """Set if the line must be retried: minimum delay in seconds; 0: the runner's own backoff."""


_decode = json_decoder(BatchLine).decode
_decode_accepted = json_decoder(RequestLine).decode


class Review(Struct):
    """Result of the validation of an input file."""

    total: int = 0
    model: str | None = None
    """Model of the first request."""
    errors: list[LineError] = field(default_factory=list)


def _short(value: msgspec.Raw) -> object:
    """Return a decoded value; True for one that is too long for a name or a flag."""
    return json_decode(value) if memoryview(value).nbytes <= VALUE_BYTES_MAX else True


def read_line(data: bytes) -> RequestLine:
    """Decode a line that `review` has accepted."""
    line: RequestLine = _decode_accepted(data)
    return line


def _accept(_line: bytes) -> None:
    """Accept any line."""


def review(lines: Iterable[bytes], endpoint: str, check: Callable[[bytes], None] = _accept) -> Review:
    """Return all errors of a file, up to `ERRORS_MAX`; empty lines are ignored.

    `check` runs before a line is decoded and raises `InvalidArgument` for one that would take too long; what else it raises ends the review.
    """
    found = Review()
    seen: set[str] = set()
    for number, data in enumerate(lines, 1):
        if not data.strip():
            continue
        found.total += 1
        if found.total > LINES_MAX:
            found.errors.append(
                LineError(code="too_many_tasks", message=f"the file has more than {LINES_MAX} requests", line=number)
            )
            break
        error, line = check_line(data, endpoint, seen, check)
        if error is not None:
            error.line = number
            found.errors.append(error)
            if len(found.errors) >= ERRORS_MAX:
                break
        elif line is not None and found.model is None:
            found.model = line.body.model_name
    if not found.total:
        found.errors.append(LineError(code="empty_file", message="the file has no requests"))
    return found


def check_line(
    data: bytes, endpoint: str, seen: set[str], check: Callable[[bytes], None] = _accept
) -> tuple[LineError | None, BatchLine | None]:
    """Return the line's error or the decoded line. Its id is added to `seen`, the ids so far."""
    try:
        check(data)
        line: BatchLine = _decode(data)
    except InvalidArgument as refusal:
        return LineError(code="invalid_request", message=str(refusal)), None
    except msgspec.ValidationError as error:
        return LineError(code="invalid_request", message=str(error)), None
    except UNREADABLE:
        return LineError(code="invalid_json_line", message="the line is not a JSON object"), None
    fault = next(_faults(line, endpoint, seen), None)
    if fault is not None:
        return fault, None
    seen.add(line.custom_id)
    return None, line


def _faults(line: BatchLine, endpoint: str, seen: set[str]) -> Iterator[LineError]:
    if not 0 < len(line.custom_id) <= CUSTOM_ID_CHARS_MAX:
        message = f"custom_id has {len(line.custom_id)} characters: expected 1 to {CUSTOM_ID_CHARS_MAX}"
        yield LineError(code="invalid_custom_id", message=message, param="custom_id")
    if line.custom_id in seen:
        message = f"custom_id {line.custom_id!r} occurs twice"
        yield LineError(code="duplicate_custom_id", message=message, param="custom_id")
    if line.method != "POST":
        yield LineError(code="invalid_method", message=f"method {line.method!r}: expected POST", param="method")
    if line.url != endpoint:
        message = f"url {line.url!r}: expected the batch's endpoint, {endpoint}"
        yield LineError(code="mismatched_url", message=message, param="url")
    if not line.body.model_name:
        yield LineError(code="missing_model", message="body.model is missing", param="body.model")
    if line.body.is_streamed:
        yield LineError(
            code="stream_not_supported", message="body.stream: must not be set in a batch", param="body.stream"
        )
