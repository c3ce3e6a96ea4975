"""Data-parallel rank that the router selected for a request."""

import logging

from dynamo.common.backend.engine import GenerateRequest

logger = logging.getLogger(__name__)


def forced_dp_rank(request: GenerateRequest) -> int | None:
    """Return the rank in the request's `routing`; None if the router selected none. Raise `ValueError`."""
    match request:
        case {"routing": {"dp_rank": rank}} if rank is not None:
            return int(rank)  # The router may have sent it as text.
    return None


def validate_global_dp_rank(dp_rank: int | None, dp_start: int, dp_size: int, backend_label: str) -> int | None:
    """Return `dp_rank` if this worker has several ranks and this is one of them, else None."""
    ranks = range(dp_start, dp_start + dp_size)
    if dp_rank is None or len(ranks) < 2:
        return None
    if dp_rank not in ranks:
        text = "%s: dp_rank %d is outside [%d, %d) of this worker; the engine selects the rank"
        logger.warning(text, backend_label, dp_rank, ranks.start, ranks.stop)
        return None
    return dp_rank
