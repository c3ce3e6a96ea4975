"""Engines: from an engine's name to its simulation."""

from typing import Any

from dynamo.mocker.simulation.batching import Batching
from dynamo.mocker.simulation.rules import EngineType, Limits
from dynamo.mocker.simulation.scheduler import Simulation
from dynamo.mocker.simulation.sglang import SglangSimulation
from dynamo.mocker.simulation.timing import StepTimes
from dynamo.mocker.simulation.tokens import TokenSource
from dynamo.mocker.simulation.trtllm import TrtllmSimulation

ENGINES: dict[EngineType, type[Batching[Any]]] = {
    "vllm": Simulation,
    "sglang": SglangSimulation,
    "trtllm": TrtllmSimulation,
}


def simulate(limits: Limits, timing: StepTimes, source: TokenSource, dp_rank: int = 0) -> Batching[Any]:
    """One rank of the engine that the limits name."""
    return ENGINES[limits.engine_type](limits, timing, source, dp_rank)
