"""Listening: bound sockets, and the error for a port on which this process cannot listen."""

import errno
import os
import socket

from dynamo.core.errors import ConfigError, StartupError


def bind(host: str, port: int, setting: str, *, shared: bool = False) -> socket.socket:
    """Return a bound socket; a shared one lets other processes of this program bind the same port.

    Raise `StartupError`, which names the `setting` (a flag or variable), when the port is in use or the host is not one
    of this machine, and `ConfigError` for a number that is no port.
    """
    given = f"{setting}={port}" if setting.isupper() else f"{setting} {port}"
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        if isinstance(error, OverflowError):
            raise ConfigError(f"{given}: expected 0 to 65535") from None
        raise listen_error(given, host, error) from None
    listener.setblocking(False)
    return listener


def listen_error(setting: str, host: str, error: Exception) -> StartupError:
    """Return the error for `setting`, a flag or variable with its value, from `bind`'s OSError or ZMQError."""
    number = getattr(error, "errno", None)
    if number == errno.EADDRINUSE:
        return StartupError(f"{setting}: the port is in use by another process (address {host}); choose another one")
    reason = os.strerror(number) if isinstance(error, OSError) and number else error
    return StartupError(f"{setting}: cannot listen on {host}: {reason}")
