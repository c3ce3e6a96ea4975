"""MessageWriter: stream events and whole message of Anthropic's Messages API. Pure.

It implements `Chunks` (serving/postprocessor.py).
"""

import hashlib
from base64 import b64encode
from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from dynamo.api.anthropic.convert import SEALED
from dynamo.api.anthropic.errors import error_details
from dynamo.api.content_blocks import BlockKind, BlockWriter, OutputBlock
from dynamo.api.sealed_text import sealed
from dynamo.core.codec import json_encode
from dynamo.parsers.base import Event
from dynamo.protocols.anthropic import (
    AnswerBlock,
    AnswerText,
    AnswerThinking,
    AnswerToolUse,
    AnthropicMessage,
    MessageUsage,
    StopReason,
    ThinkingTokens,
)
from dynamo.protocols.engine import CompletionUsage
from dynamo.serving.errors import ErrorAnswer
from dynamo.serving.postprocessor import FinishedChoice, TokenEntry
from dynamo.text.detokenizer import json_text

DELTAS = {
    BlockKind.TEXT: b'{"type":"text_delta","text":"%b"}',
    BlockKind.THOUGHT: b'{"type":"thinking_delta","thinking":"%b"}',
    BlockKind.CALL: b'{"type":"input_json_delta","partial_json":"%b"}',
}
OURS = "call-"
"""Prefix of ids generated for calls without an id from the model (text/answer_parsing.py)."""
STOP_REASONS: dict[str, StopReason] = {"length": "max_tokens", "content_filter": "refusal"}


class MessageWriter(BlockWriter):
    """Writer of one message. Every delta has the usage so far, as upstream's have, which clients may count while they read."""

    counts = True

    def __init__(
        self, message_id: str, model: str, *, stop_sequences: Sequence[str] = (), hides_thoughts: bool = False
    ) -> None:
        super().__init__()
        self.message = AnthropicMessage(id=message_id, model=model, usage=MessageUsage(0, 0))
        self._stop_sequences = stop_sequences
        self._hides_thoughts = hides_thoughts
        self._counted = b""
        """Usage field of the next deltas."""

    # Parts of a stream.

    def begin(self, prompt_tokens: int) -> bytes:
        """Return `message_start`; cached prompt tokens are reported at the end."""
        self.message.usage.input_tokens = prompt_tokens
        return (
            event(b"message_start", b'"message":' + json_encode(self.message))
            + b'event: ping\ndata: {"type":"ping"}\n\n'
        )

    def count(self, usage: CompletionUsage) -> bytes:
        """Return the usage so far with the sum of its tokens."""
        counted = usage_of(usage)
        total = usage.prompt_tokens + usage.completion_tokens
        return b'%b,"total_tokens":%d}' % (json_encode(counted)[:-1], total)

    def events(
        self, index: int, events: Sequence[Event], usage: bytes, entries: Sequence[TokenEntry], offset: int
    ) -> bytes:
        """Return the block events of parsed events, with the usage in every delta."""
        self._counted = b',"usage":' + usage if usage else b""
        return super().events(index, events, usage, entries, offset)

    def finish(self, index: int, reason: str, stop_reason: int | str | None) -> bytes:
        """Close the last block and set the stop reason."""
        closing = self._write(self._row.finish())
        message = self.message
        if isinstance(stop_reason, str) and stop_reason in self._stop_sequences:
            message.stop_reason, message.stop_sequence = "stop_sequence", stop_reason
        elif reason in STOP_REASONS:
            message.stop_reason = STOP_REASONS[reason]
        else:
            message.stop_reason = "tool_use" if self._row.has_calls else "end_turn"
        return closing

    def usage(self, usage: CompletionUsage) -> bytes:
        """Return `message_delta` with stop reason and usage."""
        self.message.usage = usage_of(usage)
        delta = {"stop_reason": self.message.stop_reason, "stop_sequence": self.message.stop_sequence}
        return event(b"message_delta", b'"delta":%b,"usage":%b' % (json_encode(delta), json_encode(self.message.usage)))

    def end(self) -> bytes:
        """Return `message_stop`."""
        return b'event: message_stop\ndata: {"type":"message_stop"}\n\n'

    def failure(self, error: ErrorAnswer) -> bytes:
        """Return the error event."""
        return event(b"error", b'"error":' + json_encode(error_details(error)))

    # The whole message.

    def whole(self, choice: FinishedChoice, usage: CompletionUsage) -> AnthropicMessage:
        """Return the whole message."""
        self.events(0, choice.events(), b"", (), 0)
        self.finish(0, choice.finish_reason or "stop", choice.stop_reason)
        self.message.usage = usage_of(usage)
        return self.message

    # Implementation.

    def _opened(self, block: OutputBlock) -> bytes:
        opening = b'"index":%d,"content_block":%b' % (block.index, json_encode(opened(block)))
        return event(b"content_block_start", opening)

    def _grown(self, block: OutputBlock, text: str) -> bytes:
        if self._hides_thoughts and block.kind is BlockKind.THOUGHT:
            return b""
        return block_delta(block.index, DELTAS[block.kind] % json_text(text), self._counted)

    def _closed(self, block: OutputBlock, *, is_cut: bool) -> bytes:
        answer = self._answer(block)
        self.message.content.append(answer)
        closing = event(b"content_block_stop", b'"index":%d' % block.index)
        if isinstance(answer, AnswerThinking):
            signature = b'{"type":"signature_delta","signature":"%b"}' % json_text(answer.signature)
            return block_delta(block.index, signature, self._counted) + closing
        return closing

    def _answer(self, block: OutputBlock) -> AnswerBlock:
        text = block.text()
        match block.kind:
            case BlockKind.TEXT:
                return AnswerText(text)
            case BlockKind.CALL:
                return AnswerToolUse(tool_use_id(block.call_id), block.name, arguments_of(text))
            case BlockKind.THOUGHT if self._hides_thoughts:
                return AnswerThinking("", sealed(SEALED, text))
            case BlockKind.THOUGHT:
                return AnswerThinking(text, signed(text))


