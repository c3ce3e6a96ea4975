"""What a request is made of."""

from tests.unit.trtllm.scripted import DisaggregatedParams, GuidedDecodingParams

__all__ = ["DisaggregatedParams", "GuidedDecodingParams"]
