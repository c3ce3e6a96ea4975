"""Prometheus queries: their text, and the choice among rows."""

import math

from dynamo.planner.config.planner_config import Backend
from dynamo.planner.observation.queries import (
    QueryRow,
    Selection,
    accept_length,
    escaped,
    frontend_mean,
    frontend_requests,
    router_requests,
    worker_selector,
)


def test_rows_of_the_namespace_and_model_are_chosen_in_any_case() -> None:
    labels = [("ns", "Model"), ("ns", "other"), ("other", "model")]
    rows = [QueryRow({"dynamo_namespace": namespace, "model": model}) for namespace, model in labels]
    assert Selection("ns", "MODEL").chosen(rows) == rows[:1]
    assert Selection("ns").chosen(rows) == rows[:2]


def test_malformed_value_is_nan() -> None:
    assert QueryRow({}, (0.0, "2.5")).number() == 2.5
    assert math.isnan(QueryRow({}, (0.0, "x")).number())


def test_router_label_has_underscores_in_place_of_hyphens() -> None:
    assert Selection("a-b").router_label == 'dynamo_namespace="a_b"'


def test_label_values_are_escaped() -> None:
    assert escaped('a"\\\n') == 'a\\"\\\\\\n'
    assert 'model="a\\"b"' in worker_selector("ns", "backend", 'a"b')
    assert "model" not in worker_selector("ns", "backend", None)


def test_frontend_queries_cover_the_window() -> None:
    assert frontend_requests("requests_total", "5s") == "increase(dynamo_frontend_requests_total[5s])"
    assert frontend_mean("x", "5s") == (
        "sum by (model, dynamo_namespace) (increase(dynamo_frontend_x_sum[5s]))"
        " / sum by (model, dynamo_namespace) (increase(dynamo_frontend_x_count[5s]))"
    )


def test_router_requests_prefer_started_ones() -> None:
    started, ended = router_requests("5s", 'a="b"')
    assert "requests_started_total" in started
    assert ended == 'sum(increase(dynamo_component_router_requests_total{a="b"}[5s]))'


def test_accept_length_exists_for_engines_with_such_a_metric() -> None:
    found = {backend: accept_length(backend, "5s", "") for backend in Backend}
    assert {backend for backend, query in found.items() if query is None} == {Backend.MOCKER}
