"""Log-probability."""

from tests.unit.trtllm.scripted import Logprob

__all__ = ["Logprob"]
