"""Scheduling parameters: the rank of a request."""

from tests.unit.trtllm.scripted import SchedulingParams

__all__ = ["SchedulingParams"]
