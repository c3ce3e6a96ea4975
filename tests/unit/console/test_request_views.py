"""Request views: stages of a waterfall, states, selection, and a sentence about the longest stage."""

from dynamo.console.request_views import selected, view_of
from dynamo.serving.migration import Move
from dynamo.serving.recent_requests import RequestFacts


def facts(**changes: object) -> RequestFacts:
    values: dict[str, object] = {
        "request_id": "r", "model": "m", "endpoint": "chat_completions", "request_type": "stream", "started_s": 100.0,
        "prepared_s": 100.01, "route_s": (100.01, 100.02), "sent_s": 100.03, "first_s": 100.13, "last_s": 101.13,
        "ended_s": 101.14, "ended_at": 2000.0, "prompt_tokens": 64, "output_tokens": 11, "workers": (0xAB,),
    }  # fmt: skip
    return RequestFacts(**(values | changes))  # type: ignore[arg-type]


def test_stages_follow_each_other_from_the_start_to_the_end() -> None:
    view = view_of(facts(), 500.0, 3000.0)
    assert [one.name for one in view.stages] == ["preprocess", "route", "dispatch", "first_token", "decode", "finish"]
    assert view.stages[0].begin_ms == 0
    assert view.stages[-1].end_ms == view.total_ms == 1140.0
    assert (view.ttft_ms, view.itl_ms, view.state, view.workers) == (130.0, 100.0, "succeeded", ["ab"])
    assert view.started_at == 2000.0 - 1.14
    assert view.explanation == "88 % of 1.1 s went to generating the output: 11 tokens at 100 ms each."


def test_a_disaggregated_request_has_its_prefill_worker_before_its_route() -> None:
    view = view_of(facts(prefill_worker=0xCD, prefill_s=(100.01, 100.015), route_s=(100.015, 100.02)), 500.0, 3000.0)
    assert [one.name for one in view.stages][:3] == ["preprocess", "prefill", "route"]
    assert view.prefill_worker == "cd"


def test_the_stage_of_a_running_request_is_in_progress() -> None:
    waiting = facts(first_s=0.0, last_s=0.0, ended_s=0.0, ended_at=0.0)
    view = view_of(waiting, 105.0, 3000.0)
    assert (view.state, view.total_ms, view.ttft_ms) == ("running", 5000.0, None)
    assert (view.stages[-1].name, view.stages[-1].end_ms) == ("first_token", None)
    assert "the worker, before its first token: 64 of 64 prompt tokens were not cached" in view.explanation


def test_a_queued_request_names_the_queue_of_the_router() -> None:
    view = view_of(
        facts(route_s=(100.01, 108.0), sent_s=108.0, first_s=108.1, last_s=109.0, ended_s=109.0, queue_depth=7),
        500.0,
        3000.0,
    )
    assert view.explanation == "89 % of 9.0 s went to the choice of a worker, where 7 other request(s) waited."


def test_a_failed_request_shows_its_error_and_where_it_ended() -> None:
    view = view_of(
        facts(
            prepared_s=0.0,
            route_s=(0.0, 0.0),
            sent_s=0.0,
            first_s=0.0,
            last_s=0.0,
            error_type="validation",
            error="too long",
        ),
        500.0,
        3000.0,
    )
    assert view.state == "failed"
    assert view.explanation == "Failed (validation): too long"
    assert [one.name for one in view.stages] == ["preprocess"]


def test_a_moved_request_shows_each_failed_worker() -> None:
    view = view_of(facts(route_s=(100.5, 100.51), moves=(Move(100.5, 0xEF, "connection lost", 4),)), 500.0, 3000.0)
    assert [(one.at_ms, one.worker, one.tokens) for one in view.moves] == [(500.0, "ef", 4)]
    assert "sent to another worker 1 time(s)" in view.explanation


def test_selection_by_state_model_and_id() -> None:
    views = [
        view_of(facts(request_id="a", ended_at=1.0), 500.0, 3000.0),
        view_of(facts(request_id="b", first_s=101.0, ended_at=2.0), 500.0, 3000.0),
        view_of(facts(request_id="c", model="other", error_type="internal", ended_at=3.0), 500.0, 3000.0),
        view_of(facts(request_id="d", ended_at=0.0, ended_s=0.0, last_s=0.0), 500.0, 3000.0),
    ]

    def ids(**wanted: str) -> list[str]:
        return [one.id for one in selected(views, limit=10, **wanted)]

    assert ids() == ["d", "c", "b", "a"]
    assert (ids(state="running"), ids(state="failed"), ids(model="other"), ids(request_id="b")) == (
        ["d"],
        ["c"],
        ["c"],
        ["b"],
    )
    assert ids(state="slow") == ["b", "a", "c"]
    assert len(selected(views, limit=2)) == 2
