"""Multipart: parts of a complete `multipart/form-data` body (RFC 7578) that is within the body limit.

`python-multipart` parses the form and limits headers. The parameters of a header are read here: the library's reader
changes file names, for clients that send a path.
"""

import re
import sys
from base64 import b64encode
from typing import Any

from msgspec import Struct
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser

from dynamo.core.errors import InvalidArgument

PARTS_MAX = 256
SLICE_BYTES = 1 << 18
BOUNDARY_CHARS_MAX = 200  # The standard allows 70.

_BOUNDARY = re.compile(rb';\s*boundary=(?:"([^"]*)"|([^\s;]+))', re.IGNORECASE)
_PARAMETER = re.compile(rb';\s*([a-z*]+)=(?:"((?:[^"\\]|\\.)*)"|([^\s;]*))', re.IGNORECASE)


class FormPart(Struct, frozen=True):
    """One field of a form."""

    name: str
    data: bytes
    filename: str | None = None
    """Present for a file."""
    content_type: str = "application/octet-stream"

    @property
    def text(self) -> str:
        """Return the value of a text field. Raise `InvalidArgument` if it is not UTF-8."""
        try:
            return self.data.decode("utf-8")
        except UnicodeDecodeError:
            raise InvalidArgument(f"{self.name}: must be UTF-8 text", param=self.name) from None

    @property
    def data_url(self) -> str:
        """Return a file as a `data:` URL."""
        return f"data:{self.content_type};base64,{b64encode(self.data).decode('ascii')}"


def is_multipart(content_type: bytes | None) -> bool:
    """Return whether a body of that type is a form."""
    return content_type is not None and content_type.lower().startswith(b"multipart/form-data")


def read_multipart(body: bytes | bytearray, content_type: bytes, part_bytes_max: int = sys.maxsize) -> list[FormPart]:
    """Return the parts in order. Raise `InvalidArgument` for a malformed form and for a part that is too long."""
    found = _BOUNDARY.search(content_type)
    boundary = b"" if found is None else found[1] or found[2] or b""
    if not 0 < len(boundary) <= BOUNDARY_CHARS_MAX:
        raise InvalidArgument("multipart body: content-type has no boundary")
    start = 0 if body.startswith(b"--" + boundary) else body.find(b"\r\n--" + boundary) + len(b"\r\n")
    if start == 1:  # Not found.
        raise InvalidArgument("multipart body: does not contain its boundary")
    form = _Form(part_bytes_max)
    parser = MultipartParser(boundary, form.callbacks())
    try:
        for at in range(start, len(body), SLICE_BYTES):  # A copy of the whole would block all other threads.
            parser.write(bytes(body[at : at + SLICE_BYTES]))
        parser.finalize()
    except FormParserError as error:
        raise InvalidArgument(f"multipart body: {error}") from None
    if not form.is_complete:
        raise InvalidArgument("multipart body: does not end with its boundary")
    return form.parts


class _Form:
    """Receiver of the parser's callbacks."""

    def __init__(self, part_bytes_max: int) -> None:
        self.parts: list[FormPart] = []
        self._left = self._part_bytes_max = part_bytes_max
        self.is_complete = False
        self._headers: dict[bytes, bytes] = {}
        self._field = b""
        self._value = b""
        self._data: list[bytes] = []

    def callbacks(self) -> Any:
        return {
            "on_part_begin": self._begin_part,
            "on_header_field": self._add_to_field,
            "on_header_value": self._add_to_value,
            "on_header_end": self._end_header,
            "on_part_data": self._add_to_data,
            "on_part_end": self._end_part,
            "on_end": self._end,
        }

    def _begin_part(self) -> None:
        if len(self.parts) >= PARTS_MAX:
            raise InvalidArgument(f"multipart body: more than {PARTS_MAX} parts")
        self._headers, self._data, self._left = {}, [], self._part_bytes_max

    def _add_to_data(self, data: bytes, start: int, end: int) -> None:
        self._left -= end - start
        if self._left < 0:
            raise InvalidArgument(
                f"multipart body: a part has more than {self._part_bytes_max} bytes (DYN_MM_MAX_DATA_URL_MB)"
            )
        self._data.append(data[start:end])

    def _add_to_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]

    def _add_to_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        self._headers[self._field.strip().lower()] = self._value.strip()
        self._field = self._value = b""

    def _end_part(self) -> None:
        disposition = self._headers.get(b"content-disposition", b"")
        given = {word.lower(): quoted or plain for word, quoted, plain in _PARAMETER.findall(disposition)}
        name = _word(given.get(b"name"))
        if name is None:
            raise InvalidArgument("multipart body: a part has no name")
        content_type = self._headers.get(b"content-type", b"application/octet-stream").decode("latin-1")
        self.parts.append(FormPart(name, b"".join(self._data), _word(given.get(b"filename")), content_type))

    def _end(self) -> None:
        self.is_complete = True


def _word(value: bytes | None) -> str | None:
    return None if value is None else re.sub(rb"\\(.)", rb"\1", value).decode("utf-8", "replace")
