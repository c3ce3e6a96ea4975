"""ForwardPassMetrics: the metrics of one step of an engine, as published on the event plane."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

logger = logging.getLogger(__name__)

FPM_VERSION: int = 1


class WelfordAccumulator:
    """Count, sum and variance of integers, from the exact sums of the values and of their squares."""

    __slots__ = ("_squares", "n", "s")

    def __init__(self) -> None:
        self.n = self.s = self._squares = 0

    def add(self, v: int) -> None:
        """Add a value."""
        self.n, self.s, self._squares = self.n + 1, self.s + v, self._squares + v * v

    def variance(self) -> float:
        """Return the population variance; 0 without values."""
        return (self.n * self._squares - self.s**2) / self.n**2 if self.n else 0.0


class ScheduledRequestMetrics(msgspec.Struct, frozen=True, gc=False):
    """Requests of the step: prompts with their cached tokens, and sequences that decode."""

    num_prefill_requests: int = 0
    sum_prefill_tokens: int = 0
    var_prefill_length: float = 0.0
    sum_prefill_kv_tokens: int = 0
    num_decode_requests: int = 0
    sum_decode_kv_tokens: int = 0
    var_decode_kv_tokens: float = 0.0


class QueuedRequestMetrics(msgspec.Struct, frozen=True, gc=False):
    """Requests that wait: new prompts, and preempted sequences."""

    num_prefill_requests: int = 0
    sum_prefill_tokens: int = 0
    var_prefill_length: float = 0.0
    num_decode_requests: int = 0
    sum_decode_kv_tokens: int = 0
    var_decode_kv_tokens: float = 0.0


class ForwardPassMetrics(msgspec.Struct, frozen=True, gc=False):
    """A message: one step of one rank. `wall_time` is in seconds; 0 marks a heartbeat."""

    version: int = FPM_VERSION
    worker_id: str = ""
    dp_rank: int = 0
    counter_id: int = 0
    wall_time: float = 0.0
    scheduled_requests: ScheduledRequestMetrics = ScheduledRequestMetrics()
    queued_requests: QueuedRequestMetrics = QueuedRequestMetrics()


class UnsupportedFpmVersionError(Exception):
    """A message of another version."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ForwardPassMetrics).decode


def encode(metrics: ForwardPassMetrics) -> bytes:
    """Return the message as msgpack."""
    return _encode(metrics)


def decode(data: bytes) -> ForwardPassMetrics | None:
    """Return the message; None, with a warning, if it is malformed or of another version."""
    with log_malformed(logger):
        message = _decode(data)
        if message.version == FPM_VERSION:
            return message
        logger.warning("forward-pass metrics of version %d: expected %d", message.version, FPM_VERSION)
    return None


@contextmanager
def log_malformed(target: logging.Logger) -> Iterator[None]:
    """Log a message that cannot be decoded."""
    try:
        yield
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        target.warning("malformed forward-pass metrics: %s", error)
