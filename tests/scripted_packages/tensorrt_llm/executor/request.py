"""LoRA request."""

from tests.unit.trtllm.scripted import LoRARequest

__all__ = ["LoRARequest"]
