"""The namespace of a worker pool."""

from dynamo.core.config import environ


def get_worker_namespace(namespace: str | None = None) -> str:
    """Return the namespace, by default that of `DYN_NAMESPACE`, with the suffix of this worker pool."""
    name = namespace or environ().get("DYN_NAMESPACE", "dynamo")
    suffix = environ().get("DYN_NAMESPACE_WORKER_SUFFIX")
    return f"{name}-{suffix}" if suffix else name
