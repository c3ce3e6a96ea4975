"""Health: readiness of a process and of its endpoints, served at `/health`."""

import json
from collections.abc import Callable, Mapping

from dynamo.core.clock import Clock, SystemClock
from dynamo.core.config import setting
from dynamo.core.errors import ConfigError

READY, NOT_READY = "ready", "notready"


class SystemHealth:
    """Status of one process; derived from its endpoints unless set explicitly."""

    def __init__(self, clock: Clock | None = None, variables: Mapping[str, str] | None = None) -> None:
        self._clock = clock or SystemClock()
        self._started = self._clock.now()
        self._starting = setting("DYN_SYSTEM_STARTING_HEALTH_STATUS", NOT_READY, str, variables)
        if self._starting not in {READY, NOT_READY}:
            raise ConfigError(f"DYN_SYSTEM_STARTING_HEALTH_STATUS={self._starting!r}: must be {READY} or {NOT_READY}")
        self._followed = _read_names(setting("DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS", "", str, variables))
        self._override: bool | None = None
        self._failing: set[str] = set()
        self.endpoints: dict[str, bool] = {}
        self.checks: list[Callable[[], bool]] = []
        """Additional conditions of readiness, evaluated at every request."""
        self.conditions: list[Callable[[], bool]] = []
        """Conditions of readiness of a process without endpoints; one that fails is no reason to restart it."""

    def set(self, is_ready: bool) -> None:
        """Set the status of the process, overriding that of its endpoints."""
        self._override = is_ready

    def is_sound(self) -> bool:
        """Return False once a supervised background task has crashed."""
        return all(check() for check in self.checks)

    def passes(self) -> bool:
        """Return whether no background task has crashed and no check fails, independent of readiness."""
        return self.is_sound() and not self._failing.intersection(self._followed or self.endpoints)

    def is_ready(self) -> bool:
        if not self.passes():
            return False
        if self._override is not None:
            return self._override
        if self._followed:
            return all(self.endpoints.get(name) for name in self._followed)
        if self.conditions:
            return all(condition() for condition in self.conditions)
        if not self.endpoints:
            return self._starting == READY
        return all(self.endpoints.values())

    def report(self, endpoint: str, is_well: bool) -> None:
        """Record the result of a health check."""
        if is_well:
            self._failing.discard(endpoint)
        else:
            self._failing.add(endpoint)

    def uptime_s(self) -> float:
        return self._clock.now() - self._started

    def render(self) -> str:
        """Return the body of `/health` and `/live`."""
        uptime = self.uptime_s()
        return json.dumps(
            {
                "status": READY if self.is_ready() else NOT_READY,
                "uptime": {"secs": int(uptime), "nanos": int(uptime % 1 * 1e9)},
                "endpoints": {
                    name: READY if is_ready and name not in self._failing else NOT_READY
                    for name, is_ready in self.endpoints.items()
                },
            }
        )


def _read_names(text: str) -> tuple[str, ...]:
    """Parse `DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS`: a JSON list of the endpoints that determine the status."""
    try:
        names = json.loads(text) if text else []
    except ValueError:
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS={text!r}: must be a JSON list of endpoint names")
    return tuple(names)
