"""TemperatureProcessor: an example that scales the logits."""

from collections.abc import Sequence
from typing import Any

from dynamo.logits_processing.base import BaseLogitsProcessor


class TemperatureProcessor(BaseLogitsProcessor):
    """Processor that divides the logits by a temperature above 0; below 1 the distribution becomes sharper."""

    def __init__(self, temperature: float = 1.0) -> None:
        if not temperature > 0:
            raise ValueError(f"temperature {temperature}: must be above 0")
        self.temperature = temperature

    def __call__(self, input_ids: Sequence[int], logits: Any) -> None:
        """Divide all logits."""
        logits /= self.temperature
