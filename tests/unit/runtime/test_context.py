"""Context: the caller's request id, and whether the response is still needed."""

import asyncio

import pytest
from tests.settle import turns

from dynamo.core.errors import InvalidArgument
from dynamo.runtime.context import Context, SpanProxy


def test_context_has_the_given_id_or_a_unique_one() -> None:
    assert Context("r").id() == "r"
    assert Context().id() != Context().id()


def test_context_stop_is_graceful_and_kill_is_not() -> None:
    stopped, killed = Context(), Context()
    stopped.stop_generating()
    killed.kill()
    assert (stopped.is_stopped(), stopped.is_killed()) == (True, False)
    assert (killed.is_stopped(), killed.is_killed()) == (True, True)


def test_context_can_be_killed_after_stop() -> None:
    context = Context()
    calls: list[bool] = []
    context.on_end(lambda: calls.append(context.is_killed()))
    for end in (context.stop_generating, context.stop_generating, context.kill, context.kill, context.stop_generating):
        end()
    assert context.is_killed()
    assert calls == [False, True]


def test_context_removed_end_callback_is_not_called() -> None:
    context = Context()
    calls: list[int] = []
    forget = context.on_end(lambda: calls.append(1))
    forget()
    forget()
    context.stop_generating()
    assert calls == []


def test_context_end_callback_added_after_kill_is_called_at_once() -> None:
    context = Context()
    context.kill()
    calls: list[int] = []
    context.on_end(lambda: calls.append(1))
    assert calls == [1]


async def test_context_wait_ends_when_the_request_is_stopped() -> None:
    context = Context()
    waits = [asyncio.ensure_future(context.async_killed_or_stopped()) for _ in range(2)]
    await turns()
    waits[0].cancel()
    await turns()
    context.stop_generating()
    assert await waits[1]
    assert await context.async_killed_or_stopped()


def test_detached_context_copies_metadata_and_is_not_killed_with_its_parent() -> None:
    parent = Context("a", {"tenant": "t"})
    child = parent.detached("b")
    parent.kill()
    child.metadata["more"] = "x"
    assert (child.id(), child.metadata["tenant"], child.is_stopped()) == ("b", "t", False)
    assert parent.metadata == {"tenant": "t"}


TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_context_creates_a_span_in_the_trace_of_its_caller() -> None:
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
def test_context_without_trace_propagates_only_the_client_request_id(header: str) -> None:
    context = Context(headers={"traceparent": header, "x-request-id": "x"})
    assert (context.trace_id, context.span_id, context.parent_span_id, context.trace_headers()) == (None,) * 4
    assert context.propagated() == {"x-request-id": "x"}


def test_context_metadata_is_mutable_and_must_be_text_when_sent() -> None:
    context = Context(metadata={"a": "1"})
    context.metadata["b"] = "2"
    assert context.metadata_to_send() == {"a": "1", "b": "2"}
    context.metadata = {"c": 3}  # type: ignore[dict-item]
    with pytest.raises(InvalidArgument, match="'c'"):
        context.metadata_to_send()


def test_context_spans_without_tracing_accept_every_call() -> None:
    context = Context()
    for span in (context.current_span(), context.start_span("tokenize", {"batch": 8})):
        with span as same:
            same.set_attribute("a", object())
            same.add_event("b", {"c": 1})
            same.set_status("ok")
        span.close()
    with pytest.raises(InvalidArgument, match="fine"):
        SpanProxy(None).set_status("fine")


def test_context_first_token_callbacks_run_once() -> None:
    context, reported = Context(), list[str]()
    context.on_first_token(lambda: reported.append("early"))
    context.notify_first_token()
    context.notify_first_token()
    context.on_first_token(lambda: reported.append("late"))
    assert reported == ["early", "late"]


async def test_context_shadow_on_another_loop_ends_with_its_context() -> None:
    for end in (Context.stop_generating, Context.kill):
        context = Context("r", {"tenant": "t"})
        shadow = context.shadow(asyncio.get_running_loop())
        assert (shadow.id(), shadow.metadata) == ("r", {"tenant": "t"})
        end(context)
        await turns()
        assert (shadow.is_stopped(), shadow.is_killed()) == (True, context.is_killed())
