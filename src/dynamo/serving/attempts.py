"""Attempts: the rules of all retries of a request on another worker. Pure.

A request without a token may be sent to a few workers; a stream that has begun may migrate as often as `--migration-limit`
allows. The loops that send a request again are in `migration` (generations), `prefill_router` (prefill phases),
`text_models` (relayed requests) and `grpc.calls` (tensors).
"""

from dynamo.core.backoff import Backoff
from dynamo.core.errors import Disconnected, DynamoException, StreamIncomplete, WorkerUnavailable

SENDS_MAX = 4
"""Maximum number of workers tried for a request without a token; more would only delay the error response."""

RETRY_FIRST_S, RETRY_MAX_S = 0.1, 1.0
"""Delay in seconds before a failed worker is retried: long enough for a connection to settle, too short to notice."""


def is_retryable(error: Exception) -> bool:
    """Return whether another worker may succeed after this error."""
    return isinstance(error, DynamoException) and error.retry_elsewhere


def connection_broke(error: Exception) -> bool:
    """Return whether the connection to a worker broke, rather than the worker: it may be tried again later."""
    return isinstance(error, Disconnected | StreamIncomplete)


def more_informative(error: Exception, last: Exception) -> Exception:
    """Return the failure of the request, or the failure of its retry if that describes more than a lack of workers."""
    return error if type(last) is WorkerUnavailable else last


class Attempts:
    """Attempts of one request.

    A worker that failed the request is excluded while another one is left. If none is left, a worker whose connection
    broke is admitted again after a delay: a short network failure must not end the streams of a model with a single worker.
    """

    __slots__ = ("_backoff", "_disconnected", "_migrations_left", "_sends_left", "_tokens_at_readmission", "excluded")

    def __init__(self, migrations_max: int = 0) -> None:
        """`migrations_max`: how often the request may be sent again after its first token."""
        self.excluded: set[int] = set()
        """Workers that failed the request."""
        self._disconnected: set[int] = set()
        self._sends_left = SENDS_MAX - 1
        self._migrations_left = migrations_max
        self._backoff: Backoff | None = None
        self._tokens_at_readmission = 0

    @property
    def may_send_again(self) -> bool:
        """Whether a request without a token may be sent to another worker."""
        return self._sends_left > 0

    @property
    def may_migrate(self) -> bool:
        """Whether a stream that has begun may continue on another worker."""
        return self._migrations_left > 0

    def count_send(self) -> None:
        """Count a repeated send of a request without a token."""
        self._sends_left -= 1

    def count_migration(self) -> None:
        """Count a migration of a stream, whose next worker may fail before its first token as often as the first one."""
        self._migrations_left -= 1
        self._sends_left = SENDS_MAX - 1

    def end(self) -> None:
        """Allow no further attempt: no worker is left."""
        self._sends_left = self._migrations_left = 0

    def exclude(self, worker_id: int, *, may_recover: bool) -> None:
        """Exclude a worker that failed the request; `may_recover`: it may be admitted again."""
        self.excluded.add(worker_id)
        if may_recover:
            self._disconnected.add(worker_id)

    @property
    def can_readmit(self) -> bool:
        """Whether an excluded worker may be admitted again."""
        return bool(self._disconnected)

    def readmission_delay_s(self, tokens: int, fraction: float) -> float:
        """Return the delay before `readmit`, in seconds: it doubles until the request makes progress.

        `tokens` is the number of output tokens so far; `fraction` (0 to 1) chooses the jitter.
        """
        if self._backoff is None or tokens > self._tokens_at_readmission:
            self._backoff = Backoff(RETRY_FIRST_S, RETRY_MAX_S)
        self._tokens_at_readmission = tokens
        return self._backoff.next(fraction)

    def readmit(self) -> None:
        """Admit the workers whose connection broke."""
        self.excluded -= self._disconnected
        self._disconnected.clear()
