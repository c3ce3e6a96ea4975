"""PrefillDecay: prompts under way shrink while they are computed (`--router-prefill-load-model ais`, serving-plane.md §4.9).

Without it a prompt counts in full until its first token is there. With it the oldest prompt of each slot shrinks evenly
over the time that it is expected to take; those behind it wait, and count in full. When it is done the next one is the
oldest, from that moment on. Pure: it is told the time.
"""

from collections.abc import MutableSequence
from dataclasses import dataclass


@dataclass(slots=True)
class _Prompt:
    tokens: int
    seconds: float
    """How long it is expected to take."""
    booked_at: float


@dataclass(slots=True)
class _Queue:
    prompts: dict[str, _Prompt]
    """In the order of booking; the first one shrinks."""
    began_at: float
    """When it became the first."""


class PrefillDecay:
    """The prompts of all slots that are being computed."""

    def __init__(self) -> None:
        self._queues: dict[int, _Queue] = {}

    def __len__(self) -> int:
        return sum(len(queue.prompts) for queue in self._queues.values())

    def add(self, slot: int, request_id: str, tokens: int, seconds: float, now: float) -> None:
        """A prompt was given to a slot."""
        prompt = _Prompt(tokens, seconds, now)
        queue = self._queues.get(slot)
        if queue is None:
            self._queues[slot] = _Queue({request_id: prompt}, now)
        else:
            queue.prompts[request_id] = prompt

    def remove(self, slot: int, request_id: str, now: float | None = None) -> None:
        """It is computed, or nobody wants it any more, as was noticed `now`.

        That may be late, so the next one begins where this one should have ended, if that was before.
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
        """Tokens of a slot's prompts that are computed already."""
        queue = self._queues.get(slot)
        if queue is None:
            return 0.0
        first = next(iter(queue.prompts.values()))
        if first.seconds <= 0:
            return float(first.tokens)
        return first.tokens * min(1.0, max(0.0, (now - queue.began_at) / first.seconds))

    def subtract(self, prefill_tokens: MutableSequence[float], now: float) -> None:
        """Takes them from the load of every slot."""
        for slot in self._queues:
            prefill_tokens[slot] -= self.done(slot, now)
