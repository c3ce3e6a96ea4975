"""BodyChild: child process that decodes large request bodies before the frontend does."""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from dynamo.api.anthropic.convert import to_chat
from dynamo.core.child_process import serve
from dynamo.core.errors import InvalidArgument
from dynamo.protocols.anthropic import decode_message_count, decode_messages
from dynamo.protocols.embeddings import decode_classify, decode_embedding, decode_pooling, decode_rerank
from dynamo.protocols.native import decode_sglang, decode_vllm
from dynamo.protocols.openai import decode_chat, decode_completion
from dynamo.protocols.openai_ranges import OBJECTS_MAX, TEXT_VARIABLE, TOKEN_IDS_MAX, TOKENS_VARIABLE, request_bounds
from dynamo.protocols.response_items import decode_items
from dynamo.protocols.response_requests import decode_compact_request, decode_response_request, decode_token_count
from dynamo.protocols.strict import INVALID, UNREADABLE, fail_to_read
from dynamo.serving.bodies import slow_numbers
from dynamo.text.multimodal.media import media_of
from dynamo.text.multimodal.source import environment_limits


def _object(body: bytes) -> None:
    try:
        msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except UNREADABLE as error:
        fail_to_read(error, "")


DECODERS: Mapping[str, Callable[[bytes], Any]] = {
    "chat": lambda body: media_of(decode_chat(body, ignore_unsupported=True).messages),
    "completion": lambda body: decode_completion(body, ignore_unsupported=True),
    "responses": lambda body: _items(decode_response_request(body, ignore_unknown=True)),
    "compact": lambda body: _items(decode_compact_request(body, ignore_unknown=True)),
    "input_tokens": lambda body: _items(decode_token_count(body, ignore_unknown=True)),
    "messages": lambda body: to_chat(decode_messages(body, ignore_unknown=True), strip_preamble=False),
    "count_tokens": lambda body: to_chat(decode_message_count(body, ignore_unknown=True), strip_preamble=False),
    "embeddings": lambda body: decode_embedding(body, ignore_unknown=True),
    "classify": lambda body: decode_classify(body, ignore_unknown=True),
    "pooling": lambda body: decode_pooling(body, ignore_unknown=True),
    "rerank": lambda body: decode_rerank(body, ignore_unknown=True),
    "batch_line": _object,
    "event": _object,
    "media": _object,
    "vllm": decode_vllm,
    "sglang": decode_sglang,
}
"""Decoders by kind of body. They accept unknown fields; the serving process decides whether to reject those."""


FEW_KEYS = 1000
KEYS_MAX = TOKEN_IDS_MAX
"""Keys of all objects with more than `FEW_KEYS`, such as `logit_bias`: each takes longer to decode than a list item."""
FRACTIONS_MAX = 100_000
"""Numbers with a fraction or an exponent, outside of large objects: each takes up to 0.4 µs to decode."""
SLOW_NUMBERS_MAX = 1000
"""Numbers whose exponent has three digits: each takes up to 17 µs to decode."""
STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)
MEDIA_KEYS = ("data", "file_data", "prompt_embeds")
"""Fields whose strings are base64."""


def check(job: tuple[str, bytes]) -> None:
    """Decode a body and discard the result. Raise `InvalidArgument` or `HttpError`."""
    kind, body = job
    check_numbers(body)
    DECODERS[kind](body)
    check_values(msgspec.json.decode(body))


def check_numbers(body: bytes) -> None:
    """Raise `InvalidArgument` if the body has too many numbers that take long to decode."""
    if slow_numbers(body) > SLOW_NUMBERS_MAX and slow_numbers(STRING.sub(b"", body)) > SLOW_NUMBERS_MAX:
        raise InvalidArgument(
            f"{INVALID}the body has more than {SLOW_NUMBERS_MAX} numbers with exponents of three digits"
        )


def check_values(value: Any) -> None:
    """Raise `InvalidArgument` if the body has too many values or too much text, which bounds decoding time."""
    objects, values, chars = 0, 0, 0
    keys = fractions = 0
    bounds, media_chars_max = request_bounds(), environment_limits().data_url_bytes_max
    values_max = bounds.prompt_tokens + OBJECTS_MAX
    waiting: list[Any] = [value]
    while waiting:
        one = waiting.pop()
        objects += 1
        values += len(one)
        if isinstance(one, dict):
            if len(one) > FEW_KEYS:
                keys += len(one)
            chars += sum(map(len, one)) + sum(_text_chars(inner, key, media_chars_max) for key, inner in one.items())
            inners: Iterable[Any] = one.values()
        else:
            chars += sum(_text_chars(inner, "", media_chars_max) for inner in one)
            inners = one
        fractions += sum(type(inner) is float for inner in inners)
        waiting += [inner for inner in inners if isinstance(inner, dict | list)]
        if chars > bounds.text_chars:
            raise InvalidArgument(
                f"{INVALID}the body has more than {bounds.text_chars} characters of text without media ({TEXT_VARIABLE})"
            )
        if objects + len(waiting) > OBJECTS_MAX:
            raise InvalidArgument(f"{INVALID}the body has more than {OBJECTS_MAX} objects and lists")
        if keys > KEYS_MAX:
            raise InvalidArgument(f"{INVALID}the body has more than {KEYS_MAX} keys in large objects")
        if fractions > FRACTIONS_MAX:
            raise InvalidArgument(f"{INVALID}the body has more than {FRACTIONS_MAX} fractions")
        if values > values_max:
            raise InvalidArgument(f"{INVALID}the body has more than {values_max} values ({TOKENS_VARIABLE})")


def _text_chars(value: Any, key: str, media_chars_max: int) -> int:
    """Return the characters of a string; 0 for other values, and for media, which have a limit of their own."""
    if not isinstance(value, str):
        return 0
    if key not in MEDIA_KEYS and value[:5].lower() != "data:":
        return len(value)
    if len(value) > media_chars_max:
        shown = f"{len(value)} bytes: expected at most {media_chars_max} (DYN_MM_MAX_DATA_URL_MB)"
        raise InvalidArgument(f"{INVALID}{key or 'media'}: {shown}")
    return 0


def _items(request: Any) -> None:
    if request.input is not None:
        decode_items(request.input)


if __name__ == "__main__":
    status = serve(check)
    os._exit(status)  # Skip freeing millions of objects one by one.
