"""Phases of one HTTP request on its ext_proc stream."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.core.errors import HttpError, InvalidArgument
from dynamo.epp.messages import BUFFERED, CLASSES, FULL_DUPLEX_STREAMED, NONE, STREAMED
from dynamo.epp.phases import PickEvent, RequestPhases

Request = CLASSES["ProcessingRequest"]
LIMIT = 1 << 20


def headers(
    values: dict[str, str], *, mode: int | None = FULL_DUPLEX_STREAMED, ends: bool = False, subset: str | None = None
) -> Any:
    message = Request()
    message.request_headers.end_of_stream = ends
    for key, value in values.items():
        message.request_headers.headers.headers.add(key=key, raw_value=value.encode())
    if mode is not None:
        message.protocol_config.request_body_mode = message.protocol_config.response_body_mode = mode
    if subset is not None:
        fields = message.metadata_context.filter_metadata["envoy.lb.subset_hint"].fields
        fields["x-gateway-destination-endpoint-subset"].string_value = subset
    return message


def body(data: bytes, *, ends: bool) -> Any:
    message = Request()
    message.request_body.body, message.request_body.end_of_stream = data, ends
    return message


def trailers(phase: str = "request_trailers") -> Any:
    message = Request()
    getattr(message, phase).SetInParent()
    return message


def response_body(data: bytes, *, ends: bool) -> Any:
    message = Request()
    message.response_body.body, message.response_body.end_of_stream = data, ends
    return message


def kinds(responses: list[Any]) -> list[str]:
    return [one.WhichOneof("response") for one in responses]


def returned(responses: list[Any]) -> tuple[bytes, list[bool]]:
    """The body that streamed responses pass on, and which of them end it."""
    parts = [
        one.request_body.response.body_mutation.streamed_response for one in responses if one.HasField("request_body")
    ]
    return b"".join(part.body for part in parts), [part.end_of_stream for part in parts]


PATH = {":path": "/v1/chat/completions", ":method": "POST", "X-Tenant-Id": "t"}


def test_full_duplex_request_is_answered_when_its_body_is_complete() -> None:
    phases = RequestPhases(LIMIT)
    assert phases.receive(headers(PATH)) == ([], None)
    assert phases.awaits_body
    assert phases.receive(body(b"ab", ends=False)) == ([], None)
    responses, event = phases.receive(body(b"c", ends=True))
    assert (responses, event) == ([], PickEvent.PICK)
    assert not phases.awaits_body
    assert phases.request.body == b"abc"
    assert (phases.request.path, phases.request.method) == ("/v1/chat/completions", "POST")
    assert phases.request.headers == [(b"x-tenant-id", b"t")]
    made = phases.picked("10.0.0.1:8000", {"x-dynamo-dp-rank": "0"})
    assert kinds(made) == ["request_headers", "request_body"]
    assert returned(made) == (b"abc", [True])


@given(st.lists(st.binary(max_size=80_000), min_size=1, max_size=5), st.booleans())
def test_full_duplex_body_is_returned_complete_in_bounded_chunks(parts: list[bytes], has_trailers: bool) -> None:
    phases = RequestPhases(LIMIT)
    phases.receive(headers(PATH, mode=None))
    for number, part in enumerate(parts):
        phases.receive(body(part, ends=not has_trailers and number == len(parts) - 1))
    if has_trailers:
        assert phases.receive(trailers())[1] is PickEvent.PICK
    made = phases.picked("10.0.0.1:8000", {})
    passed, ends = returned(made)
    assert passed == b"".join(parts)
    assert all(len(one.request_body.response.body_mutation.streamed_response.body) <= 62_000 for one in made)
    assert sum(ends) == (0 if has_trailers else 1), "trailers end the body themselves"
    assert kinds(made)[0] == "request_headers"
    assert (kinds(made)[-1] == "request_trailers") is has_trailers


def test_buffered_headers_are_answered_at_once_and_the_destination_follows_with_the_body() -> None:
    phases = RequestPhases(LIMIT)
    responses, event = phases.receive(headers(PATH, mode=BUFFERED))
    assert (kinds(responses), event) == (["request_headers"], None)
    assert not responses[0].request_headers.response.HasField("header_mutation")
    assert phases.receive(body(b"abc", ends=False))[1] is PickEvent.PICK, "a buffered body is one message"
    (made,) = phases.picked("10.0.0.1:8000", {})
    common = made.request_body.response
    assert common.header_mutation.set_headers[0].header.raw_value == b"10.0.0.1:8000"
    assert not common.HasField("body_mutation")
    assert kinds(phases.receive(trailers())[0]) == ["request_trailers"]


def test_request_without_a_body_is_picked_at_its_headers() -> None:
    phases = RequestPhases(LIMIT)
    assert phases.receive(headers({":method": "GET", ":path": "/v1/models"}, ends=True))[1] is PickEvent.PICK
    assert kinds(phases.picked("10.0.0.1:8000", {})) == ["request_headers"]


@pytest.mark.parametrize(("mode", "name"), [(STREAMED, "STREAMED"), (NONE, "NONE"), (5, "GRPC"), (9, "9")])
def test_unsupported_body_mode_is_named(mode: int, name: str) -> None:
    with pytest.raises(HttpError, match=f"request_body_mode {name}: the endpoint picker requires"):
        RequestPhases(LIMIT).receive(headers(PATH, mode=mode))


@pytest.mark.parametrize("declared", [True, False])
def test_body_beyond_the_limit_is_refused_as_early_as_possible(declared: bool) -> None:
    phases = RequestPhases(8)
    length = {"content-length": "9"} if declared else {}
    messages = [headers({**PATH, **length}), body(b"x" * 9, ends=False)]
    with pytest.raises(HttpError) as caught:  # noqa: PT012 - the message that is refused depends on the case
        for message in messages:
            phases.receive(message)
    assert caught.value.code == 413
    assert phases.awaits_body is not declared


@pytest.mark.parametrize("encoding", ["gzip", "br", "identity", "Identity"])
def test_compressed_request_body_is_refused_at_its_headers(encoding: str) -> None:
    phases = RequestPhases(LIMIT)
    message = headers({**PATH, "content-encoding": encoding})
    if encoding.lower() == "identity":
        phases.receive(message)
        assert phases.awaits_body
        return
    with pytest.raises(HttpError, match=f"content-encoding {encoding}") as caught:
        phases.receive(message)
    assert caught.value.code == 415


def test_invalid_gateway_message_order_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="without a phase"):
        RequestPhases(LIMIT).receive(Request())
    phases = RequestPhases(LIMIT)
    phases.receive(headers(PATH))
    phases.receive(body(b"", ends=True))
    with pytest.raises(InvalidArgument, match="after the end"):
        phases.receive(body(b"x", ends=True))
    phases = RequestPhases(LIMIT)
    phases.receive(headers(PATH, mode=BUFFERED))
    with pytest.raises(InvalidArgument, match="no body"):
        phases.receive(trailers())


def test_response_reports_first_output_end_and_cached_tokens_once() -> None:
    phases = RequestPhases(LIMIT)
    message = Request()
    message.response_headers.SetInParent()
    assert phases.receive(message)[1] is None
    assert phases.receive(response_body(b"", ends=False))[1] is None
    assert phases.receive(response_body(b'data: {"x":1}\n\n', ends=False))[1] is PickEvent.FIRST_OUTPUT
    usage = b'data: {"usage":{"prompt_tokens_details":{"cached_tokens": 48}}}\n\n'
    assert phases.receive(response_body(usage, ends=False))[1] is None
    responses, event = phases.receive(response_body(b"data: [DONE]\n\n", ends=True))
    assert event is PickEvent.END
    assert responses[0].response_body.response.body_mutation.streamed_response.end_of_stream
    assert phases.cached_tokens == 48


def test_response_in_other_modes_passes_unchanged() -> None:
    phases = RequestPhases(LIMIT)
    phases.receive(headers(PATH, mode=BUFFERED))
    (answer,) = phases.receive(response_body(b"x", ends=True))[0]
    assert answer.WhichOneof("response") == "response_body"
    assert not answer.response_body.response.HasField("body_mutation")
    assert phases.cached_tokens is None


def test_response_may_begin_before_the_request_is_complete() -> None:
    phases = RequestPhases(LIMIT)
    phases.receive(headers(PATH))
    message = Request()
    message.response_headers.end_of_stream = True
    assert phases.receive(message)[1] is PickEvent.END
    assert not phases.awaits_body
    assert phases.receive(trailers("response_trailers"))[1] is PickEvent.END


def test_subset_restricts_the_addresses() -> None:
    phases = RequestPhases(LIMIT)
    phases.receive(headers(PATH, subset="10.0.0.1:8000, 10.0.0.2"))
    assert phases.request.subset == {"10.0.0.1:8000", "10.0.0.2"}
    phases = RequestPhases(LIMIT)
    phases.receive(headers(PATH, subset=""))
    assert phases.request.subset == frozenset()
    listed = headers(PATH)
    value = listed.metadata_context.filter_metadata["envoy.lb.subset_hint"].fields[
        "x-gateway-destination-endpoint-subset"
    ]
    value.list_value.values.add(string_value="10.0.0.3:1")
    phases = RequestPhases(LIMIT)
    phases.receive(listed)
    assert phases.request.subset == {"10.0.0.3:1"}
