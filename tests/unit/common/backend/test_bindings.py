"""Records of dynamo._core.backend: they accept and refuse what the released package does."""

from typing import Any

import pytest

from dynamo import _core
from dynamo._core import backend
from dynamo.core.errors import ConfigError
from dynamo.llm import MediaDecoder, ModelInput


def test_module_is_importable_by_both_forms() -> None:
    import dynamo._core.backend as imported

    assert imported is backend is _core.backend
    assert "backend" in dir(_core)
    assert not [name for name in backend.__all__ if not hasattr(backend, name)]


def test_disaggregation_modes_are_numbers_and_print_like_upstream() -> None:
    modes = backend.DisaggregationMode
    assert [int(mode) for mode in modes] == [1, 2, 3, 4]
    assert repr(modes.Prefill) == str(modes.Prefill) == "DisaggregationMode.Prefill"


def test_absent_registration_data_are_empty() -> None:
    found = backend.EngineConfig("m")
    assert (found.runtime_data, found.model_aliases, found.llm) == ({}, [], None)
    assert backend.EngineConfig("m", runtime_data={"a": (1, None)}).runtime_data == {"a": [1, None]}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"context_length": -1}, OverflowError),
        ({"context_length": 1 << 32}, OverflowError),
        ({"bootstrap_port": 70000}, OverflowError),
        ({"kv_cache_block_size": "16"}, TypeError),
        ({"bootstrap_host": 3}, TypeError),
    ],
)
def test_invalid_registrations_are_refused(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(arguments))):
        backend.LlmRegistration(**arguments)
    assert backend.LlmRegistration(total_kv_blocks=1 << 32).total_kv_blocks == 1 << 32


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"namespace": 3}, TypeError, "namespace: must be str, not int"),
        ({"disaggregation_mode": "prefill"}, TypeError, "disaggregation_mode: must be DisaggregationMode, not str"),
        ({"model_input": "Tokens"}, TypeError, "model_input"),
        ({"metrics_labels": {"a": "b"}}, TypeError, "metrics_labels: must be a list of pairs"),
        ({"metrics_labels": [("a",)]}, ValueError, "must be a list of pairs"),
        ({"health_check_payload": [1]}, ValueError, "must be a JSON object"),
        ({"health_check_payload": {"a": object()}}, ValueError, "health_check_payload must be JSON"),
        ({"structural_tag": {"scope": "x"}}, ValueError, "Invalid enum value 'x'"),
        ({"structural_tag": {"scpoe": "always"}}, ValueError, "unknown field `scpoe`"),
        ({"structural_tag": True}, TypeError, "structural_tag: must be dict, not bool"),
        ({"media_decoder": 3}, TypeError, "media_decoder: must be MediaDecoder"),
    ],
)
def test_invalid_configurations_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        backend.WorkerConfig(**{"namespace": "n", **arguments})


def test_positional_arguments_have_upstream_order() -> None:
    config = backend.WorkerConfig(
        "n", "c", "e", "m", "s", ModelInput.Text, "images", "t", "tool", "reason", False, False, False, [("a", "b")]
    )
    assert (config.component, config.endpoint, config.model_name, config.served_model_name) == ("c", "e", "m", "s")
    assert (config.tool_call_parser, config.reasoning_parser, config.metrics_labels) == ("tool", "reason", [("a", "b")])
    assert backend.WorkerConfig("n", media_decoder=MediaDecoder()).media_decoder is not None
    with pytest.raises(TypeError):
        backend.RuntimeConfig("file", "tcp", "zmq", "tcp")  # type: ignore[misc]


def test_worker_refuses_a_configuration_of_another_type() -> None:
    with pytest.raises(TypeError, match="config: must be WorkerConfig, not int"):
        backend.Worker(object(), 5, None)  # type: ignore[arg-type]


async def test_worker_of_another_loop_is_refused() -> None:
    with pytest.raises(RuntimeError, match="event loop"):
        await backend.Worker(object(), backend.WorkerConfig("n"), None).run()


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_sidecars_name_the_command_to_use_instead(engine: str) -> None:
    with pytest.raises(ConfigError, match=f"python -m dynamo.{engine}"):
        getattr(backend, f"_run_{engine}_sidecar")([])
