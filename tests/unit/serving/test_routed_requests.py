"""Metrics of routed requests."""

from dynamo.core.metrics import MetricsRegistry
from dynamo.protocols.discovery import EndpointId
from dynamo.serving.routed_requests import RoutedRequests


def test_routed_requests_of_several_parts_are_counted_one_by_one() -> None:
    registry = MetricsRegistry()
    routed = RoutedRequests(registry, EndpointId("n", "c", "e"), 15, "m", "aggregated")
    for _ in range(2):
        routed.sent(100)
    routed.ended(40, 0.5, None, reused_tokens=16, parts=2)
    lines = dict(line.rsplit(" ", 1) for line in registry.render().splitlines() if not line.startswith("#"))
    router = 'dynamo_namespace="n",dynamo_component="c",worker_id="f",router_id="15"'
    assert lines[f"dynamo_component_router_requests_started_total{{{router}}}"] == "2"
    assert lines[f"dynamo_component_router_requests_total{{{router}}}"] == "2"
    assert lines[f"dynamo_component_router_output_sequence_tokens_sum{{{router}}}"] == "40"
    assert lines[f"dynamo_component_router_time_to_first_token_seconds_count{{{router}}}"] == "2"
    assert lines[f"dynamo_component_router_inter_token_latency_seconds_count{{{router}}}"] == "0"
    assert (
        lines[f'dynamo_component_router_kv_worker_reused_tokens_total{{{router},model="m",phase="aggregated"}}'] == "16"
    )
