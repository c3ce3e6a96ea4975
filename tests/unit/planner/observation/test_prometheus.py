"""Traffic from Prometheus: counted rows, and missing values."""

import pytest

from dynamo.planner.config.planner_config import parse
from dynamo.planner.core.router_queue import QueuedPrompts
from dynamo.planner.observation.prometheus import PrometheusTraffic, single, total
from dynamo.planner.observation.queries import QueryRow
from dynamo.planner.observation.traffic import RouterQueues


def rows(*values: str) -> list[QueryRow]:
    return [QueryRow({"dynamo_namespace": "ns", "model": "m"}, (0.0, value)) for value in values]


class AnsweredQueries(PrometheusTraffic):
    """Client whose queries return rows by a part of their text."""

    answers: dict[str, list[QueryRow]] = {}

    async def _query(self, query: str) -> list[QueryRow]:
        return next((found for part, found in self.answers.items() if part in query), [])


def client(answers: dict[str, list[QueryRow]], **settings: str) -> AnsweredQueries:
    raw = {"metric_pulling_prometheus_endpoint": "http://h:9090", "backend": "vllm", **settings}
    found = AnsweredQueries(parse(raw), "ns")
    found.answers = answers
    return found


def test_total_and_first_row_ignore_non_finite_values() -> None:
    assert (total(rows("1", "NaN", "2")), single(rows("NaN", "3", "4"))) == (3.0, 3.0)
    assert (total(rows("NaN")), single(rows("+Inf")), total([])) == (None, None, None)


async def test_window_without_a_request_counter_is_unknown() -> None:
    unknown = (await client({}).window(5.0)).unknown
    assert unknown.startswith('Prometheus has no dynamo_frontend_requests_total with dynamo_namespace="')
    unknown = (await client({}, throughput_metrics_source="router").window(5.0)).unknown
    assert unknown.startswith("Prometheus has no request counter of a router of namespace")


async def test_window_with_requests_but_without_lengths_is_unknown() -> None:
    found = await client({"requests_total": rows("3")}).window(5.0)
    assert found.traffic is None and found.unknown == "Prometheus has no request lengths of the window"


async def test_window_contains_requests_lengths_and_latencies_in_milliseconds() -> None:
    answers = {
        "requests_started_total": rows("4", "2"),
        "input_sequence_tokens": rows("100"),
        "output_sequence_tokens": rows("10"),
        "time_to_first_token": rows("0.25"),
    }
    found = await client(answers).window(5.0)
    assert found.traffic is not None
    assert (found.traffic.num_req, found.traffic.isl, found.traffic.osl) == (6, 100, 10)
    assert found.ttft_ms == pytest.approx(250) and found.itl_ms is None
    assert (found.traffic.kv_hit_rate, found.traffic.accept_length) == (None, None)


async def test_idle_window_is_known_without_lengths() -> None:
    found = await client({"requests_started_total": rows("0")}).window(5.0)
    assert found.traffic is not None and (found.traffic.num_req, found.traffic.isl) == (0, 0)


async def test_queues_of_the_routers_are_those_of_the_gauges() -> None:
    labels = {"dynamo_namespace": "ns", "model": "m", "worker_type": "decode"}
    gauges = [
        QueryRow({**labels, "__name__": f"dynamo_frontend_router_queue_pending_{name}"}, (0.0, value))
        for name, value in (("requests", "3"), ("isl_tokens", "4000"), ("cached_tokens", "1500"))
    ]
    other = QueryRow({**gauges[0].metric, "dynamo_namespace": "other"}, (0.0, "7"))
    found = client({"router_queue_pending": [*gauges, other]})
    await found.sample()
    assert found.queues() == RouterQueues(decode=QueuedPrompts(3, 2500))
