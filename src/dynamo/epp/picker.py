"""EndpointPicker: what the ext_proc server requires of a picker, and the choice that it returns."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from dynamo.core.errors import NotReady
from dynamo.epp.phases import PickRequest

AGGREGATED, DISAGGREGATED = "aggregated", "disaggregated"
"""Values of the header `x-dynamo-routing-mode`."""


@dataclass(slots=True)
class EndpointChoice:
    """Chosen worker of one request, which the picker counts until `release`."""

    destination: str
    """Address `ip:port`."""
    headers: Mapping[str, str]
    """Routing headers of the request."""
    model: str = ""
    """Name of the served model; empty for a request that names none."""
    on_first_output: Callable[[], None] = lambda: None
    on_end: Callable[[], None] = lambda: None


class EndpointPicker(Protocol):
    """Chooses a worker for each request."""

    @property
    def is_ready(self) -> bool:
        """Whether a request can be served now."""
        ...

    async def pick(self, request: PickRequest) -> EndpointChoice:
        """Choose a worker; it may wait while all workers are busy. Raises `DynamoException`."""
        ...


def routing_headers(
    worker_id: int, dp_rank: int | None, prefill: tuple[int, int | None] | None = None
) -> dict[str, str]:
    """Return the headers that name a request's workers; `prefill` is the prefill worker and its rank."""
    headers = {"x-dynamo-worker-instance-id": str(worker_id)}
    if dp_rank is not None:
        headers["x-dynamo-dp-rank"] = str(dp_rank)
    if prefill is None:
        return headers | {"x-dynamo-routing-mode": AGGREGATED}
    headers |= {"x-dynamo-routing-mode": DISAGGREGATED, "x-dynamo-prefill-instance-id": str(prefill[0])}
    if prefill[1] is not None:
        headers["x-dynamo-prefill-dp-rank"] = str(prefill[1])
    return headers


def no_worker(subset: frozenset[str] | None) -> NotReady:
    """Return the error of a request without an eligible worker."""
    if subset is None:
        return NotReady("No worker is available. Please retry shortly.")
    shown = ", ".join(sorted(subset)[:4])
    return NotReady(f"No worker is available among the gateway's candidates ({shown}). Please retry shortly.")
