"""Echo: what the events of a response repeat of a long request, encoded once and off the event loop. Pure.

Three events of a stream contain the whole response, with the instructions and the tools of its request. Encoding 14 MB of them
takes some 15 ms each time, and every copy of the event several more.
"""

from msgspec import Struct
from msgspec.structs import replace

from dynamo.api.responses.convert import shown_tool
from dynamo.core.codec import json_encode
from dynamo.protocols.response_requests import ResponseRequest
from dynamo.protocols.responses import Response
from dynamo.text.detokenizer import json_text

SHORT_BYTES = 64 << 10
"""What requests of shorter bodies repeat is encoded with each event."""
SLICE_CHARS = 1 << 18
"""Characters of a text that are encoded at a time: a tenth of a millisecond; other threads run in between."""
NO_INSTRUCTIONS, NO_TOOLS = b'"instructions":null', b'"tools":[]'
"""Fields of an encoded response that repeats neither."""


class RequestEcho(Struct, frozen=True):
    """Instructions and tools as JSON in parts, which all events share."""

    instructions: list[bytes]
    tools: list[bytes]
    """The elements of the list, with the commas between them."""

    def within(self, response: Response) -> list[bytes]:
        """Return a response encoded in parts, with these fields in place of its own."""
        rest = json_encode(replace(response, instructions=None, tools=[]))
        # No value before the instructions has unescaped quotes, except its own, and none after the tools.
        head, _, rest = rest.partition(NO_INSTRUCTIONS)
        middle, _, tail = rest.rpartition(NO_TOOLS)
        return [head + b'"instructions":', *self.instructions, middle + b'"tools":[', *self.tools, b"]" + tail]


def is_long_echo(request: ResponseRequest, body_bytes: int) -> bool:
    """Return whether the events of a response repeat much of its request, whose body had so many bytes."""
    return body_bytes > SHORT_BYTES and (bool(request.tools) or len(request.instructions or "") > SHORT_BYTES)


def echo_of(request: ResponseRequest) -> RequestEcho:
    """Return what the events of a response repeat. For a thread: it takes about a millisecond for a megabyte."""
    text = request.instructions
    tools: list[bytes] = []
    for tool in request.tools or ():
        tools += [b",", json_encode(shown_tool(tool))]
    return RequestEcho([b"null"] if text is None else _text_parts(text), tools[1:])


def _text_parts(text: str) -> list[bytes]:
    """Return a text as JSON in parts."""
    starts = range(0, len(text), SLICE_CHARS)
    return [b'"', *[json_text(text[start : start + SLICE_CHARS]) for start in starts], b'"']
