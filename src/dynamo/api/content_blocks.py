"""Blocks: the events of one answer as a row of blocks, each opened, filled and closed before the next.

Responses call them items, Anthropic content blocks; both want the same row. Pure: `BlockRow` is told what parsers find
and says what happens to the row; a format's writer turns that into its own events.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from dynamo.parsers.base import CallArguments, CallBegin, Content, Event, Reasoning

NO_ARGUMENTS = "{}"
"""The JSON text of a call that was given none."""


class BlockKind(Enum):
    """What a block holds."""

    TEXT = "text"
    THOUGHT = "thought"
    CALL = "call"


@dataclass(slots=True)
class Block:
    """One block as far as it has come."""

    index: int
    kind: BlockKind
    name: str = ""
    """The tool that is called."""
    call_id: str = ""
    parts: list[str] = field(default_factory=list)

    def text(self) -> str:
        """All of it so far."""
        return "".join(self.parts)


@dataclass(frozen=True, slots=True)
class Opened:
    """A block begins."""

    block: Block


@dataclass(frozen=True, slots=True)
class Grown:
    """More text of the open block."""

    block: Block
    text: str


@dataclass(frozen=True, slots=True)
class Closed:
    """A block is complete, or `is_cut` off."""

    block: Block
    is_cut: bool = False


Change = Opened | Grown | Closed


class BlockRow:
    """The blocks of one answer.

    Blank text opens no block: between two calls, or before one, it is layout of the model's format. It is kept back
    until other text follows it.
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open: Block | None = None
        self._blank = ""
        self._call = -1
        """The number of the open call."""

    @property
    def has_calls(self) -> bool:
        """Whether a tool was called."""
        return any(block.kind is BlockKind.CALL for block in self.blocks)

    @property
    def is_only_text(self) -> bool:
        """Whether there was nothing but text so far."""
        return all(block.kind is BlockKind.TEXT for block in self.blocks)

    def take(self, events: Sequence[Event]) -> Iterator[Change]:
        """What these events do to the row."""
        for event in events:
            match event:
                case Content():
                    yield from self._text(event.text)
                case Reasoning():
                    yield from self._grow(BlockKind.THOUGHT, event.text)
                case CallBegin():
                    yield from self._begin(Block(0, BlockKind.CALL, event.name, event.call_id or ""))
                    self._call = event.index
                case CallArguments() if event.index == self._call:
                    yield from self._grow(BlockKind.CALL, event.text)

    def more_text(self, events: Sequence[Event]) -> Block | None:
        """The open block, if nothing happens but that its text goes on: the short way of most tokens."""
        block = self._open
        if block is None or block.kind is not BlockKind.TEXT or len(events) != 1:
            return None
        event = events[0]
        if event.__class__ is not Content or not event.text:
            return None
        block.parts.append(event.text)
        return block

    def finish(self, *, is_cut: bool = False, needs_block: bool = False) -> Iterator[Change]:
        """The answer is over: its last block is closed.

        `is_cut` says that the block was not at its own end, `needs_block` that an answer of nothing is an empty text.
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
            block = Block(0, kind)
            yield from self._begin(block)
        if text:
            block.parts.append(text)
            yield Grown(block, text)

    def _begin(self, block: Block) -> Iterator[Change]:
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
