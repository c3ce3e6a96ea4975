"""SglangConfig: assignment of flags to the adapter and to SGLang."""

import pytest

from dynamo.backend.disagg import DisaggregationMode
from dynamo.core.errors import ConfigError
from dynamo.sglang.config import engine_arguments, read_command_line


def test_unknown_flags_are_passed_to_sglang() -> None:
    config, rest = read_command_line(["--model-path", "x", "--enable-rl", "--tp", "2"])
    assert config.enable_rl
    assert rest == ["--model-path", "x", "--tp", "2"]
    assert engine_arguments(config, rest) == rest


@pytest.mark.parametrize(
    ("mode", "role"),
    [
        ("null", DisaggregationMode.AGGREGATED),
        ("prefill", DisaggregationMode.PREFILL),
        ("decode", DisaggregationMode.DECODE),
    ],
)
def test_disaggregation_mode_sets_the_role_and_the_engine_flag(mode: str, role: DisaggregationMode) -> None:
    config, rest = read_command_line(["--disaggregation-mode", mode])
    assert config.role is role
    assert engine_arguments(config, rest) == ([] if mode == "null" else ["--disaggregation-mode", mode])


@pytest.mark.parametrize(
    "words",
    [
        ["--use-sglang-tokenizer"],
        ["--disagg-config", "x"],
        ["--disaggregation-mode", "encode"],
        ["--engine-route", "a=b:c"],
    ],
)
def test_unsupported_flag_is_refused_by_name(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=words[0]):
        read_command_line(words)
