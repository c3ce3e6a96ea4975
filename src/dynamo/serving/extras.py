"""Extra response fields: the `nvext` data requested through `nvext.extra_fields`."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dynamo.protocols.nvext import NvExt
from dynamo.serving.choice import Choice
from dynamo.serving.generation import Generation
from dynamo.serving.prefill_phase import PrefillPhase
from dynamo.serving.request_state import RequestState

if TYPE_CHECKING:
    from dynamo.kv_router.router import Decision

WORKER_ID, TIMING, TOKEN_IDS, STOP_REASON = "worker_id", "timing", "completion_token_ids", "stop_reason"
ENGINE_DATA = "engine_data"
ENGINE_FIELDS = ("prompt_logprobs", "routed_experts")
"""Fields copied from the engine's data if requested by name."""
ROUTING = "routing"
"""Our own field: the reason for the choice of worker (docs/routing.md)."""
KNOWN = frozenset((WORKER_ID, TIMING, TOKEN_IDS, STOP_REASON, ENGINE_DATA, ROUTING, *ENGINE_FIELDS))
EXPLAIN, YES = b"x-dynamo-explain", frozenset((b"1", b"true"))
"""Request header for the routing explanation as a response header, `x-dynamo-routing`."""
QUERY = "query_instance_id"
"""Annotation that requests the worker id."""


