"""Types of request parameters."""

from tests.unit.trtllm.scripted import DisaggregatedParams, GuidedDecodingParams

__all__ = ["DisaggregatedParams", "GuidedDecodingParams"]
