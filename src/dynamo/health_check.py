"""Health-check payloads, importable as in upstream: requests that the canary sends to idle endpoints.

class Payload(HealthCheckPayload):
    def __init__(self) -> None:
        self.default_payload = {"token_ids": [1], "stop_conditions": {"max_tokens": 1}}
        super().__init__()

await endpoint.serve_endpoint(generate, health_check_payload=Payload().to_dict())
"""

import logging
from pathlib import Path
from typing import Any

import msgspec

from dynamo.core.config import environ

HEALTH_CHECK_KEY = "_HEALTH_CHECK"
"""Key that marks a request of the canary for its handler."""

logger = logging.getLogger(__name__)

__all__ = ["HEALTH_CHECK_KEY", "HealthCheckPayload", "load_health_check_from_env"]


def load_health_check_from_env(env_var: str = "DYN_HEALTH_CHECK_PAYLOAD") -> dict[str, Any] | None:
    """Return the payload in a variable, as JSON or as `@file` with it; None if it is unset or invalid."""
    given = environ().get(env_var)
    if not given:
        return None
    try:
        content = Path(given[1:]).read_bytes() if given.startswith("@") else given
        return msgspec.json.decode(content, type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        logger.warning("ignored %s=%.200r: must be a JSON object or @FILE with one: %s", env_var, given, error)
    return None


class MissingPayload(NotImplementedError):
    """A subclass of `HealthCheckPayload` sets no `default_payload`."""


class HealthCheckPayload:
    """A payload with an override from the environment; subclasses set `default_payload` before they call `__init__`."""

    default_payload: dict[str, Any]

    def __init__(self) -> None:
        if not hasattr(self, "default_payload"):
            raise MissingPayload(f"{type(self).__name__} must set default_payload before it calls __init__")
        self._payload: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the payload for `serve_endpoint`; the environment is read by the first call."""
        if self._payload is None:
            self._payload = load_health_check_from_env() or self.default_payload
        return self._payload

    def __repr__(self) -> str:
        return f"{type(self).__name__}(payload={self.to_dict()!r})"
