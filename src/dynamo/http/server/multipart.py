"""Multipart: the parts of a `multipart/form-data` body (RFC 7578), which is whole and within the body's limit."""

import re
from base64 import b64encode
from dataclasses import dataclass

from dynamo.core.errors import InvalidArgument

PARTS_MAX = 256
HEAD_BYTES_MAX = 8192  # Of one part.
BOUNDARY_CHARS_MAX = 200  # The standard says 70.

_BOUNDARY = re.compile(rb';\s*boundary=(?:"([^"]*)"|([^\s;]+))', re.IGNORECASE)
_PARAMETER = re.compile(rb';\s*([a-z*]+)=(?:"((?:[^"\\]|\\.)*)"|([^\s;]*))', re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Part:
    """One field of a form."""

    name: str
    data: bytes
    filename: str | None = None
    """There where it is a file."""
    content_type: str = "application/octet-stream"

    @property
    def text(self) -> str:
        """The value of a field. Raises `InvalidArgument` for what is no text."""
        try:
            return self.data.decode("utf-8")
        except UnicodeDecodeError:
            raise InvalidArgument(f"{self.name} is no UTF-8 text", param=self.name) from None

    @property
    def data_url(self) -> str:
        """A file as a URL that holds it."""
        return f"data:{self.content_type};base64,{b64encode(self.data).decode('ascii')}"


def is_multipart(content_type: bytes | None) -> bool:
    """Whether a body of that type is a form."""
    return content_type is not None and content_type.lower().startswith(b"multipart/form-data")


def read_multipart(body: bytes, content_type: bytes) -> list[Part]:
    """The parts in order. Raises `InvalidArgument` for what is no form."""
    found = _BOUNDARY.search(content_type)
    boundary = b"" if found is None else found[1] or found[2] or b""
    if not 0 < len(boundary) <= BOUNDARY_CHARS_MAX:
        raise InvalidArgument("the multipart body has no boundary in its content-type")
    mark = b"\r\n--" + boundary
    pieces = (b"\r\n" + body).split(mark, PARTS_MAX + 2)
    if len(pieces) > PARTS_MAX + 2:
        raise InvalidArgument(f"the multipart body has more than {PARTS_MAX} parts")
    if len(pieces) < 2 or not pieces[-1].startswith(b"--"):
        raise InvalidArgument("the multipart body does not end in its boundary")
    return [_part(piece) for piece in pieces[1:-1]]


def _part(piece: bytes) -> Part:
    head, mark, data = piece.partition(b"\r\n\r\n")
    if not mark or len(head) > HEAD_BYTES_MAX:
        raise InvalidArgument("a part of the multipart body has no headers, or too long ones")
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
        raise InvalidArgument("a part of the multipart body has no name")
    return Part(name, data, filename, content_type)


def _word(value: bytes | None) -> str | None:
    return None if value is None else re.sub(rb"\\(.)", rb"\1", value).decode("utf-8", "replace")
