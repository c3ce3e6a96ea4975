"""State of one request, and the rule that only its own methods change it."""

import ast
from collections.abc import Iterator
from pathlib import Path

from dynamo.core.metrics import MetricsRegistry
from dynamo.protocols.engine import CompletionUsage
from dynamo.serving.metrics import FrontendMetrics
from dynamo.serving.request_state import RequestState

SOURCE = Path(__file__).resolve().parents[3] / "src" / "dynamo"
OWNED = frozenset(("answer", "choice", "dispatch", "forwarded", "generation", "phase", "placement", "record", "state"))
"""Names under which the code of requests refers to objects that several modules share."""
PACKAGES = ("grpc", "http", "serving")


class FakeRequestSpan:
    """Span that records its attributes."""

    def __init__(self, parent: str) -> None:
        self.parent = parent
        self.facts: dict[str, object] = {}
        self.ended: list[BaseException | None] = []

    def headers(self) -> dict[str, str]:
        return {"traceparent": f"{self.parent}+"}

    def set(self, name: str, value: object) -> None:
        self.facts[name] = value

    def event(self, name: str, facts: dict[str, object]) -> None:
        self.facts[name] = facts

    def end(self, error: BaseException | None = None) -> None:
        self.ended.append(error)


class FakeTracer:
    """Tracer that records its spans."""

    def __init__(self) -> None:
        self.spans: list[FakeRequestSpan] = []

    def start(self, _name: str, headers: dict[str, str], **_facts: object) -> FakeRequestSpan:
        self.spans.append(FakeRequestSpan(headers.get("traceparent", "")))
        return self.spans[-1]


def state_of(**headers: str) -> RequestState:
    metrics = FrontendMetrics(MetricsRegistry())
    return RequestState(metrics, "completions", "m", stream=True, started_s=100.0, request_id="r", headers=headers)


def test_spans_of_workers_continue_the_span_of_the_request() -> None:
    state, tracer = state_of(traceparent="client", **{"x-request-id": "x"}), FakeTracer()
    state.begin_span(tracer)  # type: ignore[arg-type]
    assert state.headers == {"traceparent": "client+", "x-request-id": "x"}
    assert state.scope == ("r", state.headers, "http-request", "")
    assert state.begin_route(tracer, "part").headers() == {"traceparent": "client++"}  # type: ignore[arg-type]


def test_a_move_to_another_worker_is_an_event_of_its_dispatch() -> None:
    state, tracer = state_of(), FakeTracer()
    state.moved(0, 7, ValueError("lost"), 3)  # Without spans there are no records.
    state.begin_route(tracer, "part")  # type: ignore[arg-type]
    state.moved(0, 0xAB, ValueError("lost"), 3)
    assert tracer.spans[0].facts == {"migration": {"worker_id": "ab", "error": "lost", "output_tokens": 3}}


def test_ending_the_spans_reports_the_tokens_and_the_error() -> None:
    state, tracer, error = state_of(), FakeTracer(), ValueError()
    state.begin_span(tracer)  # type: ignore[arg-type]
    state.begin_route(tracer, "part")  # type: ignore[arg-type]
    state.end_spans(error, CompletionUsage(3, 2, 5))
    assert [span.ended for span in tracer.spans] == [[error], [error]]
    assert tracer.spans[0].facts == {"input_tokens": 3, "output_tokens": 2}


def test_written_returns_the_time_of_the_previous_write() -> None:
    state = state_of()
    assert (state.written(101.0), state.written(102.0), state.last_s) == (0.0, 101.0, 102.0)


def foreign_assignments(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Yield the assignments to attributes of objects that another class owns."""
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = list(node.targets)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        while targets:
            target = targets.pop()
            if isinstance(target, ast.Tuple | ast.List):
                targets += target.elts
            elif isinstance(target, ast.Attribute):
                holder = target.value
                name = holder.attr if isinstance(holder, ast.Attribute) else getattr(holder, "id", "")
                if name.lstrip("_") in OWNED:
                    yield target


def test_foreign_assignment_check_finds_state_attributes() -> None:
    code = (
        "self.state.a = 1\nstate.b, x = 1, 2\nanswer.state.c += 1\nself._generation.d: int = 1\nstate.e()\nself.f = 1"
    )
    assert sorted(one.attr for one in foreign_assignments(ast.parse(code))) == ["a", "b", "c", "d"]


def test_request_attributes_are_set_only_by_methods_of_their_class() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{target.lineno}: {ast.unparse(target)}"
        for package in PACKAGES
        for path in sorted((SOURCE / package).rglob("*.py"))
        for target in foreign_assignments(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert found == []
