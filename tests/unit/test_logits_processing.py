"""Logits processors, with a list in the place of a tensor."""

import math
from typing import Any, Self

import pytest

from dynamo.logits_processing import BaseLogitsProcessor
from dynamo.logits_processing.examples import (
    ForcedSequenceLogitsProcessor,
    HelloWorldLogitsProcessor,
    TemperatureProcessor,
)


class Logit(float):
    def item(self) -> float:
        return float(self)


class Logits(list[Logit]):
    def fill_(self, value: float) -> None:
        self[:] = [Logit(value)] * len(self)

    def __itruediv__(self, divisor: float) -> Self:
        self[:] = [Logit(one / divisor) for one in self]
        return self

    def permitted(self) -> list[int]:
        return [index for index, one in enumerate(self) if one > -math.inf]


class Tokenizer:
    eos_token_id = 0

    def encode(self, text: str, **_: Any) -> list[int]:
        return [len(word) - 3 for word in text.split()]


def steps(processor: BaseLogitsProcessor, number: int) -> list[list[int]]:
    found = []
    for _ in range(number):
        logits = Logits(map(Logit, range(5)))
        processor([], logits)
        found.append(logits.permitted())
    return found


def test_sequence_is_forced_and_then_ends() -> None:
    assert steps(ForcedSequenceLogitsProcessor([3, 1], 0), 4) == [[3], [1], [0], [0]]
    assert steps(HelloWorldLogitsProcessor(Tokenizer()), 3) == [[2], [3], [0]]


def test_temperature_scales_in_place_and_must_be_positive() -> None:
    logits = Logits([Logit(1.0), Logit(2.0)])
    TemperatureProcessor(0.5)([], logits)
    assert logits == [2.0, 4.0]
    with pytest.raises(ValueError, match="temperature 0"):
        TemperatureProcessor(0)
