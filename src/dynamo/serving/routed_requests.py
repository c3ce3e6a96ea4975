"""Metrics of the requests that a frontend sends to one worker set, in every router mode, under upstream's names."""

from dynamo.core.metrics import MetricsRegistry, spread_buckets
from dynamo.protocols.discovery import EndpointId
from dynamo.runtime.metric_labels import WORKER_LABELS, worker_labels

ROUTER_LABELS = (*WORKER_LABELS, "router_id")
PHASE_LABELS = (*ROUTER_LABELS, "model", "phase")

TTFT_BUCKETS = spread_buckets(0.001, 480.0, 18)
ITL_BUCKETS = spread_buckets(0.001, 2.0, 13)
INPUT_BUCKETS = spread_buckets(50.0, 128_000.0, 12)
OUTPUT_BUCKETS = spread_buckets(50.0, 32_000.0, 10)
TRANSFER_BUCKETS = spread_buckets(0.001, 10.0, 15)
"""Upstream's buckets."""


class RoutedRequests:
    """Numbers, lengths and latencies of the requests of one model at one endpoint.

    `dynamo_component` is the component to which the requests are sent; `router_id` is this process's instance id in decimal.
    """

    def __init__(
        self, registry: MetricsRegistry, endpoint: EndpointId, instance_id: int, model: str, worker_type: str
    ) -> None:
        """`worker_type`: type of the workers on their cards; it decides the label `phase`."""
        router = {**worker_labels(endpoint, instance_id), "router_id": str(instance_id)}
        phase = worker_type if worker_type in {"prefill", "decode"} else "aggregated"
        by_phase = {**router, "model": model, "phase": phase}
        name = "dynamo_component_router_{}".format
        self._started = registry.counter(
            name("requests_started_total"), "Requests sent to a worker, retries included", ROUTER_LABELS
        ).labels(**router)
        self._ended = registry.counter(
            name("requests_total"), "Requests sent to a worker that ended", ROUTER_LABELS
        ).labels(**router)
        self._input = registry.histogram(
            name("input_sequence_tokens"), "Prompt tokens of a routed request", PHASE_LABELS, INPUT_BUCKETS
        ).labels(**by_phase)
        self._output = registry.histogram(
            name("output_sequence_tokens"), "Output tokens of a routed request", ROUTER_LABELS, OUTPUT_BUCKETS
        ).labels(**router)
        self._ttft = registry.histogram(
            name("time_to_first_token_seconds"), "Time from routing to the first token", ROUTER_LABELS, TTFT_BUCKETS
        ).labels(**router)
        self._itl = registry.histogram(
            name("inter_token_latency_seconds"), "Mean time between the tokens of a request", ROUTER_LABELS, ITL_BUCKETS
        ).labels(**router)
        self._transfer = registry.histogram(
            name("kv_transfer_estimated_latency_seconds"),
            "Time from the end of a prefill to the first token of its decode: an upper bound of the KV transfer time",
            ROUTER_LABELS,
            TRANSFER_BUCKETS,
        ).labels(**router)
        self._reused = registry.counter(
            name("kv_worker_reused_tokens_total"), "Cached prompt tokens that the worker reported", PHASE_LABELS
        ).labels(**by_phase)

    def sent(self, prompt_tokens: int) -> None:
        """Count a request that was sent to a worker."""
        self._started.value += 1
        self._input.observe(prompt_tokens)

    def ended(
        self, output_tokens: int, ttft_s: float | None, itl_s: float | None, reused_tokens: int = 0, parts: int = 1
    ) -> None:
        """Count the end of a request of `parts` engine requests, whose output tokens are counted together.

        `itl_s`: mean time between its tokens, None where it has fewer than two; `reused_tokens`: cached prompt tokens.
        """
        self._ended.value += parts
        self._output.observe_many(output_tokens / parts, parts)
        self._reused.value += reused_tokens
        if ttft_s is not None:
            self._ttft.observe_many(ttft_s, parts)
        if itl_s is not None:
            self._itl.observe_many(itl_s, parts)

    def transferred(self, seconds: float) -> None:
        """Record the time from the end of a prefill to the first token of its decode."""
        self._transfer.observe(seconds)
