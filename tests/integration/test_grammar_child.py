"""Grammars that take unbounded time or memory are stopped in a child process."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from dynamo.core.errors import DynamoException, InvalidArgument, WorkerOverloaded
from dynamo.core.memory import resident_bytes
from dynamo.cpu.compiler import ChildTrial
from dynamo.cpu.config import DEMO_MODEL
from dynamo.protocols.engine import GuidedDecoding

TIMEOUT_S = 3.0
PATIENT_S = 60.0  # For a grammar that takes milliseconds, and the start of its process; an endless one takes minutes.


def endless(seed: int = 0) -> GuidedDecoding:
    """Return a schema whose compilation takes minutes and gigabytes."""
    patterns = [{"type": "string", "pattern": f"(.*a.*){{{number + 2 + seed}}}"} for number in range(24)]
    return GuidedDecoding(json={"allOf": patterns})


@pytest.fixture
def trial() -> Iterator[ChildTrial]:
    made = ChildTrial(DEMO_MODEL, 2048)
    yield made
    made.close()


def test_trial_measures_an_ordinary_grammar(trial: ChildTrial) -> None:
    assert trial.measure(GuidedDecoding(regex="[0-9]+"), None, PATIENT_S) < 64 << 20
    with pytest.raises(InvalidArgument, match="regular expression"):
        trial.measure(GuidedDecoding(regex="("), None, PATIENT_S)


def test_trial_stops_an_endless_grammar_and_others_continue(trial: ChildTrial) -> None:
    trial.measure(GuidedDecoding(regex="[0-9]+"), None, PATIENT_S)
    before = resident_bytes()
    with ThreadPoolExecutor(4) as threads:
        slow = [threads.submit(trial.measure, endless(seed), None, TIMEOUT_S) for seed in range(4)]
        time.sleep(0.2)
        began_s = time.monotonic()
        trial.measure(GuidedDecoding(regex="[a-z]+"), None, PATIENT_S)
        waited_s = time.monotonic() - began_s
        ends = [one.exception(60.0) for one in slow]
    assert all(isinstance(end, InvalidArgument | WorkerOverloaded) for end in ends)
    assert any("took longer than" in str(end) or "needs more than" in str(end) for end in ends)
    assert waited_s < PATIENT_S
    assert resident_bytes() - before < 64 << 20


def test_closed_trial_raises(trial: ChildTrial) -> None:
    trial.close()
    with pytest.raises(DynamoException):
        trial.measure(GuidedDecoding(regex="[0-9]+"), None, PATIENT_S)
