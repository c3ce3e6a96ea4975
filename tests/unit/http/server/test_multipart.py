"""Multipart: the parser returns exactly the parts of a form."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.core.errors import InvalidArgument
from dynamo.http.server import multipart
from dynamo.http.server.multipart import PARTS_MAX, FormPart, is_multipart, read_multipart

BOUNDARY = b"----boundary7x"
MEDIA = b'multipart/form-data; charset=utf-8; boundary="----boundary7x"'

names = st.text(st.characters(exclude_categories=("Cc", "Cs")), min_size=1, max_size=12)
data = st.binary(max_size=64).filter(lambda value: BOUNDARY not in value)
parts = st.lists(st.builds(FormPart, names, data, st.none() | names, st.just("image/png")), max_size=6)


def quoted(text: str) -> bytes:
    return text.replace("\\", "\\\\").replace('"', '\\"').encode()


def written(form: list[FormPart]) -> bytes:
    body = b"an ignored preamble\r\n" if len(form) % 2 else b""
    for part in form:
        body += b'--%b\r\nContent-Disposition: form-data; name="%b"' % (BOUNDARY, quoted(part.name))
        if part.filename is not None:
            body += b'; filename="%b"' % quoted(part.filename)
        body += b"\r\nContent-Type: image/png\r\n\r\n" + part.data + b"\r\n"
    return body + b"--" + BOUNDARY + b"--\r\n"


@given(parts)
def test_multipart_form_round_trips(form: list[FormPart]) -> None:
    assert read_multipart(written(form), MEDIA) == form


@given(st.binary(max_size=200))
def test_multipart_parser_raises_only_invalid_argument(body: bytes) -> None:
    for given_body in (body, b"--" + BOUNDARY + b"\r\n" + body, written([]) + body):
        with suppress(InvalidArgument):
            read_multipart(given_body, MEDIA)


@pytest.mark.parametrize(
    ("body", "media"),
    [
        (written([]), b"multipart/form-data"),
        (written([]), b"multipart/form-data; boundary=" + b"x" * 201),
        (written([])[:-5], MEDIA),
        (b"--" + BOUNDARY + b"\r\n\r\ndata\r\n--" + BOUNDARY + b"--", MEDIA),
        (b"--" + BOUNDARY + b"\r\nno headers\r\n--" + BOUNDARY + b"--", MEDIA),
        (written([FormPart("x" * 8192, b"")]), MEDIA),
        (written([FormPart("x", b"")] * (PARTS_MAX + 1)), MEDIA),
    ],
)
def test_malformed_multipart_form_is_refused(body: bytes, media: bytes) -> None:
    with pytest.raises(InvalidArgument):
        read_multipart(body, media)


def test_multipart_form_accepts_the_maximum_number_of_parts() -> None:
    assert len(read_multipart(written([FormPart("x", b"")] * PARTS_MAX), MEDIA)) == PARTS_MAX


def test_multipart_file_is_a_data_url_and_a_field_is_text() -> None:
    assert FormPart("image", b"\x00\x01", "a.png", "image/png").data_url == "data:image/png;base64,AAE="
    assert FormPart("prompt", "ä".encode()).text == "ä"
    with pytest.raises(InvalidArgument, match="prompt"):
        FormPart("prompt", b"\xff").text  # noqa: B018 - what it raises is the test


def test_multipart_form_is_detected_by_content_type() -> None:
    assert is_multipart(b"Multipart/Form-Data; boundary=x")
    assert not is_multipart(b"application/json")
    assert not is_multipart(None)


@pytest.mark.parametrize("size", [9, 10, 11])
def test_part_of_more_bytes_than_allowed_is_refused(size: int) -> None:
    body = b"--x\r\nContent-Disposition: form-data; name=a\r\n\r\n" + b"d" * size + b"\r\n--x--"
    for sent in (body, bytearray(body)):
        if size <= 10:
            assert [part.data for part in read_multipart(sent, b"multipart/form-data; boundary=x", 10)] == [b"d" * size]
        else:
            with pytest.raises(InvalidArgument, match=r"a part has more than 10 bytes .DYN_MM_MAX_DATA_URL_MB."):
                read_multipart(sent, b"multipart/form-data; boundary=x", 10)


def test_form_is_the_same_in_slices_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"\r\n--x\r-\n--xy" * 3
    body = b"preamble\r\n--xyz\r\nContent-Disposition: form-data; name=a; filename=f\r\n\r\n" + data + b"\r\n--xyz--"
    for size in range(1, 40):
        monkeypatch.setattr(multipart, "SLICE_BYTES", size)
        assert [one.data for one in read_multipart(body, b"multipart/form-data; boundary=xyz")] == [data], size
