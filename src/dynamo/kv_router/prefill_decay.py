"""PrefillDecay: estimated progress of active prefills (`--router-prefill-load-model ais`).

Without it a prompt counts in full until its first token. With it the oldest prompt of each slot shrinks linearly over its
expected duration; those behind it wait and count in full. When the oldest prompt is done the next one begins to shrink.
"""

from collections.abc import MutableSequence
from dataclasses import dataclass


@dataclass(slots=True)
class _Prompt:
    tokens: int
    seconds: float
    """Expected duration."""
    booked_at: float


@dataclass(slots=True)
class _Queue:
    prompts: dict[str, _Prompt]
    """In order of booking; the first one shrinks."""
    began_at: float
    """Time at which the first prompt began."""


class PrefillDecay:
    """Active prefills of all slots."""

    def __init__(self) -> None:
        self._queues: dict[int, _Queue] = {}

    def __len__(self) -> int:
        return sum(len(queue.prompts) for queue in self._queues.values())

    def add(self, slot: int, request_id: str, tokens: int, seconds: float, now: float) -> None:
        """Add a prompt to a slot."""
        prompt = _Prompt(tokens, seconds, now)
        queue = self._queues.get(slot)
        if queue is None:
            self._queues[slot] = _Queue({request_id: prompt}, now)
        else:
            queue.prompts[request_id] = prompt

    def remove(self, slot: int, request_id: str, now: float | None = None) -> None:
        """Remove a prompt that was computed or cancelled, as observed at `now`.

        The observation may be late: the next prompt begins when this one was expected to end, if that was earlier.
        """
        queue = self._queues.get(slot)
        if queue is None or request_id not in queue.prompts:
            return
        is_first = next(iter(queue.prompts)) == request_id
        gone = queue.prompts.pop(request_id)
        if not queue.prompts:
            del self._queues[slot]
        elif is_first:
            ended_at = queue.began_at + gone.seconds
            ended_at = ended_at if now is None else min(now, ended_at)
            queue.began_at = max(ended_at, next(iter(queue.prompts.values())).booked_at)

    def done(self, slot: int, now: float) -> float:
        """Return the tokens of a slot's prompts that are estimated to be computed."""
        queue = self._queues.get(slot)
        if queue is None:
            return 0.0
        first = next(iter(queue.prompts.values()))
        if first.seconds <= 0:
            return float(first.tokens)
        return first.tokens * min(1.0, max(0.0, (now - queue.began_at) / first.seconds))

    def subtract(self, prefill_tokens: MutableSequence[float], now: float) -> None:
        """Subtract the estimated progress from the load of every slot, in place."""
        for slot in self._queues:
            prefill_tokens[slot] -= self.done(slot, now)
