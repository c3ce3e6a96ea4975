"""Active sequences: what routers tell each other of requests under way (serving-plane.md §3.4, `active_sequences_events`)."""

from typing import Literal

import msgspec

MARK_PREFILL_COMPLETED: Literal["MarkPrefillCompleted"] = "MarkPrefillCompleted"


class SequenceWorker(msgspec.Struct):
    """The rank that a request was given to."""

    worker_id: int
    dp_rank: int = 0


class Duration(msgspec.Struct):
    """A time, as the wire has it."""

    secs: int
    nanos: int = 0

    @classmethod
    def of(cls, seconds: float) -> "Duration":
        """From seconds."""
        nanos = round(seconds * 1e9)
        return cls(nanos // 1_000_000_000, nanos % 1_000_000_000)

    @property
    def seconds(self) -> float:
        """In seconds."""
        return self.secs + self.nanos / 1e9


class PrefillLoadHint(msgspec.Struct):
    """How much of its prompt is to be computed."""

    initial_effective_prefill_tokens: int
    expected_prefill_duration: Duration | None = None


class AddedSequence(msgspec.Struct):
    """A request that was given to a rank."""

    token_sequence: list[int] | None
    """Sequence hashes of its blocks; None where blocks are not counted."""
    track_prefill_tokens: bool = True
    expected_output_tokens: int | None = None
    prefill_load_hint: PrefillLoadHint | None = None


class AddRequest(msgspec.Struct):
    """The same, as the wire wraps it."""

    added: AddedSequence = msgspec.field(name="AddRequest")


class ActiveSequenceEvent(msgspec.Struct):
    """What became of one request."""

    request_id: str
    worker: SequenceWorker
    data: AddRequest | Literal["MarkPrefillCompleted", "Free"]
    router_id: int
    """Who tells it."""
    lora_name: str | None = None


class ActiveSequenceEvents(msgspec.Struct):
    """A message on the topic."""

    events: list[ActiveSequenceEvent]
