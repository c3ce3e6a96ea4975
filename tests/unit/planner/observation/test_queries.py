"""Prometheus queries have the released planner's form."""

import math

from dynamo.planner.config.planner_config import Backend
from dynamo.planner.observation import queries
from dynamo.planner.observation.queries import QueryRow, Selection


def test_frontend_mean_divides_sum_by_count_for_each_model_and_namespace() -> None:
    by = "sum by (model, dynamo_namespace)"
    assert queries.frontend_mean("input_sequence_tokens", "180s") == (
        f"{by} (increase(dynamo_frontend_input_sequence_tokens_sum[180s])) / "
        f"{by} (increase(dynamo_frontend_input_sequence_tokens_count[180s]))"
    )


def test_router_queries_select_the_namespace_with_underscores() -> None:
    label = Selection("a-b").router_label
    assert label == 'dynamo_namespace="a_b"'
    started, ended = queries.router_requests("5s", label)
    total = 'increase(dynamo_component_router_requests_total{dynamo_namespace="a_b"}[5s])'
    assert ended == f"sum({total})"
    assert started == (
        'sum(increase(dynamo_component_router_requests_started_total{dynamo_namespace="a_b"}[5s])'
        f" or ignoring(__name__) {total})"
    )


def test_accept_length_exists_for_engines_with_speculative_decoding() -> None:
    selector = queries.worker_selector("n", "backend", 'm"')
    assert selector == 'dynamo_namespace="n",dynamo_endpoint="generate",dynamo_component="backend",model="m\\""'
    assert (queries.accept_length(Backend.VLLM, "5s", "x") or "").startswith("1 + (sum(rate(vllm:spec_decode_num_acc")
    assert queries.accept_length(Backend.SGLANG, "5s", "x") == "avg(avg_over_time(sglang:spec_accept_length{x}[5s]))"
    assert queries.accept_length(Backend.MOCKER, "5s", "x") is None


def test_rows_are_chosen_by_namespace_and_model_in_any_case() -> None:
    rows = [
        QueryRow({"dynamo_namespace": namespace, "model": model}, (0.0, "1"))
        for namespace, model in (("n", "Llama"), ("n", "other"), ("x", "llama"))
    ]
    assert Selection("n", "llama").chosen(rows) == rows[:1]
    assert Selection("n").chosen(rows) == rows[:2]


def test_malformed_value_is_not_a_number() -> None:
    assert math.isnan(QueryRow({}, (0.0, "?")).number())
