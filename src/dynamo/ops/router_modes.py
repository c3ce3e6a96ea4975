"""Proof of a router mode: which workers requests must reach in each mode, and whether those that were observed agree. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynamo.ops.report import CheckRow, failed, passed, skipped, warned

MODES = ("round-robin", "random", "power-of-two", "kv", "direct", "least-loaded", "device-aware-weighted")
LOAD_MODES = frozenset({"least-loaded", "device-aware-weighted"})
DEVICE_AWARE, CPU = "device-aware-weighted", "cpu"
ROUNDS = 4
"""Requests to each worker in the distribution of unrelated prompts."""
RANDOM_ROUNDS = 24
"""Requests at least in the modes that draw at random: two workers look cyclic by chance once in ten million checks."""
BUSY_ROUNDS = 12
"""Requests for each worker while one is busy: a random draw misses it once in a hundred thousand checks."""
REPEATS = 3
"""Repetitions of a long prefix."""
WORKERS_MIN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterObservation:
    """What was observed of a running router."""

    workers: frozenset[str]
    """Ids of the workers that are registered."""
    devices: Mapping[str, str] = field(default_factory=dict)
    """Device of each worker, such as `cpu`; workers that register none are left out."""
    unrelated: tuple[str, ...] = ()
    """Worker of each unrelated prompt, sent one after the other."""
    repeated: tuple[str, ...] = ()
    """Worker of each request with the same long prefix, in order."""
    explanations: tuple[Mapping[str, Any], ...] = ()
    """The KV router's explanation of each repeated request; empty ones where there is none."""
    held: tuple[str, ...] = ()
    """Workers that were kept busy, one request each, while `meanwhile` was sent."""
    meanwhile: tuple[str, ...] = ()
    """Workers of the short requests that were sent, one after the other, while the others were busy."""
    directed: Mapping[str, str] = field(default_factory=dict)
    """Worker that answered, by the worker that the request named."""
    undirected_error: str = ""
    """Error of a request that named no worker; empty if it was answered."""


def rows_of_mode(mode: str, seen: RouterObservation) -> list[CheckRow]:
    """Return whether the observed requests prove a mode."""
    rows = [worker_row(seen)]
    if len(seen.workers) < WORKERS_MIN:
        return [*rows, skipped("mode", f"{mode} cannot be observed with fewer than {WORKERS_MIN} workers")]
    if mode == "kv":
        return [*rows, *_kv_rows(seen)]
    if mode == "direct":
        return [*rows, *_direct_rows(seen)]
    if mode == DEVICE_AWARE and has_device_groups(seen.devices):
        return [*rows, _device_row(seen)]
    rows.append(_spread_row(mode, seen))
    rows.append(_load_row(mode, seen) if mode in LOAD_MODES else _busy_row(mode, seen))
    return rows


def has_device_groups(devices: Mapping[str, str]) -> bool:
    """Return whether there are CPU workers and others, between which the device-aware mode weighs."""
    return CPU in devices.values() and any(device != CPU for device in devices.values())


def is_cyclic(sequence: Sequence[str], count: int) -> bool:
    """Return whether every `count` consecutive requests reached `count` workers."""
    groups = [sequence[at : at + count] for at in range(0, len(sequence), count)]
    return bool(groups) and all(len(set(group)) == len(group) for group in groups)


def worker_row(seen: RouterObservation) -> CheckRow:
    """Return whether there are workers to choose from."""
    if not seen.workers:
        return failed("workers", "no worker is registered", "run: dynamo troubleshoot")
    if len(seen.workers) < WORKERS_MIN:
        return warned("workers", "one worker: every mode chooses it", "start a second worker")
    return passed("workers", f"{len(seen.workers)} workers")


def _spread_row(mode: str, seen: RouterObservation) -> CheckRow:
    """Judge the distribution of unrelated prompts."""
    counts = Counter(seen.unrelated)
    text = ", ".join(f"{worker}: {counts.get(worker, 0)}" for worker in sorted(seen.workers))
    remedy = f"start the frontend with --router-mode {mode}, without other traffic"
    if mode == "round-robin":
        window = len(seen.workers)
        if is_cyclic(seen.unrelated, window):
            return passed("spread", f"round-robin: every {window} requests reached {window} workers ({text})")
        return failed("spread", f"round-robin: consecutive requests reached the same worker ({text})", remedy)
    if mode not in LOAD_MODES and is_cyclic(seen.unrelated, len(seen.workers)):
        return failed("spread", f"{mode}: the workers took turns, as in the mode round-robin ({text})", remedy)
    if len(counts) > 1 or mode in LOAD_MODES:
        return passed("spread", f"{mode}: requests one after the other ({text})")
    return failed("spread", f"{mode}: all {len(seen.unrelated)} requests reached one worker ({text})", remedy)


