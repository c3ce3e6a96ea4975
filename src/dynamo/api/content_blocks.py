"""Content blocks: the parsed events of one answer as a sequence of blocks, each closed before the next one opens.

The Responses API calls them items, Anthropic content blocks; both need the same sequence. Pure: `BlockRow` turns parser
events into changes of the sequence, and the `BlockWriter` of a format turns those into its own events.
"""

import abc
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from functools import partial
from typing import NoReturn

import msgspec
from msgspec import Struct, field

from dynamo.core.codec import json_encode
from dynamo.parsers.base import CallArguments, CallBegin, ContentDelta, Event, ReasoningDelta
from dynamo.protocols.engine import CompletionUsage
from dynamo.serving.postprocessor import FinishedChoice, TokenEntry

NO_ARGUMENTS = "{}"
"""JSON arguments of a call without arguments."""


class BlockKind(Enum):
    """Kind of a block."""

    TEXT = "text"
    THOUGHT = "thought"
    CALL = "call"


class OutputBlock(Struct):
    """One block, as far as received."""

    index: int
    kind: BlockKind
    name: str = ""
    """Name of the called tool."""
    call_id: str = ""
    parts: list[str] = field(default_factory=list)

    def text(self) -> str:
        """Return its text so far."""
        return "".join(self.parts)


class Opened(Struct, frozen=True):
    """Change: a block is opened."""

    block: OutputBlock


class Grown(Struct, frozen=True):
    """Change: text is appended to the open block."""

    block: OutputBlock
    text: str


class Closed(Struct, frozen=True):
    """Change: a block is closed, either complete or cut off (`is_cut`)."""

    block: OutputBlock
    is_cut: bool = False


Change = Opened | Grown | Closed


class BlockRow:
    """Blocks of one answer.

    Blank text opens no block: between two calls, or before one, it is layout of the model's format. It is withheld until
    other text follows.
    """

    def __init__(self) -> None:
        self.blocks: list[OutputBlock] = []
        self._open: OutputBlock | None = None
        self._blank = ""
        self._call = -1
        """Index of the open call."""

    @property
    def has_calls(self) -> bool:
        """Whether a tool was called."""
        return any(block.kind is BlockKind.CALL for block in self.blocks)

    @property
    def is_only_text(self) -> bool:
        """Whether all blocks so far are text."""
        return all(block.kind is BlockKind.TEXT for block in self.blocks)

    def take(self, events: Sequence[Event]) -> Iterator[Change]:
        """Yield the changes caused by parsed events."""
        for event in events:
            match event:
                case ContentDelta():
                    yield from self._text(event.text)
                case ReasoningDelta():
                    yield from self._grow(BlockKind.THOUGHT, event.text)
                case CallBegin():
                    yield from self._begin(OutputBlock(0, BlockKind.CALL, event.name, event.call_id or ""))
                    self._call = event.index
                case CallArguments() if event.index == self._call:
                    yield from self._grow(BlockKind.CALL, event.text)

    def more_text(self, events: Sequence[Event]) -> OutputBlock | None:
        """Append to an open text block and return it, if that is the only change: the fast path of most tokens."""
        block = self._open
        if block is None or block.kind is not BlockKind.TEXT or len(events) != 1:
            return None
        event = events[0]
        if event.__class__ is not ContentDelta or not event.text:
            return None
        block.parts.append(event.text)
        return block

    def finish(self, *, is_cut: bool = False, needs_block: bool = False) -> Iterator[Change]:
        """Close the last block at the end of the answer.

        `is_cut`: the block is incomplete. `needs_block`: an empty answer gets an empty text block.
        """
        if not self.blocks and (self._blank or needs_block):
            yield from self._grow(BlockKind.TEXT, self._blank)
        yield from self._close(is_cut=is_cut)

    def _text(self, text: str) -> Iterator[Change]:
        if self._open is None or self._open.kind is not BlockKind.TEXT:
            text = self._blank + text
            if not text or text.isspace():
                self._blank = text
                return
            self._blank = ""
        yield from self._grow(BlockKind.TEXT, text)

    def _grow(self, kind: BlockKind, text: str) -> Iterator[Change]:
        block = self._open
        if block is None or block.kind is not kind:
            block = OutputBlock(0, kind)
            yield from self._begin(block)
        if text:
            block.parts.append(text)
            yield Grown(block, text)

    def _begin(self, block: OutputBlock) -> Iterator[Change]:
        yield from self._close()
        self._blank = ""
        block.index = len(self.blocks)
        self.blocks.append(block)
        self._open = block
        yield Opened(block)

    def _close(self, *, is_cut: bool = False) -> Iterator[Change]:
        block, self._open = self._open, None
        self._call = -1
        if block is None:
            return
        if block.kind is BlockKind.CALL and not block.parts:
            block.parts = [NO_ARGUMENTS]
            yield Grown(block, NO_ARGUMENTS)
        yield Closed(block, is_cut)


