"""Engines: the simulation of an engine by its name, and that of TensorRT-LLM."""

from dataclasses import dataclass
from typing import Any

from dynamo.mocker.simulation.batching import Batching
from dynamo.mocker.simulation.rules import EngineType, RankLimits
from dynamo.mocker.simulation.scheduler import Simulation
from dynamo.mocker.simulation.sequence import Owner, SimulatedSequence
from dynamo.mocker.simulation.sglang import SglangSimulation
from dynamo.mocker.simulation.timing import StepTimes
from dynamo.mocker.simulation.tokens import TokenSource


@dataclass(slots=True)
class TrtllmSimulation(Batching[Owner]):
    """One rank of TensorRT-LLM: guaranteed_no_evict allocates all blocks at admission and never preempts."""

    def _blocks_needed(self, sequence: SimulatedSequence[Owner]) -> int:
        return self._blocks_in_all(sequence)

    def _grow(self, step: int) -> None:
        for sequence in self._borders.pop(step, ()):
            self._settle(sequence, self.context_of(sequence, step))
            self._expect_border(sequence, step + self.limits.block_tokens)

    def blocks_held_by(self, sequence: SimulatedSequence[Owner]) -> int:
        return self._blocks_in_all(sequence)

    def _blocks_in_all(self, sequence: SimulatedSequence[Owner]) -> int:
        return self.blocks_of(len(sequence.prompt) + sequence.max_tokens - 1)


ENGINES: dict[EngineType, type[Batching[Any]]] = {
    "vllm": Simulation,
    "sglang": SglangSimulation,
    "trtllm": TrtllmSimulation,
}


def simulate(limits: RankLimits, timing: StepTimes, source: TokenSource, dp_rank: int = 0) -> Batching[Any]:
    """Return the simulation of one rank of the engine in `limits`."""
    return ENGINES[limits.engine_type](limits, timing, source, dp_rank)
