"""Events of a response as a sequence of content blocks."""

from collections.abc import Iterable, Sequence

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.kv_events.found_events import answers, cut

from dynamo.api.content_blocks import BlockKind, BlockRow, Change, Closed, Grown, Opened
from dynamo.parsers.base import CallArguments, CallBegin, ContentDelta, Event, ReasoningDelta

Row = list[tuple[BlockKind, str, str]]


def row_of(*batches: Sequence[Event], needs_block: bool = False) -> Row:
    """Return the blocks that a client assembles from the changes; every change must belong to the open block."""
    row = BlockRow()
    changes: list[Change] = []
    for batch in batches:
        changes += row.take(batch)
    changes += row.finish(needs_block=needs_block)
    return read(changes)


def read(changes: Iterable[Change]) -> Row:
    seen: Row = []
    text: list[str] | None = None
    for change in changes:
        match change:
            case Opened():
                assert text is None, "a block opens while another one is open"
                assert change.block.index == len(seen)
                text = []
            case Grown():
                assert text is not None and change.text
                text.append(change.text)
            case Closed():
                assert text is not None and "".join(text) == change.block.text()
                seen.append((change.block.kind, change.block.name, change.block.text()))
                text = None
    assert text is None, "a block was never closed"
    return seen


def test_reasoning_text_and_calls_are_blocks_in_output_order() -> None:
    events = [
        ReasoningDelta("hm"),
        ContentDelta("Let me."),
        CallBegin(0, "f", "c0"),
        CallArguments(0, '{"a"'),
        CallArguments(0, ":1}"),
    ]
    assert row_of(events) == [
        (BlockKind.THOUGHT, "", "hm"),
        (BlockKind.TEXT, "", "Let me."),
        (BlockKind.CALL, "f", '{"a":1}'),
    ]


def test_two_calls_are_two_blocks_and_missing_arguments_are_an_empty_object() -> None:
    events = [CallBegin(0, "f", "c0"), CallBegin(1, "g", "c1"), CallArguments(1, '{"b":2}')]
    assert row_of(events) == [(BlockKind.CALL, "f", "{}"), (BlockKind.CALL, "g", '{"b":2}')]


def test_blank_text_around_calls_is_dropped() -> None:
    events = [
        ContentDelta("\n\n"),
        CallBegin(0, "f", "c0"),
        ContentDelta("\n"),
        CallBegin(1, "g", "c1"),
        ContentDelta(" \n"),
    ]
    assert [kind for kind, *_ in row_of(events)] == [BlockKind.CALL, BlockKind.CALL]


def test_blank_text_before_other_text_is_kept() -> None:
    assert row_of([ReasoningDelta("r")], [ContentDelta("\n")], [ContentDelta("\n")], [ContentDelta("Hi")]) == [
        (BlockKind.THOUGHT, "", "r"),
        (BlockKind.TEXT, "", "\n\nHi"),
    ]


def test_blank_response_is_a_text_block() -> None:
    assert row_of([ContentDelta(" ")]) == [(BlockKind.TEXT, "", " ")]


def test_empty_response_is_an_empty_text_block_only_if_required() -> None:
    assert row_of() == []
    assert row_of(needs_block=True) == [(BlockKind.TEXT, "", "")]


def test_late_arguments_of_a_closed_call_are_dropped() -> None:
    events = [CallBegin(0, "f", "c0"), CallBegin(1, "g", "c1"), CallArguments(0, "x")]
    assert row_of(events) == [(BlockKind.CALL, "f", "{}"), (BlockKind.CALL, "g", "{}")]


def test_only_the_last_block_is_marked_as_truncated() -> None:
    row = BlockRow()
    changes = [*row.take([ReasoningDelta("r"), ContentDelta("t")]), *row.finish(is_cut=True)]
    assert [change.is_cut for change in changes if isinstance(change, Closed)] == [False, True]
    assert row.is_only_text is False and row.has_calls is False


@given(st.data())
def test_block_result_is_independent_of_chunking(data: st.DataObject) -> None:
    events = data.draw(answers())
    assert row_of(*data.draw(cut(events))) == row_of(events)
