"""Flags of the HTTP client that fetches media."""

import argparse
import logging

from dynamo.common.configuration.arg_group import ArgGroup
from dynamo.common.configuration.config_base import ConfigBase
from dynamo.common.configuration.flags import Flag, add_flags
from dynamo.common.configuration.utils import env_or_default, nullable_float, set_env
from dynamo.core.config import environ

logger = logging.getLogger(__name__)

# fmt: off
FLAGS = (
    Flag("--http-max-connections", "DYN_HTTP_MAX_CONNECTIONS", 100, "Maximum connections of one pool", int, "max_connections"),
    Flag("--http-timeout", "DYN_HTTP_TIMEOUT", None, "Seconds for one fetch; overrides the caller's timeout",
        nullable_float, "per_call_timeout_override"),
    Flag("--http-connect-timeout", "DYN_HTTP_CONNECT_TIMEOUT", 5.0, "Seconds for the TCP and TLS handshakes", float, "connect_timeout"),
    Flag("--http-max-keepalive", "DYN_HTTP_MAX_KEEPALIVE", 0, "Accepted for compatibility; has no effect", int, "max_keepalive"),
    Flag("--http-pool-timeout", "DYN_HTTP_POOL_TIMEOUT", 60.0, "Accepted for compatibility; has no effect", float, "pool_timeout"),
    Flag("--http-concurrency", "DYN_HTTP_CONCURRENCY", 50, "Accepted for compatibility; has no effect", int, "concurrency"),
    Flag("--http-keepalive-timeout", "DYN_HTTP_KEEPALIVE_TIMEOUT", 15.0, "Seconds that an idle connection is kept", float, "keepalive_timeout"),
)
# fmt: on
FORMER_NAMES = {
    "DYN_HTTP_CONCURRENCY": "DYN_MM_HTTP_CONCURRENCY",
    "DYN_HTTP_CONNECT_TIMEOUT": "DYN_MM_HTTP_CONNECT_TIMEOUT",
    "DYN_HTTP_MAX_CONNECTIONS": "DYN_MM_HTTP_MAX_CONNECTIONS",
    "DYN_HTTP_MAX_KEEPALIVE": "DYN_MM_HTTP_MAX_KEEPALIVE",
    "DYN_HTTP_POOL_TIMEOUT": "DYN_MM_HTTP_POOL_TIMEOUT",
    "DYN_HTTP_TIMEOUT": "DYN_MM_HTTP_READ_TIMEOUT",
}
"""Variables to the names that older releases gave them."""
_reported: set[str] = set()


class HttpConfigBase(ConfigBase):
    """Settings of the HTTP client."""

    max_connections: int
    per_call_timeout_override: float | None
    connect_timeout: float
    max_keepalive: int
    pool_timeout: float
    concurrency: int
    keepalive_timeout: float


class HttpArgGroup(ArgGroup):
    """Flags of the HTTP client."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags to `parser`."""
        add_flags(parser, "HTTP Fetch Options", FLAGS)


def from_env() -> HttpConfigBase:
    """Return the settings of the environment, in which the former names of the variables are accepted."""
    variables = environ()
    for name, former in FORMER_NAMES.items():
        if former not in variables or name in variables:
            continue
        if former not in _reported:
            logger.warning("%s: deprecated; rename it to %s", former, name)
        _reported.add(former)
        set_env(name, variables[former])
    settings = argparse.Namespace()
    for flag in FLAGS:
        setattr(settings, flag.dest or flag.name, env_or_default(flag.env, flag.default, flag.type))
    return HttpConfigBase.from_cli_args(settings)
