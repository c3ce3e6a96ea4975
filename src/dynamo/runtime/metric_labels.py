"""Labels of `dynamo_component_*` metrics: the endpoint that a series concerns, and the process that reports it."""

from dynamo.protocols.discovery import EndpointId

WORKER_LABELS = ("dynamo_namespace", "dynamo_component", "worker_id")


def worker_labels(endpoint: EndpointId, instance_id: int) -> dict[str, str]:
    """Return the values of `WORKER_LABELS`; the instance id of the reporting process is in hexadecimal, as upstream's is."""
    values = (endpoint.namespace, endpoint.component, f"{instance_id:x}")
    return dict(zip(WORKER_LABELS, values, strict=True))
