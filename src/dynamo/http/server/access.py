"""Access: API keys, their rate limits and their models. Pure; the time is an argument.

A key is stored and looked up as a digest under a secret of this process, so that comparison times reveal nothing to a
client, which cannot compute the digests, and logs and dumps cannot contain a key. The permissions of keys are in a TOML
file:

    [[keys]]
    name = "team-a"                  # label in metrics and logs
    key = "sk-…"                     # or key_sha256 = "<the SHA-256 of the key, in hex>"
    requests_per_minute = 600
    tokens_per_minute = 200000
    concurrent_requests = 32
    models = ["Qwen/*", "demo"]      # names, or patterns with *
    admin = true                     # may also use the admin routes
"""

import contextlib
import fnmatch
import hashlib
import math
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import msgspec
from msgspec import Struct

from dynamo.core.api_keys import KEY_CHARS_MIN
from dynamo.core.errors import ConfigError, HttpError
from dynamo.core.token_bucket import TokenBucket

SECRET = secrets.token_bytes(32)
MINUTE_S = 60.0
OWNER = b"dynamo owner of files, batches and responses"
OWNER_BYTES = 16
BUSY_RETRY_S = 1  # Time until another concurrent request of the same key ends is unknown.


class KeyLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One entry of a keys file."""

    name: str
    key: str | None = None
    key_sha256: str | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    models: tuple[str, ...] | None = None
    admin: bool = False

    def plain_digest(self) -> bytes:
        """Return the SHA-256 of the key. Raise `ConfigError`."""
        if (self.key is None) == (self.key_sha256 is None):
            raise ConfigError(f"key {self.name!r}: expected either key or key_sha256")
        if self.key is not None:
            if len(self.key) < KEY_CHARS_MIN:
                raise ConfigError(f"key {self.name!r}: expected at least {KEY_CHARS_MIN} characters")
            if self.key != self.key.strip():  # Clients send keys in headers, which lose such spaces.
                raise ConfigError(f"key {self.name!r}: expected a key without spaces at its beginning or end")
            return hashlib.sha256(self.key.encode()).digest()
        try:
            plain = bytes.fromhex(self.key_sha256 or "")
        except ValueError:
            plain = b""
        if len(plain) != hashlib.sha256().digest_size:
            raise ConfigError(f"key {self.name!r}: key_sha256 is not 64 hexadecimal digits")
        return plain

    @property
    def is_limited(self) -> bool:
        """Return whether any limit counts requests or tokens."""
        return (self.requests_per_minute, self.tokens_per_minute, self.concurrent_requests) != (None, None, None)

    def check(self) -> "KeyLimits":
        """Return the entry. Raise `ConfigError` for an invalid limit."""
        for word in ("requests_per_minute", "tokens_per_minute", "concurrent_requests"):
            value = getattr(self, word)
            if value is not None and value < 1:
                raise ConfigError(f"key {self.name!r}: {word} = {value}: expected 1 or more")
        return self


class KeysFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of a keys file."""

    keys: tuple[KeyLimits, ...]


class UsageRow(Struct):
    """Usage of one key by all processes."""

    requests: tuple[float, float]
    """State of the bucket of requests."""
    tokens: tuple[float, float]
    concurrent: int
    """Requests in progress."""
    begun: int = 0
    """Requests that this process adds to those in progress; negative: that have ended."""


class KeyUsage(Protocol):
    """Storage of usage that several processes share."""

    def open(self, name: str) -> AbstractContextManager[UsageRow | None]:
        """Return the usage of a key for an exclusive change; None if it is not shared."""


