"""Prometheus queries of the planner, as the released one sends them, and the choice among their rows. Pure."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from dynamo.planner.config.planner_config import Backend

BY = "sum by (model, dynamo_namespace)"
ROUTER = "dynamo_component_router_"
FRONTEND_PREFIX = "dynamo_frontend_"
STARTED, ENDED = "requests_started_total", "requests_total"
ROUTER_QUEUES = f'{{__name__=~"{FRONTEND_PREFIX}router_queue_pending_(requests|isl_tokens|cached_tokens)"}}'
"""Query of the gauges of the routers' queues."""


class QueryRow(msgspec.Struct):
    """One row of an instant query: its labels, and the time and value in text."""

    metric: dict[str, str] = {}
    value: tuple[float, str] = (0.0, "NaN")

    def number(self) -> float:
        """Return the value; NaN for malformed text."""
        try:
            return float(self.value[1])
        except ValueError:
            return math.nan


class QueryData(msgspec.Struct, rename={"result_type": "resultType"}):
    """Rows of an instant query."""

    result: list[QueryRow] = []
    result_type: str = "vector"


class QueryReply(msgspec.Struct, rename={"error_type": "errorType"}):
    """Response of `/api/v1/query`."""

    status: str
    data: QueryData | None = None
    error: str = ""
    error_type: str = ""
    warnings: Any = None


@dataclass(frozen=True, slots=True)
class Selection:
    """Series of the deployment."""

    namespace: str
    model_name: str | None = None

    def chosen(self, rows: Iterable[QueryRow]) -> list[QueryRow]:
        """Return the rows of the namespace and, if it is known, of the model, whose case does not matter."""
        model = self.model_name.lower() if self.model_name else None
        return [
            one
            for one in rows
            if one.metric.get("dynamo_namespace") == self.namespace
            and (model is None or one.metric.get("model", "").lower() == model)
        ]

    @property
    def router_label(self) -> str:
        """Label selector of router metrics, whose namespaces have `_` in place of `-`."""
        return f'dynamo_namespace="{escaped(self.namespace.replace("-", "_"))}"'


def escaped(text: str) -> str:
    """Return text for a quoted label value of a query."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def frontend_mean(name: str, window: str) -> str:
    """Return the query of the mean of a frontend histogram."""
    full = FRONTEND_PREFIX + name
    return f"{BY} (increase({full}_sum[{window}])) / {BY} (increase({full}_count[{window}]))"


def frontend_requests(counter: str, window: str) -> str:
    """Return the query of the increase of a frontend's request counter."""
    return f"increase({FRONTEND_PREFIX}{counter}[{window}])"


def router_mean(name: str, window: str, label: str) -> str:
    """Return the query of the mean of a router histogram."""
    full = ROUTER + name
    return f"sum(increase({full}_sum{{{label}}}[{window}])) / sum(increase({full}_count{{{label}}}[{window}]))"


def router_requests(window: str, label: str) -> tuple[str, str]:
    """Return the queries of the router's requests: with those that are not ended, and of the ended ones only."""
    started = f"increase({ROUTER}{STARTED}{{{label}}}[{window}])"
    ended = f"increase({ROUTER}{ENDED}{{{label}}}[{window}])"
    return f"sum({started} or ignoring(__name__) {ended})", f"sum({ended})"


def accept_length(backend: Backend, window: str, selector: str) -> str | None:
    """Return the query of the accepted tokens per step of speculative decoding; None where the engine has no metric."""
    if backend is Backend.VLLM:
        accepted = f"sum(rate(vllm:spec_decode_num_accepted_tokens_total{{{selector}}}[{window}]))"
        return f"1 + ({accepted}) / (sum(rate(vllm:spec_decode_num_drafts_total{{{selector}}}[{window}])))"
    if backend is Backend.SGLANG:
        return f"avg(avg_over_time(sglang:spec_accept_length{{{selector}}}[{window}]))"
    if backend is Backend.TRTLLM:
        return f"avg(avg_over_time(trtllm_spec_decode_acceptance_length{{{selector}}}[{window}]))"
    return None


def worker_selector(namespace: str, component: str, model_name: str | None) -> str:
    """Return the label selector of the workers' engine metrics."""
    labels = {"dynamo_namespace": namespace, "dynamo_endpoint": "generate", "dynamo_component": component}
    if model_name:
        labels["model"] = model_name
    return ",".join(f'{name}="{escaped(value)}"' for name, value in labels.items())
