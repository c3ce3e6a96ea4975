"""The headers of a request announce its body; heads and bodies beyond the limits are recognised."""

import pytest

from dynamo.http.server.limits import HttpLimits
from dynamo.http.server.request_head import (
    as_lines,
    body_too_long,
    content_length,
    has_body,
    head_too_long,
    is_head_too_long,
    without_upgrade,
)

LIMITS = HttpLimits(headers=2, header_bytes=1 << 10, body_bytes=1 << 20)


@pytest.mark.parametrize(
    ("headers", "length", "has_one"),
    [
        ([], 0, False),
        ([(b"content-length", b"0")], 0, False),
        ([(b"host", b"x"), (b"content-length", b"12")], 12, True),
        ([(b"content-length", b"-1")], 0, True),
        ([(b"transfer-encoding", b"chunked")], 0, True),
    ],
)
def test_headers_announce_the_body(headers: list[tuple[bytes, bytes]], length: int, has_one: bool) -> None:
    assert content_length(headers) == length
    assert has_body(headers) is has_one


def test_head_is_too_long_by_the_number_or_the_size_of_its_headers() -> None:
    two, three = [(b"a", b"1")] * 2, [(b"a", b"1")] * 3
    assert not is_head_too_long(b"/", two, 100, LIMITS)
    assert is_head_too_long(b"/", three, 100, LIMITS)
    assert not is_head_too_long(b"/", two, 5000, LIMITS), "a body was received with the head"
    assert is_head_too_long(b"/" + b"x" * 1100, two, 5000, LIMITS)
    assert is_head_too_long(b"/", [(b"a", b"x" * 1100)], 5000, LIMITS)


def test_refusals_name_the_limits() -> None:
    assert head_too_long(LIMITS).status == 431
    assert "2 headers, 1 KB" in head_too_long(LIMITS).message
    assert body_too_long(LIMITS).status == 413
    assert "1 MB set by DYN_HTTP_BODY_LIMIT_MB" in body_too_long(LIMITS).message


def test_head_without_the_offer_of_another_protocol_keeps_all_other_headers() -> None:
    headers = [(b"host", b"x"), (b"connection", b"Upgrade"), (b"upgrade", b"h2c"), (b"content-length", b"5")]
    assert without_upgrade(b"POST", b"/a?b", headers) == b"POST /a?b HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\n"


def test_headers_are_encoded_one_per_line() -> None:
    assert as_lines([(b"a", b"1"), (b"b", b"2")]) == b"a: 1\r\nb: 2\r\n"