class ApiCaller:
    """Owner of a key, with its usage."""

    def __init__(self, limits: KeyLimits, usage: KeyUsage | None = None) -> None:
        """`usage` is shared with other processes; None: this process is alone."""
        self.limits = limits
        self._usage = usage
        self.owner = owner_id(limits.plain_digest())
        """Owner that is stored with this caller's files, batches and responses."""
        self.concurrent = 0
        self._counted = 0
        """Requests in progress that are part of the usage of all processes."""
        self._requests = _changed(None, limits.requests_per_minute)
        self._tokens = _changed(None, limits.tokens_per_minute)

    @property
    def name(self) -> str:
        return self.limits.name

    def admit(self, now: float) -> "TooMuch | None":
        """Admit one more request, until `release`, or return the exceeded limit."""
        with self._shared() as row:
            too_much = self._admit(now, self.concurrent if row is None else row.concurrent)
            if too_much is None:
                self.concurrent += 1
                if row is not None:
                    row.begun = 1
                    self._counted += 1
            return too_much

    def _admit(self, now: float, concurrent: int) -> "TooMuch | None":
        limits = self.limits
        if limits.concurrent_requests is not None and concurrent >= limits.concurrent_requests:
            return TooMuch("concurrent_requests", limits.concurrent_requests, BUSY_RETRY_S)
        if self._tokens is not None and (wait_s := self._tokens.wait_s(now)):
            return TooMuch("tokens_per_minute", limits.tokens_per_minute or 0, math.ceil(wait_s))
        if self._requests is not None:
            wait_s = self._requests.wait_s(now, 1.0)
            if wait_s:
                return TooMuch("requests_per_minute", limits.requests_per_minute or 0, math.ceil(wait_s))
            self._requests.take(1.0, now)
        return None

    def release(self) -> None:
        """End a request that was admitted."""
        assert self.concurrent > 0, "a request was released twice"
        self.concurrent -= 1
        if self._counted and self._usage is not None:
            self._counted -= 1
            with self._usage.open(self.name) as row:
                if row is not None:
                    row.begun = -1

    def spend(self, tokens: int, now: float) -> None:
        """Count the tokens that a request used."""
        if self._tokens is not None:
            with self._shared():
                self._tokens.take(tokens, now)

    @contextlib.contextmanager
    def _shared(self) -> Iterator[UsageRow | None]:
        """Yield the usage of all processes, of which this one's buckets are a copy while it is changed."""
        if self._usage is None or not self.limits.is_limited:
            yield None
            return
        with self._usage.open(self.name) as row:
            if row is not None:
                for bucket, state in ((self._requests, row.requests), (self._tokens, row.tokens)):
                    if bucket is not None:
                        bucket.restore(state)
            yield row
            if row is not None:
                row.requests = row.requests if self._requests is None else self._requests.state
                row.tokens = row.tokens if self._tokens is None else self._tokens.state

    def may_use(self, model: str) -> bool:
        allowed = self.limits.models
        return allowed is None or any(fnmatch.fnmatchcase(model, pattern) for pattern in allowed)

    def require(self, model: str) -> None:
        """Raise `HttpError` if the caller may not use the model."""
        if not self.may_use(model):
            raise HttpError(403, f"This API key may not use the model {model!r}")

    def change(self, limits: KeyLimits) -> None:
        """Apply other limits and perhaps another key; usage is kept."""
        self.owner = owner_id(limits.plain_digest())
        self._requests = _changed(self._requests, limits.requests_per_minute)
        self._tokens = _changed(self._tokens, limits.tokens_per_minute)
        self.limits = limits


class TooMuch(msgspec.Struct, frozen=True):
    """Limit that a known caller's request exceeds."""

    limit: str
    allowed: int
    retry_after_s: int

    def __str__(self) -> str:
        return f"Rate limit reached: {self.limit} = {self.allowed}. Try again in {self.retry_after_s} s."


