"""WorkerConfig and Worker of programs for upstream's SDK."""

import enum
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo.backend.disagg import DisaggregationMode as Role
from dynamo.common.backend import Worker, WorkerConfig
from dynamo.common.backend.bound_worker import worker_options
from dynamo.common.backend.sample_diffusion_engine import SampleDiffusionEngine
from dynamo.common.backend.sample_engine import SampleLLMEngine
from dynamo.common.backend.worker import bound_config
from dynamo.common.constants import DisaggregationMode
from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.llm import ModelInput


def flags(**more: Any) -> SimpleNamespace:
    given = {"namespace": "ns", "discovery_backend": "file", "request_plane": "tcp", "event_plane": None}
    return SimpleNamespace(**{**given, **more})


def test_parsed_flags_become_the_configuration() -> None:
    config = WorkerConfig.from_runtime_config(
        flags(
            component="c",
            dyn_tool_call_parser="hermes",
            dyn_default_thinking_mode="enabled",
            health_check_payload='{"a": 1}',
            route_to_encoder=True,
        ),
        "m",
        "s",
        ModelInput.Text,
        endpoint="override",
    )
    assert (config.namespace, config.component, config.endpoint) == ("ns", "c", "override")
    assert (config.model_name, config.served_model_name, config.model_input) == ("m", "s", ModelInput.Text)
    assert (config.tool_call_parser, config.default_thinking_mode) == ("hermes", "enabled")
    assert config.health_check_payload == {"a": 1, "_HEALTH_CHECK": True}
    assert config.route_to_encoder
    with pytest.raises(AttributeError, match="discovery_backend"):
        WorkerConfig.from_runtime_config(SimpleNamespace(namespace="n"), "m")
    with pytest.raises(TypeError, match="unknown"):
        WorkerConfig.from_runtime_config(flags(), "m", unknown=1)


class OtherMode(enum.Enum):
    """An engine's own modes."""

    PREFILL = "context"
    OTHER = "other"


def test_modes_of_other_enumerations_are_found_by_name() -> None:
    for given, expected in (
        ({}, DisaggregationMode.AGGREGATED),
        ({"disaggregation_mode": OtherMode.PREFILL}, DisaggregationMode.PREFILL),
        ({"serving_mode": DisaggregationMode.DECODE}, DisaggregationMode.DECODE),
    ):
        assert WorkerConfig.from_runtime_config(flags(**given), "m").disaggregation_mode is expected
    for wrong in ("prefill", OtherMode.OTHER):
        with pytest.raises(TypeError, match="DisaggregationMode"):
            WorkerConfig.from_runtime_config(flags(disaggregation_mode=wrong), "m")


def test_configuration_becomes_the_workers_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_ENGINE_REQUEST_LIMIT", "3")
    config = WorkerConfig(
        "ns",
        "c",
        "e",
        discovery_backend="mem",
        event_plane="nats",
        disaggregation_mode=DisaggregationMode.PREFILL,
        structural_tag={"schema": "strict"},
        default_thinking_mode="disabled",
    )
    options = worker_options(bound_config(config))
    assert str(options.endpoint_id()) == "ns.c.e"
    assert (options.discovery_backend, options.request_plane, options.event_plane) == ("mem", "tcp", "nats")
    assert (options.role, options.engine_request_limit) == (Role.PREFILL, 3)
    policy = options.tag_policy()
    assert policy is not None
    assert (policy.scope, policy.schema) == ("auto", "strict")


async def test_engine_and_configuration_must_fit() -> None:
    with pytest.raises(InvalidArgument, match="must be Tokens for an LLMEngine"):
        await Worker(SampleLLMEngine(), WorkerConfig("n", model_input=ModelInput.Text)).run()
    with pytest.raises(InvalidArgument, match="must be Text or Tensor for a RawEngine"):
        await Worker(SampleDiffusionEngine(), WorkerConfig("n")).run()
    with pytest.raises(ConfigError, match="quic"):
        await Worker(SampleLLMEngine(), WorkerConfig("n", discovery_backend="mem", response_plane="quic")).run()
