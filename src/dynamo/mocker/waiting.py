"""Waiting flags: those of upstream's mocker that this one knows and does not honour yet (serving-plane.md §5.11). Pure."""

from dynamo.backend import waiting
from dynamo.core.waiting import Waiting
from dynamo.llm.router_waiting import ADVERTISED, AIS


def _given(flag: str, default: str | bool = "") -> Waiting:
    return Waiting(flag, None, default)


WAITING: tuple[Waiting, ...] = (
    *waiting.WAITING,
    _given("--disaggregation-mode", "agg"),
    _given("--is-prefill-worker", default=False),
    _given("--is-decode-worker", default=False),
    _given("--extra-engine-args"),
    _given("--reasoning"),
    _given("--response-replay-trace-path"),
    _given("--planner-profile-data"),
    _given("--zmq-kv-events-ports"),
    _given("--zmq-replay-ports"),
    _given("--bootstrap-ports"),
    _given("--kv-transfer-bandwidth"),
    _given("--kv-transfer-timing-mode", "full_prompt"),
    _given("--kv-cache-dtype", "auto"),
    _given("--kv-bytes-per-token"),
    _given("--num-host-blocks"),
    _given("--host-offload-d2h-bandwidth-gbps"),
    _given("--host-offload-h2d-bandwidth-gbps"),
    _given("--gpu-memory-utilization", "0.9"),
    _given("--mem-fraction-static", "0.88"),
    _given("--free-gpu-memory-fraction", "0.9"),
    _given("--sglang-schedule-policy", "fifo"),
    _given("--sglang-page-size"),
    _given("--sglang-max-prefill-tokens", "16384"),
    _given("--sglang-chunked-prefill-size", "8192"),
    _given("--sglang-clip-max-new-tokens", "4096"),
    _given("--sglang-schedule-conservativeness", "1.0"),
    _given("--sglang-generate", default=False),
    _given("--trtllm-capacity-scheduler-policy", "guaranteed_no_evict"),
    Waiting("--ais-perf-model", None, default=False, aliases=("--aic-perf-model",)),
    _given("--router-mode", "round-robin"),
    _given("--active-decode-blocks-threshold"),
    _given("--active-prefill-tokens-threshold"),
    _given("--active-prefill-tokens-threshold-frac"),
    *(Waiting(one.flag, None, one.default, one.aliases) for one in (*ADVERTISED, *AIS)),
)
"""Its variables of routing are the frontend's too, which may run beside it: they are not refused here."""
