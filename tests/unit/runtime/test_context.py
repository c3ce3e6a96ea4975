"""Context: the caller's request id, and whether the response is still needed."""

import asyncio

import pytest
from tests.settle import turns

from dynamo.core.errors import InvalidArgument
from dynamo.runtime.context import Context, SpanProxy


def test_a_context_has_an_id_of_its_own_or_the_given_one() -> None:
    assert Context("r").id() == "r"
    assert Context().id() != Context().id()


def test_stopping_is_graceful_and_killing_is_not() -> None:
    stopped, killed = Context(), Context()
    stopped.stop_generating()
    killed.kill()
    assert (stopped.is_stopped(), stopped.is_killed()) == (True, False)
    assert (killed.is_stopped(), killed.is_killed()) == (True, True)


def test_what_was_stopped_can_still_be_killed() -> None:
    context = Context()
    calls: list[bool] = []
    context.on_end(lambda: calls.append(context.is_killed()))
    for end in (context.stop_generating, context.stop_generating, context.kill, context.kill, context.stop_generating):
        end()
    assert context.is_killed()
    assert calls == [False, True]


def test_who_is_no_longer_interested_is_not_called() -> None:
    context = Context()
    calls: list[int] = []
    forget = context.on_end(lambda: calls.append(1))
    forget()
    forget()
    context.stop_generating()
    assert calls == []


def test_who_comes_late_is_called_at_once() -> None:
    context = Context()
    context.kill()
    calls: list[int] = []
    context.on_end(lambda: calls.append(1))
    assert calls == [1]


async def test_waiting_ends_when_the_request_is_stopped() -> None:
    context = Context()
    waits = [asyncio.ensure_future(context.async_killed_or_stopped()) for _ in range(2)]
    await turns()
    waits[0].cancel()
    await turns()
    context.stop_generating()
    assert await waits[1]
    assert await context.async_killed_or_stopped()


def test_a_detached_context_has_the_metadata_and_a_life_of_its_own() -> None:
    parent = Context("a", {"tenant": "t"})
    child = parent.detached("b")
    parent.kill()
    child.metadata["more"] = "x"
    assert (child.id(), child.metadata["tenant"], child.is_stopped()) == ("b", "t", False)
    assert parent.metadata == {"tenant": "t"}


TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_a_request_has_a_span_of_its_own_in_its_callers_trace() -> None:
    context = Context(headers={"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "a=b", "authorization": "secret"})
    assert (context.trace_id, context.parent_span_id) == (TRACE, SPAN)
    span = context.span_id
    assert span is not None
    assert len(span) == 16
    assert span not in {SPAN, "0" * 16}
    assert context.trace_headers() == {"traceparent": f"00-{TRACE}-{span}-01", "tracestate": "a=b"}

    child = Context("child", headers=context.trace_headers())
    assert (child.trace_id, child.parent_span_id) == (TRACE, span)
    assert child.span_id != span
    assert context.detached("d").parent_span_id == span


@pytest.mark.parametrize(
    "header",
    ["", "00-4bf9-00f0-01", f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE.upper()}-{SPAN}-01"],
)
def test_outside_a_trace_only_the_clients_request_id_goes_on(header: str) -> None:
    context = Context(headers={"traceparent": header, "x-request-id": "x"})
    assert (context.trace_id, context.span_id, context.parent_span_id, context.trace_headers()) == (None,) * 4
    assert context.propagated() == {"x-request-id": "x"}


def test_metadata_is_live_and_must_be_text_to_travel() -> None:
    context = Context(metadata={"a": "1"})
    context.metadata["b"] = "2"
    assert context.metadata_to_send() == {"a": "1", "b": "2"}
    context.metadata = {"c": 3}  # type: ignore[dict-item]
    with pytest.raises(InvalidArgument, match="'c'"):
        context.metadata_to_send()


def test_without_tracing_everything_is_taken_and_nothing_happens() -> None:
    context = Context()
    for span in (context.current_span(), context.start_span("tokenize", {"batch": 8})):
        with span as same:
            same.set_attribute("a", object())
            same.add_event("b", {"c": 1})
            same.set_status("ok")
        span.close()
    with pytest.raises(InvalidArgument, match="fine"):
        SpanProxy(None).set_status("fine")


def test_first_token_callbacks_run_once_each() -> None:
    context, told = Context(), list[str]()
    context.on_first_token(lambda: told.append("early"))
    context.notify_first_token()
    context.notify_first_token()
    context.on_first_token(lambda: told.append("late"))
    assert told == ["early", "late"]


async def test_a_shadow_for_another_loop_ends_with_its_context() -> None:
    for end in (Context.stop_generating, Context.kill):
        context = Context("r", {"tenant": "t"})
        shadow = context.shadow(asyncio.get_running_loop())
        assert (shadow.id(), shadow.metadata) == ("r", {"tenant": "t"})
        end(context)
        await turns()
        assert (shadow.is_stopped(), shadow.is_killed()) == (True, context.is_killed())
