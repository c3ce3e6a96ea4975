"""Compaction: replaces a conversation by the caller's own messages and a summary of everything else. Pure.

The summary is stored in `encrypted_content` of a `compaction` item, encoded and not encrypted: the client sends the item
back unchanged, to this frontend or to another one of the same release.
"""

from collections.abc import Sequence

from dynamo.api.responses.ids import item_id
from dynamo.api.sealed_text import sealed, unsealed
from dynamo.core.errors import InvalidArgument
from dynamo.protocols.response_items import CompactionItem, InputText, MessageItem, OutputText, StoredItem
from dynamo.protocols.responses import Compaction, Response, ResponseUsage
from dynamo.protocols.strict import INVALID

SUMMARY_TOKENS_MAX = 1024  # About a page; short relative to conversations worth compacting.
SUMMARY_REQUEST = (
    "Summarize the conversation so far, so that it can be continued from the summary alone. Keep facts, names, numbers, "
    "decisions, results of tool calls and open tasks. Write only the summary."
)
SUMMARY_HEAD = "Summary of the conversation so far:\n"

SUMMARY_PREFIX = "dynamo-summary-1:"


def unsealed_summary(item: CompactionItem) -> str:
    """Return the summary of a compaction item. Raise `InvalidArgument` for an item from another server."""
    summary = unsealed(SUMMARY_PREFIX, item.encrypted_content)
    if summary is None:
        raise InvalidArgument(
            f"{INVALID}`encrypted_content` of a compaction item was not made by /v1/responses/compact of this server",
            param="input",
        )
    return summary


def summary_of(response: Response) -> str:
    """Return the text of the model's answer to `SUMMARY_REQUEST`."""
    texts = [
        part.text
        for item in response.output
        if isinstance(item, MessageItem) and not isinstance(item.content, str)
        for part in item.content
        if isinstance(part, OutputText)
    ]
    return "".join(texts).strip()


def compacted(items: Sequence[StoredItem], response: Response) -> Compaction:
    """Return the replacement of a conversation: the messages that the model did not write, and its summary."""
    output: list[StoredItem] = []
    for number, item in enumerate(items):
        if isinstance(item, MessageItem) and item.role != "assistant":
            content = [InputText(item.content)] if isinstance(item.content, str) else item.content
            name = item.id or item_id("msg", response.id, number)
            output.append(MessageItem(item.role, [*content], name, "completed", item.phase))
    output.append(CompactionItem(sealed(SUMMARY_PREFIX, summary_of(response)), item_id("cmp", response.id, len(items))))
    assert isinstance(response.usage, ResponseUsage), "a whole response has usage"
    return Compaction(id=response.id, created_at=response.created_at, output=output, usage=response.usage)
