"""Routing hints of a request, from its extension fields."""

from dynamo.protocols.engine import Routing
from dynamo.protocols.nvext import AgentHints, NvExt
from dynamo.text.preparing import routing_of


def test_request_without_hints_has_no_routing() -> None:
    assert routing_of(None) is None
    assert routing_of(NvExt()) is None


def test_cache_salt_and_adapter_are_routing_even_without_extension_fields() -> None:
    assert routing_of(None, "salt", "adapter") == Routing(cache_salt="salt", lora_name="adapter")


def test_negative_priority_never_moves_a_request_ahead() -> None:
    routing = routing_of(NvExt(agent_hints=AgentHints(priority=-3, osl=7)))
    assert routing is not None
    assert (routing.priority, routing.priority_jump, routing.expected_output_tokens) == (-3, 0.0, 7)
