"""Restart of a graph's components, at once or one after another, when `spec.restart.id` changes."""

from collections.abc import Callable, Sequence

from dynamo.protocols.kubernetes.common import Restart, RestartStatus

ENDED = frozenset({"Completed", "Failed", "Superseded"})


def next_restart(
    wanted: Restart | None,
    status: RestartStatus | None,
    components: Sequence[str],
    *,
    is_rolling: bool,
    has_restarted: Callable[[str], bool],
) -> RestartStatus | None:
    """Return the next status of a restart.

    `has_restarted` returns whether all pods of a component are of the restart. A rolling update of the workers supersedes
    a restart that has not ended. A new id starts from the first component, also while another restart runs.
    """
    if wanted is None:
        return status if status is not None and status.phase in ENDED else None
    is_new = status is None or status.observed_id != wanted.id
    if not is_new and status is not None and status.phase in ENDED:
        return status
    if is_rolling:
        return RestartStatus(observed_id=wanted.id, phase="Superseded")
    strategy = wanted.strategy
    is_parallel = strategy is not None and strategy.type == "Parallel"
    order = sorted(components) if is_parallel else list((strategy and strategy.order) or sorted(components))
    if is_new or status is None:
        waiting: Sequence[str] = order if is_parallel else order[:1]
    elif is_parallel:
        waiting = [name for name in status.in_progress or order if name in order and not has_restarted(name)]
    else:
        waiting = _following(order, (status.in_progress or [""])[0], has_restarted)
    if not waiting:
        return RestartStatus(observed_id=wanted.id, phase="Completed")
    return RestartStatus(observed_id=wanted.id, phase="Restarting", in_progress=list(waiting))


def marked(wanted: Restart | None, status: RestartStatus | None, components: Sequence[str]) -> frozenset[str]:
    """Return the components whose pods carry the id of the restart: those that restart, and those that have."""
    if wanted is None or status is None or status.observed_id != wanted.id or status.phase == "Superseded":
        return frozenset()
    if status.phase == "Completed":
        return frozenset(components)
    in_progress = status.in_progress or []
    if wanted.strategy is not None and wanted.strategy.type == "Parallel":
        return frozenset(components)
    order = list((wanted.strategy and wanted.strategy.order) or sorted(components))
    last = max((order.index(name) for name in in_progress if name in order), default=-1)
    return frozenset(order[: last + 1])


def _following(order: Sequence[str], current: str, has_restarted: Callable[[str], bool]) -> Sequence[str]:
    if current not in order:
        return order[:1]
    if not has_restarted(current):
        return [current]
    place = order.index(current)
    return order[place + 1 : place + 2]