def opened(block: OutputBlock) -> AnswerBlock:
    """Return a block as sent in `content_block_start`."""
    match block.kind:
        case BlockKind.TEXT:
            return AnswerText("")
        case BlockKind.CALL:
            return AnswerToolUse(tool_use_id(block.call_id), block.name, {})
        case BlockKind.THOUGHT:
            return AnswerThinking("", "")


def event(name: bytes, fields: bytes) -> bytes:
    """Return one server-sent event."""
    return b'event: %b\ndata: {"type":"%b",%b}\n\n' % (name, name, fields)


def block_delta(index: int, delta: bytes, counted: bytes) -> bytes:
    """Return a `content_block_delta` event; `counted` is its usage field, empty for none."""
    return event(b"content_block_delta", b'"index":%d,"delta":%b%b' % (index, delta, counted))


def tool_use_id(call_id: str) -> str:
    """Return the call's id in Anthropic's form; an id from the model is kept, as its chat template expects it."""
    return f"toolu_{call_id.removeprefix(OURS).replace('-', '')}" if call_id.startswith(OURS) else call_id


def signed(thoughts: str) -> str:
    """Return a signature, without which clients drop the reasoning. It is a checksum and proves nothing."""
    return b64encode(hashlib.sha256(thoughts.encode()).digest()).decode()


def arguments_of(text: str) -> dict[str, object]:
    """Return the input of a call. Parsers complete the object; text that is still invalid becomes an empty one."""
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.DecodeError, RecursionError):
        return {}


def usage_of(usage: CompletionUsage) -> MessageUsage:
    """Return the usage in Anthropic's fields: cached prompt tokens are counted separately."""
    cached = min(usage.cached_tokens or 0, usage.prompt_tokens)
    thoughts = usage.completion_tokens_details
    return MessageUsage(
        input_tokens=usage.prompt_tokens - cached,
        output_tokens=usage.completion_tokens,
        cache_read_input_tokens=cached,
        output_tokens_details=UNSET if thoughts is None else ThinkingTokens(thoughts.reasoning_tokens),
    )
