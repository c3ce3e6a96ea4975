"""Instance queries are answered by the KV router alone."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tests.scripted_engine.script import Script
from tests.scripted_engine.stack import ScriptedStackPool

from dynamo.core.errors import NotReady

NOTE = {"annotations": ["query_instance_id:", "request_id"]}
WORKER = {"prefill_worker_id": 7, "prefill_dp_rank": 3, "decode_worker_id": 7, "decode_dp_rank": 3}


class FixedRouter:
    """Chooses one rank for every request, and counts none."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.looks = 0

    def to_route_request(self, request: Any, request_id: str, **_: Any) -> str:
        return request_id

    async def know(self, route_request: str) -> None:
        pass

    def look(self, route_request: str) -> Any:
        self.looks += 1
        if self.error is not None:
            raise self.error
        return SimpleNamespace(worker_id=7, dp_rank=3)


@pytest.fixture
def router(stacks: ScriptedStackPool, monkeypatch: pytest.MonkeyPatch) -> Iterator[FixedRouter]:
    made = FixedRouter()
    with monkeypatch.context() as patch:
        patch.setattr(stacks.plain.models.find("m", "Chat"), "kv", made)
        yield made


def test_chat_query_returns_workers_and_tokens_without_generating(
    stacks: ScriptedStackPool, router: FixedRouter
) -> None:
    answer = stacks.run(stacks.plain.chat(Script(["never generated"]), nvext=NOTE)).json
    assert answer["nvext"]["worker_id"] == WORKER
    tokens = answer["nvext"]["token_ids"]
    assert "Hi" in stacks.plain.models.find("m", "Chat").preprocessor.tokenizer.decode(tokens)
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"content": None, "refusal": None, "role": "assistant"},
            "finish_reason": None,
            "logprobs": None,
        }
    ]
    assert answer["object"] == "chat.completion"
    assert "usage" not in answer


def test_streamed_query_returns_one_chunk_after_the_annotations(stacks: ScriptedStackPool, router: FixedRouter) -> None:
    script = Script(["never generated"])
    stream = stacks.run(stacks.plain.chat(script, stream=True, stream_options={"include_usage": True}, nvext=NOTE))
    (event,) = stream.events
    assert stream.body.startswith(b"event: request_id")
    assert stream.body.endswith(b"data: [DONE]\n\n")
    assert event["nvext"]["worker_id"] == WORKER
    assert event["choices"] == [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None, "logprobs": None}]


def test_completion_query_returns_an_empty_text(stacks: ScriptedStackPool, router: FixedRouter) -> None:
    answer = stacks.run(stacks.plain.complete(Script(["never generated"]), nvext=NOTE)).json
    assert (answer["choices"], answer["usage"]) == ([{"text": "", "index": 0}], None)
    assert answer["nvext"]["worker_id"] == WORKER


def test_query_without_an_available_worker_is_refused(stacks: ScriptedStackPool, router: FixedRouter) -> None:
    router.error = NotReady("no worker")
    assert stacks.run(stacks.plain.chat(Script(["x"]), nvext=NOTE)).status == 503


@pytest.mark.parametrize("note", ["query_instance_id", "request_id"])
def test_unrelated_annotations_do_not_start_a_query(stacks: ScriptedStackPool, router: FixedRouter, note: str) -> None:
    stacks.run(stacks.plain.chat(Script(["x"]), nvext={"annotations": [note]}))
    assert router.looks == 0


def test_query_without_a_kv_router_generates_the_response(stacks: ScriptedStackPool) -> None:
    answer = stacks.run(stacks.plain.chat(Script(["Hi"]), nvext=NOTE)).json
    assert answer["choices"][0]["message"]["content"] == "Hi"
