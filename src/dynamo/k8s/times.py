"""Times as Kubernetes writes them in objects."""

from datetime import UTC, datetime


def seconds_time(wall: float) -> str:
    """Return a `Time`: whole seconds, as in events and conditions."""
    return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def micro_time(wall: float) -> str:
    """Return a `MicroTime`, as in leases."""
    return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
