"""Active sequences: events on active requests that router replicas exchange (topic `active_sequences_events`)."""

from typing import Literal

import msgspec

MARK_PREFILL_COMPLETED: Literal["MarkPrefillCompleted"] = "MarkPrefillCompleted"


class SequenceWorker(msgspec.Struct):
    """The worker rank to which a request was routed."""

    worker_id: int
    dp_rank: int = 0


class Duration(msgspec.Struct):
    """A duration in wire format."""

    secs: int
    nanos: int = 0

    @classmethod
    def of(cls, seconds: float) -> "Duration":
        """Convert from seconds."""
        nanos = round(seconds * 1e9)
        return cls(nanos // 1_000_000_000, nanos % 1_000_000_000)

    @property
    def seconds(self) -> float:
        """The duration in seconds."""
        return self.secs + self.nanos / 1e9


class PrefillLoadHint(msgspec.Struct):
    """The part of the prompt that must be computed."""

    initial_effective_prefill_tokens: int
    expected_prefill_duration: Duration | None = None


class AddedSequence(msgspec.Struct):
    """A request that was routed to a rank."""

    token_sequence: list[int] | None
    """Sequence hashes of its blocks; None if blocks are not counted."""
    track_prefill_tokens: bool = True
    expected_output_tokens: int | None = None
    prefill_load_hint: PrefillLoadHint | None = None


class AddRequest(msgspec.Struct):
    """The wire format's wrapper around an added sequence."""

    added: AddedSequence = msgspec.field(name="AddRequest")


class ActiveSequenceEvent(msgspec.Struct):
    """A state change of one request."""

    request_id: str
    worker: SequenceWorker
    data: AddRequest | Literal["MarkPrefillCompleted", "Free"]
    router_id: int
    """The id of the sending router."""
    lora_name: str | None = None


class ActiveSequenceEvents(msgspec.Struct):
    """A message of the topic."""

    events: list[ActiveSequenceEvent]
