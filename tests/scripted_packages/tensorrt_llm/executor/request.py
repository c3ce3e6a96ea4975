"""An adapter with a request."""

from tests.unit.trtllm.scripted import LoRARequest

__all__ = ["LoRARequest"]
