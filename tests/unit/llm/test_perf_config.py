"""Descriptions of an engine's speed and of simulated reasoning."""

import pytest

from dynamo._core import AisPerfConfig, ReasoningConfig
from dynamo.core.errors import InvalidArgument


def test_perf_config_copies_a_mapping_or_an_object() -> None:
    values = {"backend": "vllm", "tp": 2}
    config = AisPerfConfig(values)
    assert config.to_dict() == values
    assert AisPerfConfig(config).to_dict() == values
    with pytest.raises(InvalidArgument, match="mapping"):
        AisPerfConfig("x")


def test_reasoning_config_checks_its_tokens() -> None:
    assert ReasoningConfig(1, 2, 0.5).to_dict()["thinking_ratio"] == 0.5
    with pytest.raises(OverflowError, match="start_thinking_token_id"):
        ReasoningConfig(-1, 2, 0.5)
