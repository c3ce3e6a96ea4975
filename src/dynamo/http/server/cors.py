"""CORS: allowed origins, and the headers that announce them to browsers. Pure."""

from collections.abc import Sequence

from msgspec import Struct

from dynamo.core.errors import ConfigError

ALLOWED_METHODS = b"GET, POST, PUT, DELETE, OPTIONS"
REMEMBERED_S = 600  # How long browsers cache a preflight response; some browsers ignore longer times.


class Cors(Struct, frozen=True):
    """Allowed origins."""

    origins: frozenset[bytes]

    @classmethod
    def of(cls, origins: Sequence[str]) -> "Cors | None":
        """Return the allowed origins, None if there are none. Raise `ConfigError` for an invalid origin."""
        for origin in origins:
            scheme, separator, rest = origin.partition("://")
            if origin != "*" and not (separator and scheme.isalpha() and rest and "/" not in rest and rest.isascii()):
                raise ConfigError(f"--cors-origins {origin}: expected *, or an origin like https://chat.example.org")
        return cls(frozenset(origin.lower().encode("ascii") for origin in origins)) if origins else None

    def allows(self, origin: bytes) -> bool:
        return b"*" in self.origins or origin.lower() in self.origins

    def headers(self, origin: bytes | None) -> list[tuple[bytes, bytes]]:
        """Return the headers of every response to that origin. API keys are sent in headers, so credentials are not allowed."""
        vary = [(b"vary", b"origin")]
        if origin is None or not self.allows(origin):
            return vary
        shown = b"*" if b"*" in self.origins else origin
        return [
            *vary,
            (b"access-control-allow-origin", shown),
            (b"access-control-expose-headers", b"x-request-id, retry-after"),
        ]

    def preflight(self, origin: bytes, wanted_headers: bytes | None) -> list[tuple[bytes, bytes]]:
        """Return the headers of the response to a preflight request."""
        if not self.allows(origin):
            return self.headers(origin)
        return [
            *self.headers(origin),
            (b"access-control-allow-methods", ALLOWED_METHODS),
            (b"access-control-allow-headers", wanted_headers or b"authorization, content-type"),
            (b"access-control-max-age", b"%d" % REMEMBERED_S),
        ]
