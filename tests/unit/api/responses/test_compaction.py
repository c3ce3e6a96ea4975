"""Compacted conversation: it keeps the messages that the model did not generate, and a readable summary."""

import pytest

from dynamo.api.responses.compaction import SUMMARY_PREFIX, compacted, unsealed_summary
from dynamo.api.responses.convert import messages_of
from dynamo.api.responses.ids import new_response_id
from dynamo.api.sealed_text import sealed
from dynamo.core.errors import InvalidArgument
from dynamo.protocols.openai import ChatMessage
from dynamo.protocols.response_items import (
    CompactionItem,
    FunctionCallItem,
    FunctionOutputItem,
    InputText,
    MessageItem,
    OutputText,
    ReasoningItem,
)
from dynamo.protocols.responses import CachedTokens, ReasoningTokens, Response, ResponseUsage

USAGE = ResponseUsage(3, CachedTokens(), 2, ReasoningTokens(), 5)


def test_compaction_keeps_caller_messages_and_ends_with_the_summary() -> None:
    items = [
        MessageItem("developer", "be brief"),
        MessageItem("user", [InputText("hi")], id="msg_1"),
        ReasoningItem([]),
        MessageItem("assistant", "hello"),
        FunctionCallItem("{}", "c", "f"),
        FunctionOutputItem("c", "1"),
        CompactionItem(sealed(SUMMARY_PREFIX, "before")),
    ]
    thoughts_and_text = [ReasoningItem([]), MessageItem("assistant", [OutputText(" All said. €")])]
    response = Response(id=new_response_id(), created_at=7, model="m", output=[*thoughts_and_text], usage=USAGE)
    found = compacted(items, response)
    assert (found.created_at, found.usage, found.object) == (7, USAGE, "response.compaction")
    developer, user, summary = found.output
    assert isinstance(developer, MessageItem) and isinstance(user, MessageItem)
    assert (developer.content, user.content, user.id) == ([InputText("be brief")], [InputText("hi")], "msg_1")
    assert isinstance(summary, CompactionItem) and unsealed_summary(summary) == "All said. €"
    assert messages_of(found.output)[-1] == ChatMessage(
        role="user", content="Summary of the conversation so far:\nAll said. €"
    )


@pytest.mark.parametrize("content", ["", "gAAAAA", "dynamo-summary-1:!", "dynamo-summary-1:/w=="])
def test_compaction_item_of_another_server_is_refused(content: str) -> None:
    with pytest.raises(InvalidArgument, match="encrypted_content"):
        unsealed_summary(CompactionItem(content))
