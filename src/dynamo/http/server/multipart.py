"""Multipart: parts of a complete `multipart/form-data` body (RFC 7578) that is within the body limit."""

import re
from base64 import b64encode
from dataclasses import dataclass

from dynamo.core.errors import InvalidArgument

PARTS_MAX = 256
HEAD_BYTES_MAX = 8192  # Maximum header bytes of one part.
BOUNDARY_CHARS_MAX = 200  # The standard allows 70.

_BOUNDARY = re.compile(rb';\s*boundary=(?:"([^"]*)"|([^\s;]+))', re.IGNORECASE)
_PARAMETER = re.compile(rb';\s*([a-z*]+)=(?:"((?:[^"\\]|\\.)*)"|([^\s;]*))', re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Part:
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


def read_multipart(body: bytes, content_type: bytes) -> list[Part]:
    """Return the parts in order. Raise `InvalidArgument` for a malformed form."""
    found = _BOUNDARY.search(content_type)
    boundary = b"" if found is None else found[1] or found[2] or b""
    if not 0 < len(boundary) <= BOUNDARY_CHARS_MAX:
        raise InvalidArgument("multipart body: content-type has no boundary")
    mark = b"\r\n--" + boundary
    pieces = (b"\r\n" + body).split(mark, PARTS_MAX + 2)
    if len(pieces) > PARTS_MAX + 2:
        raise InvalidArgument(f"multipart body: more than {PARTS_MAX} parts")
    if len(pieces) < 2 or not pieces[-1].startswith(b"--"):
        raise InvalidArgument("multipart body: does not end with its boundary")
    return [_part(piece) for piece in pieces[1:-1]]


def _part(piece: bytes) -> Part:
    head, mark, data = piece.partition(b"\r\n\r\n")
    if not mark or len(head) > HEAD_BYTES_MAX:
        raise InvalidArgument("multipart body: a part has no headers, or headers that are too long")
    name: str | None = None
    filename: str | None = None
    content_type = "application/octet-stream"
    for line in head.split(b"\r\n"):
        key, _, value = line.partition(b":")
        match key.strip().lower():
            case b"content-disposition":
                given = {word.lower(): quoted or plain for word, quoted, plain in _PARAMETER.findall(value)}
                name = _word(given.get(b"name"))
                filename = _word(given.get(b"filename"))
            case b"content-type":
                content_type = value.strip().decode("latin-1")
    if name is None:
        raise InvalidArgument("multipart body: a part has no name")
    return Part(name, data, filename, content_type)


def _word(value: bytes | None) -> str | None:
    return None if value is None else re.sub(rb"\\(.)", rb"\1", value).decode("utf-8", "replace")
