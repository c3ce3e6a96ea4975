"""API keys in environment variables: `DYN_API_KEYS` (frontends), `DYN_ADMIN_API_KEYS` (also system servers)."""

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence

from dynamo.core.errors import ConfigError

API_KEYS = "DYN_API_KEYS"
ADMIN_API_KEYS = "DYN_ADMIN_API_KEYS"
KEY_CHARS_MIN = 8  # A shorter key can be found by brute force.


def keys_of_variable(name: str, variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return the keys of a variable: separated by commas, or a JSON array of strings where a key contains a comma.

    Raises `ConfigError`, which shows no key, for a variable that is set and holds no key: a server that was meant to
    require keys must not start without any.
    """
    text = variables.get(name)
    if text is None:
        return ()
    keys = _of_json(name, text) if text.strip().startswith("[") else [one.strip() for one in text.split(",")]
    found = tuple(key for key in keys if key)
    if not found:
        raise ConfigError(f"{name} is set but holds no API key: expected keys separated by commas, or no such variable")
    if any(len(key) < KEY_CHARS_MIN for key in found):
        raise ConfigError(f"{name}: expected keys of at least {KEY_CHARS_MIN} characters")
    return found


def presented_key(headers: Mapping[str, str]) -> str | None:
    """Return a request's key from `authorization: Bearer` or `x-api-key` (lower-case names); None if there is none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key") or None


def is_one_of(key: str | None, keys: Sequence[str]) -> bool:
    """Return whether a key is among the keys, in a time that does not depend on how much of it is right."""
    if key is None:
        return False
    digest = hashlib.sha256(key.encode()).digest()
    matches = [hmac.compare_digest(digest, hashlib.sha256(one.encode()).digest()) for one in keys]
    return any(matches)


def _of_json(name: str, text: str) -> list[str]:
    try:
        keys = json.loads(text)
    except ValueError:
        keys = None
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise ConfigError(f"{name}: a value that begins with '[' must be a JSON array of strings")
    return [key.strip() for key in keys]
