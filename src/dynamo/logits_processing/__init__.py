"""Logits processors: functions that change the logits of each step, in place."""

from dynamo.logits_processing.base import BaseLogitsProcessor

__all__ = ["BaseLogitsProcessor"]