class Extras:
    """Extra fields of one request, reported per chunk or once."""

    def __init__(self, wanted: frozenset[str], state: RequestState) -> None:
        self._wanted = wanted
        self._state = state
        self._received_ms = int(time.time() * 1e3 - (time.perf_counter() - state.started_s) * 1e3)

    @property
    def wants_token_ids(self) -> bool:
        """Whether choices must keep their token ids."""
        return TOKEN_IDS in self._wanted

    def of_chunk(
        self, generation: Generation, choice: Choice, *, with_ids: bool = True, is_last: bool = False
    ) -> dict[str, Any]:
        """Return the fields of a chunk; token ids are those since the last chunk with ids."""
        extra = self._worker(generation)
        if choice.ids is not None:
            extra[TOKEN_IDS] = choice.take_ids() if with_ids else []
        if is_last:
            extra |= self._end([generation], [choice])
        return extra

    def of_whole(self, generations: Sequence[Generation], choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the fields of a whole response: of its first engine request, and the ids of all choices."""
        extra = self._worker(generations[0])
        if self.wants_token_ids:
            ids = [choice.ids or [] for choice in choices]
            extra[TOKEN_IDS] = ids[0] if len(ids) == 1 else ids
        return extra | self._end(generations, choices)

    def _worker(self, generation: Generation) -> dict[str, Any]:
        worker, prefill = generation.worker_id, prefill_of(generation)
        if prefill is not None:
            extra: dict[str, Any] = ids_of_phases(generation, prefill) if WORKER_ID in self._wanted else {}
        elif worker is None:
            return {}
        else:
            extra = self._ids(generation, worker) if WORKER_ID in self._wanted else {}
        if ROUTING in self._wanted and worker is not None:
            extra[ROUTING] = routing_of(worker, decision_of(generation))
        return extra

    def _ids(self, generation: Generation, worker: int) -> dict[str, Any]:
        routing = generation.request.routing
        prefill = routing.prefill_worker_id if routing is not None else None
        ids: dict[str, int] = {"prefill_worker_id": worker if prefill is None else prefill, "decode_worker_id": worker}
        decision = decision_of(generation)
        rank = decision.dp_rank if decision is not None else routing.dp_rank if routing is not None else None
        prefill_rank = rank if prefill is None else None  # Without a named prefill worker one rank does both phases.
        if routing is not None and routing.prefill_dp_rank is not None:
            prefill_rank = routing.prefill_dp_rank
        if prefill_rank is not None:
            ids["prefill_dp_rank"] = prefill_rank
        if rank is not None:
            ids["decode_dp_rank"] = rank
        return {WORKER_ID: ids}

    def _end(self, generations: Sequence[Generation], choices: Sequence[Choice]) -> dict[str, Any]:
        extra: dict[str, Any] = {}
        if TIMING in self._wanted:
            extra[TIMING] = self._timing(prefill_of(generations[0])) | hit_rate_of(generations[0])
        reasons = [choice.stop_reason for choice in choices if choice.stop_reason is not None]
        if STOP_REASON in self._wanted and reasons:
            extra[STOP_REASON] = reasons[0]
        data = next((one.engine_data for one in generations if one.engine_data), None)
        if data:
            if ENGINE_DATA in self._wanted:
                extra[ENGINE_DATA] = data
            extra |= {name: data[name] for name in ENGINE_FIELDS if name in self._wanted and name in data}
        return extra

    def _timing(self, prefill: PrefillPhase | None) -> dict[str, float]:
        state, now_s = self._state, time.perf_counter()
        timing: dict[str, float] = {"request_received_ms": self._received_ms}
        done_s = state.first_s if prefill is None else prefill.done_s or state.first_s
        if prefill is not None and state.first_s:
            timing["prefill_wait_time_ms"] = (prefill.sent_s - state.started_s) * 1e3
            timing["prefill_time_ms"] = max(0.0, done_s - prefill.sent_s) * 1e3
            timing["ttft_ms"] = (state.first_s - state.started_s) * 1e3
        elif state.first_s:
            sent_s = state.sent_s or state.started_s
            timing["prefill_wait_time_ms"] = (sent_s - state.started_s) * 1e3
            timing["prefill_time_ms"] = max(0.0, state.first_s - sent_s) * 1e3
            timing["ttft_ms"] = (state.first_s - state.started_s) * 1e3
        timing["total_time_ms"] = (now_s - state.started_s) * 1e3
        if prefill is not None and state.first_s and not prefill.is_whole:
            timing["kv_transfer_estimated_latency_ms"] = max(0.0, state.first_s - done_s) * 1e3
        return timing


def extras_of(nvext: NvExt | None, state: RequestState) -> Extras | None:
    """Return the extra fields that the request selects; None without any. Unknown names are ignored."""
    if nvext is None:
        return None
    wanted = KNOWN.intersection(nvext.extra_fields or ())
    if any(note.partition(":")[0] == QUERY for note in nvext.annotations or ()):
        wanted |= {WORKER_ID}
    return Extras(wanted, state) if wanted else None


def decision_of(generation: Generation) -> "Decision | None":
    """Return the latest decision of the KV router about the generation."""
    return None if generation.dispatch is None else generation.dispatch.decision


def hit_rate_of(generation: Generation) -> dict[str, float]:
    """Return the cached share of the prompt's blocks and the router's queue depth, if a KV router reported them."""
    prefill = prefill_of(generation)
    decision = decision_of(generation) if prefill is None else prefill.decision
    if decision is None:
        return {}
    if prefill is None:
        return {"kv_hit_rate": decision.hit_rate, "router_queue_depth": decision.queue_depth}
    return {"kv_hit_rate": decision.hit_rate, "router_queue_depth": prefill.queue_depth}


def prefill_of(generation: Generation) -> PrefillPhase | None:
    """Return the prefill phase, if the prompt was computed by another worker."""
    return None if generation.dispatch is None else generation.dispatch.prefill


def ids_of_phases(generation: Generation, prefill: PrefillPhase) -> dict[str, Any]:
    """Return the ids of both workers; only the prefill worker's if no decode phase followed."""
    ids = {"prefill_worker_id": prefill.instance_id}
    if prefill.dp_rank is not None:
        ids["prefill_dp_rank"] = prefill.dp_rank
    if generation.worker_id is not None:
        ids["decode_worker_id"] = generation.worker_id
        decision = decision_of(generation)
        if decision is not None:
            ids["decode_dp_rank"] = decision.dp_rank
    return {WORKER_ID: ids}


def routing_of(worker_id: int, decision: "Decision | None") -> dict[str, Any]:
    """Return the chosen worker and, with a KV router, the cached prompt blocks by tier and the cost."""
    if decision is None:
        return {"worker_id": worker_id}
    return {
        "worker_id": decision.worker_id,
        "dp_rank": decision.dp_rank,
        "device_blocks": decision.device_blocks,
        "host_blocks": decision.host_blocks,
        "disk_blocks": decision.disk_blocks,
        "prompt_blocks": decision.blocks,
        "cost": decision.cost,
    }


def explanation_of(generation: Generation) -> bytes:
    """Return the routing explanation as a response header line."""
    return explained(generation.worker_id, decision_of(generation))


def explained(worker: int | None, decision: "Decision | None") -> bytes:
    """Return the header line for a worker and a KV router's decision."""
    if decision is not None:
        text = (
            f"worker={decision.worker_id}; rank={decision.dp_rank}; device={decision.device_blocks}; "
            f"host={decision.host_blocks}; disk={decision.disk_blocks}; blocks={decision.blocks}; cost={decision.cost:g}"
        )
    elif worker is not None:
        text = f"worker={worker}"
    else:
        return b""
    return f"x-dynamo-routing: {text}\r\n".encode()
