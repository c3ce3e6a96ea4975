"""TrtllmSimulation: TensorRT-LLM's guaranteed_no_evict scheduler, which allocates all blocks at admission."""

from dataclasses import dataclass

from dynamo.mocker.simulation.batching import Batching
from dynamo.mocker.simulation.sequence import Owner, Sequence


@dataclass(slots=True)
class TrtllmSimulation(Batching[Owner]):
    """One rank of TensorRT-LLM. Sequences are never preempted."""

    def _blocks_needed(self, sequence: Sequence[Owner]) -> int:
        return self._blocks_in_all(sequence)

    def _reserve(self, sequence: Sequence[Owner], cached_tokens: int) -> int:
        return 0

    def _grow(self, step: int) -> None:
        for sequence in self._borders.pop(step, ()):
            self._settle(sequence, self.context_of(sequence, step))
            self._expect_border(sequence, step + self.limits.block_tokens)

    def blocks_held_by(self, sequence: Sequence[Owner]) -> int:
        return self._blocks_in_all(sequence)

    def _blocks_in_all(self, sequence: Sequence[Owner]) -> int:
        return self.blocks_of(len(sequence.prompt) + sequence.max_tokens - 1)
