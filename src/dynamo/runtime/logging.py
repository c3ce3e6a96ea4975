"""Logging: `configure_dynamo_logging` at its public import path."""

from dynamo.core.logging import setup


def configure_dynamo_logging(service_name: str | None = None, worker_id: int | None = None) -> None:
    """Send this process's log to stderr as set by `DYN_LOG` and `DYN_LOGGING_…`; the arguments have no effect.

    Older releases prefixed lines with the service name and worker number; instances have ids now.
    """
    setup()
