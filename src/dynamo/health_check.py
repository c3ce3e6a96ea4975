"""Health-check payloads, importable as in upstream: requests that the canary sends to idle endpoints.

class Payload(HealthCheckPayload):
    def __init__(self) -> None:
        self.default_payload = {"token_ids": [1], "stop_conditions": {"max_tokens": 1}}
        super().__init__()

await endpoint.serve_endpoint(generate, health_check_payload=Payload().to_dict())
"""

import json
import logging
from typing import Any

from dynamo.core.config import environ

HEALTH_CHECK_KEY = "_HEALTH_CHECK"
"""Key that marks a request of the canary for its handler."""

logger = logging.getLogger(__name__)

__all__ = ["HEALTH_CHECK_KEY", "HealthCheckPayload", "load_health_check_from_env"]


def load_health_check_from_env(env_var: str = "DYN_HEALTH_CHECK_PAYLOAD") -> dict[str, Any] | None:
    """Return the payload in a variable, as JSON or as `@file` with it; None if it is unset or invalid."""
    text = environ().get(env_var)
    if not text:
        return None
    try:
        if text.startswith("@"):
            with open(text[1:], encoding="utf-8") as file:
                text = file.read()
        payload = json.loads(text)
    except (OSError, ValueError) as error:
        logger.warning("ignored %s=%.200r: must be JSON or @FILE with JSON: %s", env_var, text, error)
        return None
    if not isinstance(payload, dict):
        logger.warning("ignored %s=%.200r: must be a JSON object", env_var, text)
        return None
    return payload


class HealthCheckPayload:
    """A payload with an override from the environment; subclasses set `default_payload` before they call `__init__`."""

    default_payload: dict[str, Any]

    def __init__(self) -> None:
        if getattr(self, "default_payload", None) is None:
            raise ValueError(f"{type(self).__name__} must set default_payload before it calls __init__")
        self._payload = load_health_check_from_env() or self.default_payload

    def to_dict(self) -> dict[str, Any]:
        """Return the payload for `serve_endpoint`."""
        return self._payload
