"""Intervals and timeouts of the health monitor of an engine."""

import logging
import math
from dataclasses import dataclass

from dynamo.core.config import environ

logger = logging.getLogger(__name__)

ENGINE_HEALTH_CHECK_INTERVAL = 2.0
ENGINE_HEALTH_CHECK_TIMEOUT = 30.0
ENGINE_HEALTH_SHUTDOWN_TIMEOUT = 60.0
ENGINE_HEALTH_CHECK_INTERVAL_ENV = "DYN_ENGINE_HEALTH_CHECK_INTERVAL"
ENGINE_HEALTH_CHECK_TIMEOUT_ENV = "DYN_ENGINE_HEALTH_CHECK_TIMEOUT"
ENGINE_HEALTH_SHUTDOWN_TIMEOUT_ENV = "DYN_ENGINE_HEALTH_SHUTDOWN_TIMEOUT"


def _seconds(given: float | None, name: str, default: float) -> float:
    """Return the given seconds, else those of a variable; negative ones become 0, invalid ones the default."""
    if given is not None:
        return given
    text = environ().get(name)
    try:
        seconds = default if text is None else float(text)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        logger.warning("ignored %s=%r: must be a finite number; using %.1f", name, text, default)
        return default
    if seconds < 0:
        logger.warning("ignored %s=%r: must not be negative; using 0", name, text)
    return max(0.0, seconds)


@dataclass(frozen=True)
class EngineHealthMonitorConfig:
    """Seconds between checks, for one check, and for the shutdown of an engine that failed one."""

    interval: float
    check_timeout: float
    shutdown_timeout: float

    @classmethod
    def from_env(
        cls,
        *,
        interval: float | None = None,
        check_timeout: float | None = None,
        shutdown_timeout: float | None = None,
    ) -> "EngineHealthMonitorConfig":
        """Return the settings of the environment, overridden by the given ones."""
        return cls(
            _seconds(interval, ENGINE_HEALTH_CHECK_INTERVAL_ENV, ENGINE_HEALTH_CHECK_INTERVAL),
            _seconds(check_timeout, ENGINE_HEALTH_CHECK_TIMEOUT_ENV, ENGINE_HEALTH_CHECK_TIMEOUT),
            _seconds(shutdown_timeout, ENGINE_HEALTH_SHUTDOWN_TIMEOUT_ENV, ENGINE_HEALTH_SHUTDOWN_TIMEOUT),
        )
