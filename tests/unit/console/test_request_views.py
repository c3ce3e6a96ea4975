"""Request views: stages of a waterfall, states, selection, and a sentence about the longest stage."""

from typing import Any

from dynamo.console.request_views import RequestSelection, view_of
from dynamo.serving.request_facts import Move, RequestFacts


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


def test_disaggregated_request_view_has_the_prefill_stage_before_its_route() -> None:
    view = view_of(facts(prefill_worker=0xCD, prefill_s=(100.01, 100.015), route_s=(100.015, 100.02)), 500.0, 3000.0)
    assert [one.name for one in view.stages][:3] == ["preprocess", "prefill", "route"]
    assert view.prefill_worker == "cd"


def test_the_stage_of_a_running_request_is_in_progress() -> None:
    waiting = facts(first_s=0.0, last_s=0.0, ended_s=0.0, ended_at=0.0)
    view = view_of(waiting, 105.0, 3000.0)
    assert (view.state, view.total_ms, view.ttft_ms) == ("running", 5000.0, None)
    assert (view.stages[-1].name, view.stages[-1].end_ms) == ("first_token", None)
    assert "the prompt: worker ab computed 64 of 64 tokens, which were not cached" in view.explanation


def test_queued_request_view_names_the_router_queue() -> None:
    view = view_of(
        facts(
            route_s=(100.01, 108.0),
            sent_s=108.0,
            first_s=108.1,
            last_s=109.0,
            ended_s=109.0,
            queue_depth=7,
            queue_s=7.98,
        ),
        500.0,
        3000.0,
    )
    assert (
        view.explanation
        == "89 % of 9.0 s went to the queue of the router: no worker had capacity, with 7 other request(s)."
    )
    assert [one.name for one in view.stages][1:3] == ["route", "queue"]


def test_failed_request_view_shows_its_error_and_last_stage() -> None:
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


def test_migrated_request_view_shows_each_failed_worker() -> None:
    view = view_of(
        facts(route_s=(100.5, 100.51), moves=(Move(100.5, 0xEF, "connection lost", 4, 100.45, 100.55),)), 500.0, 3000.0
    )
    assert [(one.at_ms, one.worker, one.tokens) for one in view.moves] == [(500.0, "ef", 4)]
    assert "sent to another worker 1 time(s)" in view.explanation


def test_a_unary_response_generates_until_its_end() -> None:
    view = view_of(facts(request_type="unary", last_s=100.13, ended_s=101.13), 500.0, 3000.0)
    assert [(one.name, one.end_ms) for one in view.stages[-1:]] == [("decode", 1130.0)]
    assert (view.itl_ms, view.cause) == (100.0, "output")


def test_a_running_request_that_was_not_sent_waits_in_the_queue() -> None:
    waiting = facts(route_s=(0.0, 0.0), sent_s=0.0, first_s=0.0, last_s=0.0, ended_s=0.0, ended_at=0.0)
    view = view_of(waiting, 105.0, 3000.0)
    assert (view.stages[-1].name, view.stages[-1].end_ms, view.cause) == ("queue", None, "router-queue")


def test_a_failure_names_what_it_waited_for() -> None:
    failed = facts(first_s=0.0, last_s=0.0, ended_s=160.0, error_type="response_timeout", error="no token within 60 s")
    assert view_of(failed, 500.0, 3000.0).explanation == (
        "Failed (response_timeout): no token within 60 s. 100 % of 60.0 s went to "
        "the prompt: worker ab computed 64 of 64 tokens, which were not cached."
    )


def test_selection_by_state_model_id_and_duration() -> None:
    requests = [
        facts(request_id="a", ended_at=1.0, slow_s=0.1),
        facts(request_id="b", ended_at=2.0, slow_s=9.0),
        facts(request_id="c", model="other", error_type="internal", ended_at=20.0, ended_s=109.0),
        facts(request_id="d", ended_at=0.0, ended_s=0.0, last_s=0.0, started_s=499.5),
    ]

    def ids(**wanted: Any) -> list[str]:
        found = RequestSelection(**wanted)
        facts_ids = [one.request_id for one in found.of_facts(requests, 500.0)]
        views = found.of_views(view_of(one, 500.0, 3000.0) for one in found.of_facts(requests, 500.0))
        assert facts_ids == [one.id for one in views]
        return facts_ids

    assert ids() == ["d", "c", "b", "a"]
    assert (ids(state="running"), ids(state="failed"), ids(model="other")) == (["d"], ["c"], ["c"])
    assert (ids(state="succeeded"), ids(request_id="b"), ids(slower_than_ms=2000)) == (["b", "a"], ["b"], ["c"])
    assert ids(state="slow") == ["b", "a", "c"]
    assert len(ids(limit=2)) == 2


def test_selection_by_cause() -> None:
    requests = [facts(request_id="long"), facts(request_id="prompt", first_s=101.0, last_s=101.1)]
    views = [view_of(one, 500.0, 3000.0) for one in requests]
    assert [one.id for one in RequestSelection(cause="prefill").of_views(views)] == ["prompt"]
