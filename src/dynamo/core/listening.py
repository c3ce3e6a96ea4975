"""Listening: the error for a port on which this process cannot listen."""

import errno
import os

from dynamo.core.errors import StartupError


def listen_error(setting: str, host: str, error: Exception) -> StartupError:
    """Return the error for `setting`, a flag or variable with its value, from `bind`'s OSError or ZMQError."""
    number = getattr(error, "errno", None)
    if number == errno.EADDRINUSE:
        return StartupError(f"{setting}: the port is in use by another process (address {host}); choose another one")
    reason = os.strerror(number) if isinstance(error, OSError) and number else error
    return StartupError(f"{setting}: cannot listen on {host}: {reason}")
