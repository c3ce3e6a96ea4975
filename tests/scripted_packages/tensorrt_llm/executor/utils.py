"""A request that was wrong."""

from tests.unit.trtllm.scripted import RequestError

__all__ = ["RequestError"]
