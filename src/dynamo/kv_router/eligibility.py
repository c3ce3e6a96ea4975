"""Eligible ranks of a request: constraints of the request, failed and busy workers, and the worker of its session. Pure.

`eligible_slots` returns the ranks that may serve a request, and the reason for each rank that may not (`dynamo route explain`).
`eligible_slots_of_session` also takes the binding of the request's session into account.
"""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from dynamo.core.errors import InvalidArgument, NoMatchingWorker, NotReady, Overloaded
from dynamo.kv_router.affinity import Affinity
from dynamo.kv_router.decision import RouteRequest
from dynamo.kv_router.worker_slots import WorkerSlots

AVOIDED = "failed or unresponsive"
BUSY = "above a busy threshold"
OTHER_RANK = "the request names another rank"
OTHER_WORKER = "the request names another worker"

Eligible = tuple[Sequence[int], Mapping[int, str]]
"""Eligible slots, and the reason for each ineligible one."""

NONE_FILTERED: Mapping[int, str] = {}


def eligible_slots(workers: WorkerSlots, route_request: RouteRequest) -> Eligible:
    """Return the eligible slots, and the reason for each ineligible one.

    Raises `NotReady` if no worker is eligible, `NoMatchingWorker` if none has the required taints, `Overloaded` if all
    eligible workers are busy, `InvalidArgument` for an unknown worker or rank.
    """
    if route_request.worker_id is not None and route_request.worker_id not in workers.workers:
        raise InvalidArgument(f"worker {route_request.worker_id} does not serve this model")
    if not workers.ranks:
        raise NotReady("no worker serves this model at the moment")
    is_unconstrained = (
        route_request.worker_id is None
        and route_request.dp_rank is None
        and route_request.allowed is None
        and not route_request.required_taints
    )
    if is_unconstrained:
        if not (route_request.busy or route_request.avoid):
            return workers.present if workers.arrays is None else workers.arrays.present, NONE_FILTERED
        filtered = _avoided(workers, route_request)
    else:
        filtered = _unfit(workers, route_request)
    slots = [slot for slot in workers.ranks if slot not in filtered]
    if not slots:
        raise _no_worker(route_request, set(filtered.values()))
    return slots, filtered


def eligible_slots_of_session(
    workers: WorkerSlots, affinity: Affinity | None, route_request: RouteRequest, now: float
) -> Eligible:
    """Return the same as `eligible_slots`; for a session bound to an eligible worker, that worker alone."""
    if affinity is None or route_request.session is None or route_request.worker_id is not None:
        return eligible_slots(workers, route_request)
    bound = affinity.find(route_request.session, now)
    slot = workers.slots.get(bound) if bound is not None else None
    if slot is None:
        return eligible_slots(workers, route_request)
    relaxed = replace(route_request, busy=frozenset()) if affinity.mode == "hard" else route_request
    try:
        slots, filtered = eligible_slots(workers, relaxed)
    except (NotReady, Overloaded):
        return eligible_slots(workers, route_request)
    if slot not in slots:
        return eligible_slots(workers, route_request)
    others = {other: "the session is bound to another worker" for other in slots if other != slot}
    return [slot], {**filtered, **others}


def _avoided(workers: WorkerSlots, route_request: RouteRequest) -> dict[int, str]:
    """Return the slots of the workers that the request avoids and of those that are busy, with the reason."""
    found: dict[int, str] = {}
    for worker_ids, reason in ((route_request.busy, BUSY), (route_request.avoid, AVOIDED)):
        for worker_id in worker_ids & workers.workers.keys():
            found.update((slot, reason) for slot in workers.slots_of(worker_id))
    return found


def _unfit(workers: WorkerSlots, route_request: RouteRequest) -> dict[int, str]:
    """Return the slots that fail a constraint of the request, with the reason."""
    found: dict[int, str] = {}
    for slot, (worker_id, dp_rank) in workers.ranks.items():
        reason = _unfit_reason(route_request, worker_id, dp_rank, workers.workers[worker_id].taints)
        if reason is not None:
            found[slot] = reason
    return found


def _unfit_reason(route_request: RouteRequest, worker_id: int, dp_rank: int, taints: frozenset[str]) -> str | None:
    """Return the reason for which a rank is ineligible; None if it is eligible."""
    if route_request.allowed is not None and worker_id not in route_request.allowed:
        return "not among the allowed workers"
    if route_request.worker_id is not None and worker_id != route_request.worker_id:
        return OTHER_WORKER
    if route_request.dp_rank is not None and dp_rank != route_request.dp_rank:
        return OTHER_RANK
    if not route_request.required_taints <= taints:
        return f"lacks {', '.join(sorted(route_request.required_taints - taints))}"
    if worker_id in route_request.avoid:
        return AVOIDED
    return BUSY if worker_id in route_request.busy else None


def _no_worker(route_request: RouteRequest, reasons: set[str]) -> Exception:
    """Return the error for a request without an eligible rank; `reasons`: those of all ranks."""
    if BUSY in reasons:
        if route_request.worker_id is not None:
            return Overloaded(f"worker {route_request.worker_id}, named by the request, is above a busy threshold")
        return Overloaded("every eligible worker is above a busy threshold")
    if route_request.dp_rank is not None and reasons <= {OTHER_RANK, OTHER_WORKER}:
        return InvalidArgument(f"dp_rank {route_request.dp_rank} does not exist")
    is_unmatched = route_request.required_taints and AVOIDED not in reasons
    error = NoMatchingWorker if is_unmatched else NotReady
    return error("no eligible worker: " + "; ".join(sorted(reasons)))
