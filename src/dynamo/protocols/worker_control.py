"""Worker control: the endpoint by which a frontend reads the status of a worker and takes it out of service."""

WORKER_CONTROL = "worker_control"
"""A worker of `dynamo.backend` serves its control at the endpoint of this name in its component; a released one has none."""
STATUS, DRAIN, RESUME = "status", "drain", "resume"
ACTIONS = (STATUS, DRAIN, RESUME)
"""Values of the request's only field, `action`."""
