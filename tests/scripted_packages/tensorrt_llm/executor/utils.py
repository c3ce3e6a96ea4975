"""Request error."""

from tests.unit.trtllm.scripted import RequestError

__all__ = ["RequestError"]
