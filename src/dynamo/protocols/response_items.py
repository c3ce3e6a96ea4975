"""Items of a conversation in the Responses API: messages, reasoning, tool calls and their results.

    decode_items(raw)   the items of an `input`, or InvalidArgument

Items have the same form in requests and responses: a client may send the items of a response back.
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from dynamo.core.errors import InvalidArgument
from dynamo.protocols.strict import INVALID, MALFORMED, StrictDecoder, refuse

ITEMS_MAX = 10_000  # Larger than any conversation; bounds the decoding time of a body that contains only brackets.

ItemStatus = Literal["in_progress", "completed", "incomplete"]

# Content parts.


class ResponsePart(msgspec.Struct, tag_field="type", forbid_unknown_fields=True):
    """One part of a message's content."""


class InputText(ResponsePart, tag="input_text", omit_defaults=True):
    """Text of a user, a developer or a tool."""

    text: str
    prompt_cache_breakpoint: Any = None


class InputImage(ResponsePart, tag="input_image", omit_defaults=True):
    """An image, by its address or inline as a data URL."""

    image_url: str | None = None
    file_id: str | None = None
    detail: Literal["low", "high", "auto", "original"] | None = None
    prompt_cache_breakpoint: Any = None


class ResponseTopLogprob(msgspec.Struct):
    """An alternative for a token."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class Logprob(msgspec.Struct):
    """A token of a response and its alternatives."""

    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list[ResponseTopLogprob] = msgspec.field(default_factory=list)


class OutputText(ResponsePart, tag="output_text"):
    """Text of the assistant."""

    text: str
    annotations: list[Any] = msgspec.field(default_factory=list)
    logprobs: list[Logprob] | None = msgspec.field(default_factory=list)


class Refusal(ResponsePart, tag="refusal"):
    """The assistant's refusal."""

    refusal: str


class ReasoningText(ResponsePart, tag="reasoning_text"):
    """A piece of the model's reasoning."""

    text: str


class SummaryText(ResponsePart, tag="summary_text"):
    """A piece of a reasoning summary."""

    text: str


# Items.


class ResponseItem(msgspec.Struct, tag_field="type", forbid_unknown_fields=True, omit_defaults=True):
    """One item of a conversation: a message, reasoning, a tool call or its result."""


class MessageItem(ResponseItem, tag="message"):
    """A message of any role."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | InputImage | OutputText | Refusal]
    id: str | None = None
    status: ItemStatus | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCallItem(ResponseItem, tag="function_call"):
    """A tool call of the model; `arguments` is a JSON text."""

    arguments: str
    call_id: str
    name: str
    id: str | None = None
    status: ItemStatus | None = None
    namespace: str | None = None
    caller: Any = None
    is_async: bool | None = msgspec.field(default=None, name="async")


class FunctionOutputItem(ResponseItem, tag="function_call_output"):
    """The result of a tool call."""

    call_id: str
    output: str | list[InputText | InputImage]
    id: str | None = None
    status: ItemStatus | None = None
    name: str | None = None
    namespace: str | None = None
    caller: Any = None


class ReasoningItem(ResponseItem, tag="reasoning"):
    """Reasoning of the model."""

    summary: list[SummaryText]
    id: str | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    status: ItemStatus | None = None


class CompactionItem(ResponseItem, tag="compaction"):
    """A conversation that `/v1/responses/compact` has compacted; opaque to the client."""

    encrypted_content: str
    id: str | None = None
    created_by: str | None = None


class ItemReference(ResponseItem, tag="item_reference"):
    """An item of a stored response, by its id."""

    id: str


StoredItem = MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem | CompactionItem
InputItem = StoredItem | ItemReference
OutputItem = MessageItem | FunctionCallItem | ReasoningItem

_ITEMS: dict[str, StrictDecoder[Any]] = {
    "message": StrictDecoder(MessageItem),
    "function_call": StrictDecoder(FunctionCallItem),
    "function_call_output": StrictDecoder(FunctionOutputItem),
    "reasoning": StrictDecoder(ReasoningItem),
    "compaction": StrictDecoder(CompactionItem),
    "item_reference": StrictDecoder(ItemReference),
}


class _Kind(msgspec.Struct):
    """The field that selects an item's type: messages may omit it, and references may set it to null."""

    type: str | None = None
    role: Any = None


_kind = msgspec.json.Decoder(_Kind)


def decode_items(raw: str | Sequence[msgspec.Raw]) -> list[InputItem]:
    """Return the items of an `input`; a string becomes a user message. Raise `InvalidArgument`."""
    if isinstance(raw, str):
        return [MessageItem(role="user", content=raw)]
    if not raw:
        raise InvalidArgument(f"{INVALID}`input` must not be empty", param="input")
    if len(raw) > ITEMS_MAX:
        raise InvalidArgument(f"{INVALID}`input` has {len(raw)} items, expected at most {ITEMS_MAX}", param="input")
    return [_decode_item(one, f"input[{number}]") for number, one in enumerate(raw)]


def _decode_item(raw: msgspec.Raw, where: str) -> InputItem:
    try:
        kind = _kind.decode(raw)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidArgument(f"{MALFORMED}{where} is not a valid item", param=where) from None
    name = kind.type or ("item_reference" if kind.role is None else "message")
    decoder = _ITEMS.get(name)
    if decoder is None:
        refuse(f"{where}.type", f"`{name[:80]}` is not supported by this release: expected one of {', '.join(_ITEMS)}")
    item: InputItem = decoder.decode(raw, where)
    return item
