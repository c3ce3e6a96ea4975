"""Requests of each API become what a frontend routes by."""

import json
from typing import Any, cast

import pytest

from dynamo.core.errors import InvalidArgument
from dynamo.epp.prompts import PromptReader, error_body, kind_of
from dynamo.protocols.openai import ChatCompletionRequest
from dynamo.serving.errors import ErrorAnswer
from dynamo.serving.models import Models


def reader(*, strips: bool = True, ignores: bool = False) -> PromptReader:
    return PromptReader(cast("Models", None), strips_preamble=strips, ignores_unknown=ignores)


async def read(path: str, body: dict[str, Any], made: PromptReader | None = None) -> Any:
    return await (made or reader()).read(path, bytearray(json.dumps(body).encode()))


TEXT = "hello"
MESSAGES = [{"role": "user", "content": TEXT}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"model": "m", "messages": MESSAGES}),
        ("/v1/responses", {"model": "m", "input": TEXT}),
        (
            "/v1/responses",
            {"model": "m", "input": [{"role": "user", "content": TEXT}], "previous_response_id": "resp_1"},
        ),
        ("/tenant/v1/messages", {"model": "m", "messages": MESSAGES, "max_tokens": 4}),
    ],
)
async def test_chats_of_every_api_have_the_same_messages(path: str, body: dict[str, Any]) -> None:
    chat = await read(path, body)
    assert isinstance(chat, ChatCompletionRequest)
    assert [(one.role, one.content) for one in chat.messages] == [("user", TEXT)]
    assert (chat.model, kind_of(chat)) == ("m", "Chat")


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/completions", {"model": "m", "prompt": TEXT}, "Completions"),
        ("/v1/embeddings", {"model": "m", "input": TEXT}, "Embedding"),
        ("/v1/classify", {"model": "m", "input": TEXT}, "Classify"),
        ("/v1/pooling", {"model": "m", "input": TEXT}, "Pooling"),
        ("/v1/rerank", {"model": "m", "query": TEXT, "documents": [TEXT]}, "Rerank"),
    ],
)
async def test_other_requests_name_the_type_of_their_models(path: str, body: dict[str, Any], kind: str) -> None:
    assert kind_of(await read(path, body)) == kind


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/responses/resp_1", "/v1/messages/count_tokens", "/v1/responses/compact"]
)
async def test_content_of_other_paths_is_not_read(path: str) -> None:
    assert await reader().read(path, bytearray(b"{")) is None


async def test_settings_of_frontends_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"model": "m", "input": TEXT, "unknown": 1}
    with pytest.raises(InvalidArgument):
        await read("/v1/responses", body)
    assert await read("/v1/responses", body, reader(ignores=True))
    preamble = "x-anthropic-billing-header: cc_version=1; cch=2;"
    message = {"model": "m", "messages": MESSAGES, "max_tokens": 4, "system": f"{preamble}\nBe brief."}
    stripped = await read("/v1/messages", message)
    kept = await read("/v1/messages", message, reader(strips=False))
    assert (preamble in str(stripped.messages[0].content), preamble in str(kept.messages[0].content)) == (False, True)
    monkeypatch.setenv("DYN_STRIP_ANTHROPIC_PREAMBLE", "false")
    assert not PromptReader.from_environment(cast("Models", None)).strips_preamble


async def test_referenced_items_are_left_out() -> None:
    items = [{"type": "item_reference", "id": "msg_1"}, {"role": "user", "content": TEXT}]
    assert [one.content for one in (await read("/v1/responses", {"model": "m", "input": items})).messages] == [TEXT]


def test_error_has_the_form_of_its_api() -> None:
    error = ErrorAnswer(404, "absent")
    assert json.loads(error_body("/v1/messages?beta=true", error))["type"] == "error"
    assert error_body("/v1/chat/completions", error) == error.body()
