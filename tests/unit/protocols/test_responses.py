"""Responses of the Responses API."""

import msgspec

from dynamo.protocols.response_items import (
    FunctionCallItem,
)
from dynamo.protocols.responses import Response


def test_response_encodes_every_field_and_round_trips() -> None:
    item = FunctionCallItem("{}", "c", "f", "fc_1", "completed")
    response = Response(id="resp_1", created_at=1, model="m", output=[item])
    raw = msgspec.json.encode(response)
    assert set(msgspec.json.decode(raw)) == set(Response.__struct_fields__)
    assert msgspec.json.decode(raw, type=Response) == response