class KeyRing:
    """All API keys."""

    def __init__(self, entries: Iterable[KeyLimits] = (), usage: KeyUsage | None = None) -> None:
        """Raise `ConfigError` for invalid entries. `usage` is shared with other processes."""
        self._usage = usage
        self._callers: dict[bytes, ApiCaller] = {}
        self.replace(entries)

    def __len__(self) -> int:
        return len(self._callers)

    def replace(self, entries: Iterable[KeyLimits]) -> None:
        """Replace the keys; callers that remain keep their usage. Raise `ConfigError` and change nothing for invalid ones."""
        known = {caller.name: caller for caller in self._callers.values()}
        found: dict[bytes, KeyLimits] = {}
        names: set[str] = set()
        for entry in entries:
            digest = sealed(entry.check().plain_digest())
            if digest in found or entry.name in names:
                raise ConfigError(f"key {entry.name!r}: duplicate name or key")
            names.add(entry.name)
            found[digest] = entry
        callers: dict[bytes, ApiCaller] = {}
        for digest, entry in found.items():
            caller = known.get(entry.name)
            if caller is None:
                caller = ApiCaller(entry, self._usage)
            else:
                caller.change(entry)
            callers[digest] = caller
        self._callers = callers

    def of_owner(self, owner: str) -> ApiCaller | None:
        """Return the caller that owns stored objects, for work that runs on its behalf later."""
        return next((one for one in self._callers.values() if one.owner == owner), None)

    def owner_of(self, name: str) -> str | None:
        """Return the owner of stored objects for the key with that name."""
        return next((one.owner for one in self._callers.values() if one.name == name), None)

    def find(self, headers: Sequence[tuple[bytes, bytes]]) -> ApiCaller | None:
        """Return the caller whose key a request carries, in `authorization` (OpenAI) or `x-api-key` (Anthropic)."""
        for name, value in headers:
            if name == b"authorization" and value[:7].lower() == b"bearer ":
                presented = value[7:].strip()
            elif name == b"x-api-key":
                presented = value
            else:
                continue
            caller = self._callers.get(sealed(hashlib.sha256(presented).digest()))
            if caller is not None:
                return caller
        return None


def sealed(digest: bytes) -> bytes:
    """Return a digest that cannot be computed without this process's secret."""
    return hashlib.blake2b(digest, key=SECRET, digest_size=32).digest()


def owner_id(plain_digest: bytes) -> str:
    """Return the owner to store with objects of the key that has this SHA-256.

    It is derived from the key alone, so that it survives restarts and changes of the order of keys; neither the key nor the
    `key_sha256` of a keys file can be derived from it.
    """
    return f"key:{hashlib.blake2b(plain_digest, key=OWNER, digest_size=OWNER_BYTES).hexdigest()}"


def plain_keys(keys: Sequence[str], admin_keys: Sequence[str] = ()) -> list[KeyLimits]:
    """Return keys without limits, named by their positions; a key given in both ways is an admin key."""
    plain = [key for key in dict.fromkeys(keys) if key not in admin_keys]
    return [
        *(KeyLimits(name=f"key-{place}", key=key) for place, key in enumerate(plain, 1)),
        *(
            KeyLimits(name=f"admin-{place}", key=key, admin=True)
            for place, key in enumerate(dict.fromkeys(admin_keys), 1)
        ),
    ]


def read_keys(text: str, path: str) -> tuple[KeyLimits, ...]:
    """Return the entries of a keys file. Raise `ConfigError`, whose message contains no key."""
    import tomllib  # Most frontends have no such file.

    try:
        table: Mapping[str, object] = tomllib.loads(text)
    except ValueError as error:
        where = str(error).rpartition("(")[2].rstrip(")")
        raise ConfigError(f"--api-keys-file {path}: not valid TOML ({where})") from None
    try:
        return msgspec.convert(table, KeysFile).keys
    except msgspec.ValidationError as error:
        raise ConfigError(f"--api-keys-file {path}: {error}") from None


def _changed(bucket: TokenBucket | None, size: int | None) -> TokenBucket | None:
    if size is None:
        return None
    if bucket is None:
        return TokenBucket(size, size / MINUTE_S)
    bucket.resize(size, size / MINUTE_S)
    return bucket
