"""`nvext` is strict: an unknown field is named in the error, with all known fields."""

import json
from typing import Any

import pytest

from dynamo.core.errors import InvalidArgument
from dynamo.protocols.nvext import NvExt
from dynamo.protocols.openai import decode_chat


def decoded(nvext: dict[str, Any]) -> NvExt:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "nvext": nvext}
    request = decode_chat(json.dumps(body).encode())
    assert request.nvext is not None
    return request.nvext


@pytest.mark.parametrize(
    ("nvext", "param", "known"),
    [({"foo": 1}, "nvext", "`greed_sampling`"), ({"agent_hints": {"foo": 1}}, "nvext.agent_hints", "`osl`")],
)
def test_unknown_nvext_field_error_lists_the_known_fields(nvext: dict[str, Any], param: str, known: str) -> None:
    with pytest.raises(InvalidArgument, match="unknown field `foo`, expected one of") as refused:
        decoded(nvext)
    assert known in str(refused.value)
    assert refused.value.param == param


def test_worker_ids_are_unsigned_64_bit_numbers() -> None:
    largest = (1 << 64) - 1
    assert decoded({"backend_instance_id": largest, "decode_worker_id": 0}).backend_instance_id == largest
    with pytest.raises(InvalidArgument, match="backend_instance_id"):
        decoded({"backend_instance_id": -1})


def test_agent_hints_are_typed() -> None:
    hints = decoded({"agent_hints": {"priority": -5, "osl": 7, "latency_sensitivity": 0.5}}).agent_hints
    assert hints is not None
    assert (hints.priority, hints.osl, hints.latency_sensitivity) == (-5, 7, 0.5)
    with pytest.raises(InvalidArgument, match="osl"):
        decoded({"agent_hints": {"osl": -1}})


def test_routing_constraints_have_required_and_preferred_taints() -> None:
    constraints = decoded({"routing_constraints": {"preferred_taints": {"a": 1}}}).routing_constraints
    assert constraints is not None
    assert constraints.preferred_taints == {"a": 1.0}
    with pytest.raises(InvalidArgument, match="expected one of `required_taints`, `preferred_taints`"):
        decoded({"routing_constraints": {"surprise": 1}})
