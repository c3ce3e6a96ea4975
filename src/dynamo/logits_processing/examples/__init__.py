"""Examples of logits processors."""

from dynamo.logits_processing.examples.forced_sequence import ForcedSequenceLogitsProcessor
from dynamo.logits_processing.examples.hello_world import HelloWorldLogitsProcessor
from dynamo.logits_processing.examples.temperature import TemperatureProcessor

__all__ = ["ForcedSequenceLogitsProcessor", "HelloWorldLogitsProcessor", "TemperatureProcessor"]
