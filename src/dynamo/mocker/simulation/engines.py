"""Engines: create the simulation of an engine by its name."""

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
    """Return the simulation of one rank of the engine in `limits`."""
    return ENGINES[limits.engine_type](limits, timing, source, dp_rank)