def _device_row(seen: RouterObservation) -> CheckRow:
    """Judge requests to an idle graph: a CPU worker has more load for its capacity with its first request."""
    on_cpus = [worker for worker in seen.unrelated if seen.devices.get(worker) == CPU]
    others = sorted({device for device in seen.devices.values() if device != CPU})
    text = f"{len(seen.unrelated)} requests one after the other, {len(on_cpus)} of them on CPU workers"
    if on_cpus or not seen.unrelated:
        return failed("mode", f"{DEVICE_AWARE}: {text}", f"start the frontend with --router-mode {DEVICE_AWARE}")
    return passed("mode", f"{DEVICE_AWARE}: {text}; the idle workers on {', '.join(others)} are preferred")


def _busy_row(mode: str, seen: RouterObservation) -> CheckRow:
    """Judge requests that were sent while one worker was busy: only power-of-two avoids it."""
    if not seen.held or not seen.meanwhile:
        return skipped("mode", f"{mode}: no worker could be kept busy")
    reached = sum(worker in seen.held for worker in seen.meanwhile)
    text = f"{mode}: {reached} of {len(seen.meanwhile)} requests reached the busy worker {seen.held[0]}"
    if (reached == 0) == (mode == "power-of-two"):
        return passed("mode", text)
    return failed("mode", text, f"start the frontend with --router-mode {mode}, without other traffic")


def _load_row(mode: str, seen: RouterObservation) -> CheckRow:
    if not seen.held or not seen.meanwhile:
        return skipped("mode", f"{mode}: no worker could be kept busy")
    if len(set(seen.held)) < len(seen.held):
        remedy = f"start the frontend with --router-mode {mode}"
        return failed("mode", f"{mode}: concurrent requests were sent to one worker ({', '.join(seen.held)})", remedy)
    busy = [worker for worker in seen.meanwhile if worker in seen.held]
    if busy:
        remedy = f"start the frontend with --router-mode {mode}"
        return failed("mode", f"{mode}: a busy worker ({busy[0]}) was chosen while another was idle", remedy)
    return passed(
        "mode",
        f"{mode}: {len(seen.held)} busy, the next {len(seen.meanwhile)} requests reached the idle worker {seen.meanwhile[0]}",
    )


def _kv_rows(seen: RouterObservation) -> list[CheckRow]:
    remedy = "start the frontend with --router-mode kv, and the workers with KV events and equal block sizes"
    first = seen.repeated[0] if seen.repeated else ""
    if not first or any(worker != first for worker in seen.repeated):
        return [failed("mode", f"kv: a repeated prefix reached {', '.join(seen.repeated) or 'no worker'}", remedy)]
    rows = [passed("mode", f"kv: {len(seen.repeated)} requests with one prefix reached worker {first}")]
    later = seen.explanations[1:]
    if not any(seen.explanations):
        rows.append(failed("explanations", "the frontend explains no decision: it does not route by KV cache", remedy))
        return rows
    agreeing = [one for one in later if str(one.get("worker_id")) == first and cached_blocks(one) > 0]
    if len(agreeing) == len(later):
        rows.append(passed("explanations", f"{cached_blocks(later[-1])} cached blocks on worker {first} decided"))
    else:
        count = len(later) - len(agreeing)
        rows.append(
            failed("explanations", f"{count} of {len(later)} decisions saw no cached block of the prefix", remedy)
        )
    return rows


def _direct_rows(seen: RouterObservation) -> list[CheckRow]:
    remedy = "start the frontend with --router-mode direct"
    wrong = {named: found for named, found in seen.directed.items() if named != found}
    rows = []
    if wrong or not seen.directed:
        text = ", ".join(f"{named} -> {found or 'none'}" for named, found in wrong.items())
        rows.append(failed("mode", f"direct: requests did not reach the worker they named ({text})", remedy))
    else:
        rows.append(passed("mode", f"direct: {len(seen.directed)} requests reached the worker they named"))
    if seen.undirected_error:
        rows.append(passed("undirected", f"a request that names no worker is refused: {seen.undirected_error}"))
    else:
        rows.append(
            failed("undirected", "a request that names no worker is answered: another mode is in force", remedy)
        )
    return rows


def cached_blocks(explanation: Mapping[str, Any]) -> int:
    """Return the blocks of the prompt that the chosen worker had cached on the device."""
    chosen = (explanation.get("worker_id"), explanation.get("dp_rank", 0))
    for one in explanation.get("candidates") or ():
        if (one.get("worker_id"), one.get("dp_rank", 0)) == chosen:
            return int(one.get("device") or 0)
    return 0
