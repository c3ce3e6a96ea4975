"""Movement: learned durations of moving KV blocks to a worker, from prefill workers and from its own lower tiers.

The router sees when a request is sent and when its first token arrives. What the prefill and one decode step do not explain is
attributed to the blocks that were moved, by linear regression over many requests:

    decode worker    constant + rate x tokens to be transferred + rate x tokens that the worker already had
    other workers    constant + rate x tokens in host memory    + rate x tokens on disk

An engine that transfers whole prompts has equal rates for both kinds of tokens on a decode worker, so cached blocks then do not
attract requests. Transfers within the transfer domain of the prefill worker and out of it are learned separately.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec

from dynamo.kv_router.regression import Regression

PENDING_MAX = 16_384
"""Requests without first token that are remembered; older ones are not learned from."""
MEMORY = 0.998
"""Weight of a request after each later one: about five hundred requests are remembered."""
SOLVE_EVERY = 16
UNIT_TOKENS = 10_000.0
TRANSFER_TOKEN_S = 2e-6
"""Initial duration: 128 KiB a token at 64 GB/s."""
HOST_TOKEN_S, DISK_TOKEN_S = 5e-6, 1.5e-5
"""Initial durations: a quarter and three quarters of the initial prefill pace, as upstream's default weights assume."""
FAR = 4.0
"""Initial ratio of the duration out of the transfer domain to that within it."""
ERROR_MAX = 0.5
"""Largest uncertainty of a first token's time, as a share of the wait, with which a request is learned from."""


@dataclass(slots=True)
class MoveTimes:
    """Duration of one kind of movement, linear in two counts of tokens, in seconds."""

    constant: float
    first: float
    second: float
    _regression: Regression = field(default_factory=lambda: Regression(MEMORY, SOLVE_EVERY, UNIT_TOKENS, UNIT_TOKENS))

    def seconds(self, first: float, second: float) -> float:
        """Return the expected duration for the two counts of tokens."""
        return self.constant + self.first * first + self.second * second

    def observe(self, first: float, second: float, seconds: float) -> None:
        """Record a movement."""
        if self._regression.note(first, second, seconds):
            self.constant, self.first, self.second = self._regression.solve((self.constant, self.first, self.second))


class Pending(msgspec.Struct, frozen=True):
    """A request whose first token has not arrived."""

    times: MoveTimes
    first: float
    second: float
    expected_s: float
    """Expected duration of everything but the movement."""
    sent_s: float


@dataclass(slots=True)
class Movement:
    """Durations of all movements, and the requests from which they are being learned."""

    near: MoveTimes = field(default_factory=lambda: MoveTimes(0.0, TRANSFER_TOKEN_S, 0.0))
    """Transfers within the prefill worker's transfer domain, and all transfers where there are no domains."""
    far: MoveTimes = field(default_factory=lambda: MoveTimes(0.0, FAR * TRANSFER_TOKEN_S, 0.0))
    tiers: MoveTimes = field(default_factory=lambda: MoveTimes(0.0, HOST_TOKEN_S, DISK_TOKEN_S))
    _pending: OrderedDict[str, Pending] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._pending)

    def sent(
        self, request_id: str, times: MoveTimes, first: float, second: float, expected_s: float, now: float
    ) -> None:
        """Remember a request from whose first token `times` are learned."""
        self._pending[request_id] = Pending(times, first, second, expected_s, now)
        self._pending.move_to_end(request_id)
        if len(self._pending) > PENDING_MAX:
            self._pending.popitem(last=False)

    def first_token(self, request_id: str, now: float, error_s: float = 0.0) -> None:
        """Learn from a first token that arrived up to `error_s` seconds before `now`."""
        pending = self._pending.pop(request_id, None)
        if pending is None:
            return
        waited_s = now - pending.sent_s - error_s / 2
        if waited_s > 0 and error_s <= ERROR_MAX * waited_s:
            pending.times.observe(pending.first, pending.second, max(0.0, waited_s - pending.expected_s))

    def drop(self, request_id: str) -> None:
        """Forget a request that ended without first token."""
        self._pending.pop(request_id, None)