class BlockWriter(abc.ABC):
    """Base of the writers of one response that consists of blocks; implements a part of `Chunks` (serving/postprocessor.py).

    The whole response is built by the same steps as the stream, so that it equals the one that a client assembles from the
    stream.
    """

    plain, counts = False, False

    def __init__(self) -> None:
        self._row = BlockRow()

    def count(self, usage: CompletionUsage) -> bytes:
        """Return nothing: the events have no running usage."""
        return b""

    def head(self, index: int) -> bytes:
        raise AssertionError("a response of blocks has no plain chunks")

    def tail(self, usage: bytes = b"") -> bytes:
        raise AssertionError("a response of blocks has no plain chunks")

    def text_with_logprobs(self, index: int, text: bytes, entries: Sequence[TokenEntry], offset: int) -> bytes:
        raise AssertionError("a response of blocks has no plain chunks")

    def first(self, index: int) -> bytes:
        """Return nothing: there is one choice, which needs no opening event."""
        return b""

    def events(
        self, index: int, events: Sequence[Event], usage: bytes, entries: Sequence[TokenEntry], offset: int
    ) -> bytes:
        """Return the block events of parsed events."""
        block = self._row.more_text(events)
        if block is not None:
            return self._grown(block, block.parts[-1])
        return self._write(self._row.take(events))

    @abc.abstractmethod
    def whole(self, choice: FinishedChoice, usage: CompletionUsage) -> msgspec.Struct:
        """Return the whole response."""

    @abc.abstractmethod
    def _opened(self, block: OutputBlock) -> bytes:
        """Return the events of an opened block."""

    @abc.abstractmethod
    def _grown(self, block: OutputBlock, text: str) -> bytes:
        """Return the events of text that was appended to the open block."""

    @abc.abstractmethod
    def _closed(self, block: OutputBlock, *, is_cut: bool) -> bytes:
        """Return the events of a closed block."""

    def _write(self, changes: Iterable[Change]) -> bytes:
        return b"".join([self._change(change) for change in changes])

    def _change(self, change: Change) -> bytes:
        match change:
            case Grown():
                return self._grown(change.block, change.text)
            case Opened():
                return self._opened(change.block)
            case Closed():
                return self._closed(change.block, is_cut=change.is_cut)


def whole_body(
    writer: Callable[[str, str, int], BlockWriter],
    response_id: str,
    model: str,
    created: int,
    choices: Sequence[FinishedChoice],
    usage: CompletionUsage,
    *,
    is_long: bool = False,
) -> bytes | Callable[[], bytes]:
    """Return the body of a whole response; `writer` makes its writer from response id, model and creation time.

    For a response that `is_long`, because it repeats a long request, return the function that encodes it.
    """
    response = writer(response_id, model, created).whole(choices[0], usage)
    return partial(json_encode, response) if is_long else json_encode(response)


def undecoded(*_: object) -> NoReturn:
    """Placeholder for writers, which depend on fields of the request, until the request is decoded."""
    raise AssertionError("the form of a response is unknown before its request is decoded")
