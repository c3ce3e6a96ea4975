"""Simulation: vLLM's scheduler, which allocates decode blocks on demand and preempts a sequence if none is free."""

from dataclasses import dataclass

from dynamo.mocker.simulation.batching import Batching
from dynamo.mocker.simulation.rules import RankLimits
from dynamo.mocker.simulation.sequence import Owner, SequenceState, SimulatedSequence
from dynamo.mocker.simulation.step import StepResult

__all__ = ["RankLimits", "Simulation", "StepResult"]


@dataclass(slots=True)
class Simulation(Batching[Owner]):
    """One rank of vLLM."""

    def _grow(self, step: int) -> None:
        """Allocate a block for every sequence whose last block is full, and preempt if none is free."""
        for sequence in self._borders.pop(step, ()):
            if sequence.state is SequenceState.DECODING:  # An allocation before may have preempted it.
                self._settle(sequence, self.context_of(sequence, step))
                self._take_one(sequence, step)

    def _take_one(self, sequence: SimulatedSequence[Owner], step: int) -> None:
        while not self.pool.take(1):
            victim = self._victim()
            self._preempt(victim, step)
            if victim is sequence:
                return
        sequence.private += 1
        self._expect_border(sequence, step + self.limits.block_tokens)

    def _victim(self) -> SimulatedSequence[Owner]:
        if self.limits.preempts_oldest:
            return next(iter(self.decoding))
        return self.partial or next(reversed(self.decoding))
