"""ModelRuntimeConfig: set values are on the card, and unreadable ones are refused."""

import pytest

from dynamo.core.codec import json_decode, json_encode
from dynamo.core.errors import InvalidArgument
from dynamo.llm import ModelRuntimeConfig


def card_of(config: ModelRuntimeConfig) -> dict[str, object]:
    decoded: dict[str, object] = json_decode(json_encode(config.on_card()))
    return decoded


def test_runtime_config_fields_are_written_to_the_card() -> None:
    config = ModelRuntimeConfig()
    values = {
        "context_length": 10, "total_kv_blocks": 5, "max_num_seqs": 2, "max_num_batched_tokens": 7,
        "tool_call_parser": "hermes", "reasoning_parser": "qwen3", "tokenizer_backend": "fastokens",
        "exclude_tools_when_tool_choice_none": False, "data_parallel_start_rank": 1, "data_parallel_size": 4,
        "enable_local_indexer": False, "kv_event_publishing_enabled": True, "kv_event_source_mode": "push",
        "enable_eagle": True, "stable_routing_id": "s", "topology_domains": {"rack": "r1"},
        "kv_transfer_domain": "rack", "kv_transfer_enforcement": "preferred", "kv_transfer_preferred_weight": 0.5,
    }  # fmt: skip
    for name, value in values.items():
        setattr(config, name, value)
    config.taints = {"b", "a"}
    config.kv_state_endpoint = "ns.comp.state"
    config.set_disaggregated_endpoint("host", 7)
    config.set_engine_specific("role", '"draft"')
    config.set_engine_specific("limits", {"combined": 3})
    card = card_of(config)
    assert {name: card[name] for name in values} == values
    assert card["taints"] == ["a", "b"]
    assert card["kv_state_endpoint"] == {"namespace": "ns", "component": "comp", "name": "state"}
    assert card["disaggregated_endpoint"] == {"bootstrap_host": "host", "bootstrap_port": 7}
    assert card["runtime_data"] == {"role": "draft", "limits": {"combined": 3}}
    assert (config.get_engine_specific("role"), config.get_engine_specific("nothing")) == ("draft", None)


def test_runtime_config_omits_unset_fields_as_released_dynamo() -> None:
    card = card_of(ModelRuntimeConfig())
    assert card["enable_local_indexer"] is True
    for name in ("taints", "topology_domains", "kv_transfer_domain", "disaggregated_endpoint", "stable_routing_id"):
        assert name not in card


def test_runtime_config_refuses_values_that_cannot_be_encoded() -> None:
    config = ModelRuntimeConfig()
    with pytest.raises(AttributeError):
        config.contxt_length = 5  # type: ignore[attr-defined]
    with pytest.raises(InvalidArgument, match="JSON"):
        config.set_engine_specific("role", "draft")
    with pytest.raises(InvalidArgument, match="structural_tag"):
        config.set_structural_tag({"format": "x"})
    with pytest.raises(ValueError, match="kv_transfer_enforcement 'maybe': expected required or preferred"):
        config.kv_transfer_enforcement = "maybe"
    config.taints = {"dynamo.topology/rack=1"}
    with pytest.raises(InvalidArgument, match="reserved"):
        config.on_card()


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("context_length", "10", TypeError),
        ("context_length", 1 << 32, OverflowError),
        ("max_num_seqs", -1, OverflowError),
        ("data_parallel_size", None, TypeError),
        ("enable_eagle", 1, TypeError),
        ("tool_call_parser", 7, TypeError),
        ("taints", ["a"], TypeError),
        ("topology_domains", {"zone": 1}, TypeError),
        ("kv_transfer_preferred_weight", "1", TypeError),
        ("tokenizer_backend", "hf", ValueError),
    ],
)
def test_runtime_config_setter_raises_the_error_of_upstream(name: str, value: object, error: type[Exception]) -> None:
    config = ModelRuntimeConfig()
    before = getattr(config, name)
    with pytest.raises(error, match=name):
        setattr(config, name, value)
    assert getattr(config, name) == before


def test_runtime_config_writes_structural_tags_in_both_forms() -> None:
    config = ModelRuntimeConfig()
    assert config.structural_tag is None
    assert "structural_tag" not in card_of(config)
    config.set_structural_tag({"schema": "strict"})
    want = {
        "scope": "auto",
        "schema": "strict",
        "allow_tool_calls_with_structured_output": False,
        "reasoning_boundary": "auto",
        "tool_arguments_any_order": False,
    }
    assert config.structural_tag == want
    card = card_of(config)
    assert card["structural_tag"] == want
    forms = [card[f"structural_tag_{name}"] for name in ("mode", "scope", "schema")]
    assert forms == ["on", "auto", "strict"]
    config.set_structural_tag(None)
    assert "structural_tag" not in card_of(config)
