"""Engine classes: what a subclass must define, and logits processors."""

from typing import Any

import pytest

from dynamo.common.backend import engine
from dynamo.common.backend.engine import ForcedTokenSequenceSpec, LLMEngine, LogitsProcessorSpec, PythonProcessorSpec
from dynamo.common.constants import DisaggregationMode

FORCED = ForcedTokenSequenceSpec((7, 8), eos_token_id=2)


class WithoutCleanup(LLMEngine):
    """An engine that lacks a required method."""

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> Any:
        raise NotImplementedError

    async def start(self, worker_id: int) -> Any:
        raise NotImplementedError

    async def generate(self, request: Any, context: Any) -> Any:
        yield


def test_engine_without_a_required_method_cannot_be_created() -> None:
    with pytest.raises(TypeError, match="cleanup"):
        WithoutCleanup()  # type: ignore[abstract]


def test_logits_processors_are_for_workers_that_generate_unless_stated_otherwise() -> None:
    for mode, count in {"AGGREGATED": 1, "DECODE": 1, "PREFILL": 0, "ENCODE": 0}.items():
        found = engine.logits_processors_for_request(
            LogitsProcessorSpec((FORCED,)), disaggregation_mode=DisaggregationMode[mode]
        )
        assert len(found) == count, mode
    everywhere = LogitsProcessorSpec((FORCED,), generation_only=False)
    assert engine.logits_processors_for_request(everywhere, disaggregation_mode=DisaggregationMode.PREFILL) == [FORCED]


def test_only_forced_sequences_can_be_serialized() -> None:
    payload = engine.serialize_logits_processor_entries([FORCED])
    assert payload == [{"kind": "forced_sequence", "token_ids": [7, 8], "eos_token_id": 2}]
    assert engine.deserialize_logits_processor_entries(payload) == [FORCED]
    with pytest.raises(TypeError, match="cannot serialize a PythonProcessorSpec"):
        engine.serialize_logits_processor_entries([PythonProcessorSpec(lambda: None)])  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="kind 'x': must be 'forced_sequence'"):
        engine.deserialize_logits_processor_entries([{"kind": "x"}])
