"""Gate: authentication, rate limits and CORS of a request, evaluated once its headers are complete."""

import logging
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from msgspec import Struct

from dynamo.core.errors import ConfigError
from dynamo.core.metrics import Counter, MetricsRegistry
from dynamo.http.server.access import ApiCaller, KeyLimits, KeyRing, KeyUsage, plain_keys, read_keys
from dynamo.http.server.cors import Cors
from dynamo.serving.errors import ErrorAnswer

logger = logging.getLogger(__name__)

Headers = Sequence[tuple[bytes, bytes]]

NO_KEY = ErrorAnswer(
    401,
    "An API key is required: send it as 'Authorization: Bearer <key>' or as 'x-api-key: <key>'",
    code="invalid_api_key",
    label="unauthorized",
)
WRONG_KEY = ErrorAnswer(401, "Incorrect API key provided", code="invalid_api_key", label="unauthorized")


class Account:
    """One request of a caller, from its headers to its end."""

    __slots__ = ("_caller", "_is_closed", "_metrics", "_now")

    def __init__(self, caller: ApiCaller, metrics: "KeyMetrics", now: Callable[[], float]) -> None:
        self._caller = caller
        self._metrics = metrics
        self._now = now
        self._is_closed = False

    @property
    def name(self) -> str:
        """Name of the caller in metrics and logs."""
        return self._caller.name

    @property
    def is_admin(self) -> bool:
        """Whether the caller may use admin routes."""
        return self._caller.limits.admin

    @property
    def owner(self) -> str:
        """Owner that is stored with the caller's files, batches and responses."""
        return self._caller.owner

    def require(self, model: str) -> None:
        """Raise `HttpError` (403) if the caller may not use the model."""
        self._caller.require(model)

    def may_use(self, model: str) -> bool:
        return self._caller.may_use(model)

    def spend(self, tokens: int) -> None:
        """Count the tokens that were read and written for the request."""
        self._caller.spend(tokens, self._now())
        self._metrics.tokens(self.name).inc(tokens)

    def close(self) -> None:
        """End the request. Further calls do nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._caller.release()


class AuthDecision(Struct, frozen=True):
    """Decision about one request."""

    refusal: ErrorAnswer | None = None
    is_preflight: bool = False
    headers: Headers = ()
    """Additional headers of its response."""
    account: Account | None = None


OPEN = AuthDecision()


class KeyMetrics:
    """Metrics by the names of API keys."""

    def __init__(self, registry: MetricsRegistry, prefix: str) -> None:
        self._requests = registry.counter(f"{prefix}_api_key_requests_total", "Requests admitted", ["key"])
        self._refusals = registry.counter(f"{prefix}_api_key_refusals_total", "Requests refused", ["key", "reason"])
        self._tokens = registry.counter(f"{prefix}_api_key_tokens_total", "Tokens read and written", ["key"])

    def admitted(self, key: str) -> None:
        self._requests.labels(key=key).inc()

    def refused(self, key: str, reason: str) -> None:
        self._refusals.labels(key=key, reason=reason).inc()

    def tokens(self, key: str) -> Counter:
        return self._tokens.labels(key=key)


class Gate:
    """Authentication and CORS of one service."""

    def __init__(
        self,
        open_paths: Collection[bytes],
        metrics: KeyMetrics,
        *,
        cors: Cors | None = None,
        keys: "Keys | None" = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`open_paths` need no key. Admin routes check the account themselves (`RouteTable.plain`)."""
        self._open_paths = frozenset(open_paths)
        self._metrics = metrics
        self._cors = cors
        self._keys = keys
        self._now = now

    def judge(self, method: bytes, path: bytes, headers: Headers) -> AuthDecision:
        """Decide whether a request is served, refused or answered as a CORS preflight."""
        answer_headers: Headers = ()
        if self._cors is not None:
            origin = value_of(headers, b"origin")
            answer_headers = self._cors.headers(origin)
            if method == b"OPTIONS" and origin is not None and value_of(headers, b"access-control-request-method"):
                wanted = value_of(headers, b"access-control-request-headers")
                return AuthDecision(is_preflight=True, headers=self._cors.preflight(origin, wanted))
        if self._keys is None or path in self._open_paths:
            return AuthDecision(headers=answer_headers) if answer_headers else OPEN
        return self._judge_key(self._keys.ring, headers, answer_headers)

    def _judge_key(self, ring: KeyRing, headers: Headers, answer_headers: Headers) -> AuthDecision:
        caller = ring.find(headers)
        if caller is None:
            is_named = value_of(headers, b"authorization") or value_of(headers, b"x-api-key")
            self._metrics.refused("", "wrong_key" if is_named else "no_key")
            challenge = (b"www-authenticate", b"Bearer")
            return AuthDecision(WRONG_KEY if is_named else NO_KEY, headers=[*answer_headers, challenge])
        too_much = caller.admit(self._now())
        if too_much is not None:
            self._metrics.refused(caller.name, too_much.limit)
            refusal = ErrorAnswer(
                429,
                str(too_much),
                code="rate_limit_exceeded",
                label="rate_limit",
                retry_after_s=too_much.retry_after_s,
            )
            return AuthDecision(refusal, headers=answer_headers)
        self._metrics.admitted(caller.name)
        return AuthDecision(headers=answer_headers, account=Account(caller, self._metrics, self._now))


class Keys:
    """Keys of the command line, and those of a file that is reread when it changes."""

    def __init__(
        self, given: Sequence[str], path: str | None, admin: Sequence[str] = (), usage: KeyUsage | None = None
    ) -> None:
        """Raise `ConfigError`, also for a file without keys if the command line gives none."""
        self._given = plain_keys(given, admin)
        self._path = None if path is None else Path(path)
        self._seen: object = None
        self.ring = KeyRing(usage=usage)
        self.ring.replace(self._all())
        if not len(self.ring):
            raise ConfigError(f"--api-keys-file {path}: expected at least one key")

    @classmethod
    def of(
        cls, given: Sequence[str], path: str | None, admin: Sequence[str] = (), usage: KeyUsage | None = None
    ) -> "Keys | None":
        """Return the keys, None if no key option is set. Raise `ConfigError`."""
        return cls(given, path, admin, usage) if given or admin or path is not None else None

    def owner_of_name(self, name: str) -> str | None:
        """Return the owner of stored objects for the keys file's entry with that name.

        Keys of flags and variables have names too, but these are positions, which do not identify a key.
        """
        return None if any(one.name == name for one in self._given) else self.ring.owner_of(name)

    def refresh(self) -> None:
        """Read the file again if it has changed; an invalid file changes nothing."""
        if self._path is None or _stamp(self._path) == self._seen:
            return
        try:
            self.ring.replace(self._all())
        except ConfigError as error:
            logger.warning("failed to reload API keys, keeping the previous ones: %s", error)
        else:
            logger.info("reloaded API keys", extra={"keys": len(self.ring)})

    def _all(self) -> list[KeyLimits]:
        if self._path is None:
            return self._given
        self._seen = _stamp(self._path)
        try:
            text = self._path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-keys-file {self._path}: {_why(error)}") from None
        return [*self._given, *read_keys(text, str(self._path))]


def value_of(headers: Headers, wanted: bytes) -> bytes | None:
    """Return the first header with that (lower-case) name."""
    for name, value in headers:
        if name == wanted:
            return value
    return None


def _stamp(path: Path) -> object:
    """Return file attributes that change when the file does."""
    try:
        facts = path.stat()
    except OSError:
        return None
    return (facts.st_mtime_ns, facts.st_size, facts.st_ino)


def _why(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else "no UTF-8"
