"""ext_proc responses."""

import json

import pytest

from dynamo.core.errors import HttpError, InvalidArgument, NotReady, Overloaded
from dynamo.epp import replies
from dynamo.serving.errors import answer_to


def test_destination_is_a_header_and_metadata_and_replaces_client_headers() -> None:
    made = replies.with_destination("request_headers", "10.0.0.1:8000", {"x-dynamo-worker-instance-id": "7"})
    common = made.request_headers.response
    given = {one.header.key: one.header.raw_value for one in common.header_mutation.set_headers}
    assert given == {"x-gateway-destination-endpoint": b"10.0.0.1:8000", "x-dynamo-worker-instance-id": b"7"}
    removed = set(common.header_mutation.remove_headers)
    assert {"x-dynamo-prefill-instance-id", "x-worker-instance-id", "x-prefiller-host-port"} <= removed
    assert "x-dynamo-worker-instance-id" not in removed
    assert common.clear_route_cache
    lb = made.dynamic_metadata.fields["envoy.lb"].struct_value.fields
    assert lb["x-gateway-destination-endpoint"].string_value == "10.0.0.1:8000"


@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (Overloaded("full"), 429, "1"),
        (NotReady("none"), 503, "1"),
        (InvalidArgument("bad"), 400, None),
        (HttpError(413, "large"), 413, None),
        (HttpError(499, "gone"), 400, None),
        (HttpError(599, "odd"), 500, None),
        (ValueError("bug"), 500, None),
    ],
)
def test_immediate_response_has_a_status_that_gateways_accept(
    error: Exception, status: int, retry_after: str | None
) -> None:
    immediate = replies.immediate(answer_to(error)).immediate_response
    headers = {one.header.key: one.header.raw_value.decode() for one in immediate.headers.set_headers}
    assert immediate.status.code == status
    assert headers["content-type"] == "application/json"
    assert headers.get("retry-after") == retry_after
    assert json.loads(immediate.body)["error"]["message"]
    assert immediate.details.startswith("dynamo_epp_")
