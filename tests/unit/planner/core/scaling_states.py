"""Observed deployments for the tests of load and throughput scaling."""

from dynamo.planner.config.planner_config import parse
from dynamo.planner.core.scaling import ScalingState, Traffic, WorkerCapabilities
from dynamo.protocols.load import FORWARD_PASS_VERSION, ForwardPassMetrics, QueuedRequests, ScheduledRequests
from dynamo.protocols.planner import EngineCapabilities, RankKey, WorkerCounts

ENGINE = EngineCapabilities(
    num_gpu=1, max_num_batched_tokens=2048, max_num_seqs=64, context_length=4096, max_kv_tokens=100_000
)
SLA = {"optimization_target": "sla", "load_predictor": "constant", "load_min_observations": 1, "max_gpu_budget": -1}
TRAFFIC = Traffic(num_req=600.0, isl=1000.0, osl=100.0)


def steps(
    workers: int, *, kv: int = 1000, queued: int = 0, seconds: float | None = None
) -> dict[RankKey, ForwardPassMetrics]:
    """Return steps of workers whose time is 10 ms and one microsecond per KV token."""
    scheduled = ScheduledRequests(
        num_prefill_requests=1, sum_prefill_tokens=500, num_decode_requests=2, sum_decode_kv_tokens=kv
    )
    waiting = QueuedRequests(num_prefill_requests=bool(queued), sum_prefill_tokens=queued)
    took = 0.01 + kv * 1e-6 if seconds is None else seconds
    return {
        (str(one), 0): ForwardPassMetrics(FORWARD_PASS_VERSION, str(one), 0, 1, took, scheduled, waiting)
        for one in range(workers)
    }


def state(raw: dict[str, object], ready: int = 2, expected: int | None = None, pending: int = 0) -> ScalingState:
    made = ScalingState(parse({"mode": "decode", **raw}), WorkerCapabilities(prefill=ENGINE, decode=ENGINE))
    made.observe_workers(
        WorkerCounts(
            ready_num_decode=ready,
            expected_num_decode=ready + pending if expected is None else expected,
            pending_num_decode=pending,
        )
    )
    return made


def disaggregated(raw: dict[str, object], prefill: tuple[int, int], decode: tuple[int, int]) -> ScalingState:
    """Return the state of a deployment with these ready and starting workers of each role."""
    made = ScalingState(parse({"mode": "disagg", **raw}), WorkerCapabilities(prefill=ENGINE, decode=ENGINE))
    made.observe_workers(
        WorkerCounts(
            ready_num_prefill=prefill[0],
            expected_num_prefill=sum(prefill),
            pending_num_prefill=prefill[1],
            ready_num_decode=decode[0],
            expected_num_decode=sum(decode),
            pending_num_decode=decode[1],
        )
    )
    return made
