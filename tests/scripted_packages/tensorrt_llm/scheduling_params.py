"""Which rank a request is for."""

from tests.unit.trtllm.scripted import SchedulingParams

__all__ = ["SchedulingParams"]
