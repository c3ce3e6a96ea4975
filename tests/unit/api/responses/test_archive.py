"""Responses that are retrieved again."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from tests.settle import turns

from dynamo.api.responses import archive as archive_module
from dynamo.api.responses.archive import CHAIN_MAX, ResponseArchive, page_of
from dynamo.api.responses.ids import item_id
from dynamo.api.responses.store import Dropped, MemoryResponseStore, StoreLimits
from dynamo.core.errors import InvalidArgument, NotFound
from dynamo.core.metrics import MetricsRegistry
from dynamo.protocols.response_items import (
    FunctionCallItem,
    FunctionOutputItem,
    InputText,
    ItemReference,
    MessageItem,
    OutputText,
    ReasoningItem,
    StoredItem,
)
from dynamo.protocols.responses import Response


class RecordingStore(MemoryResponseStore):
    """Store that records what is done with it."""

    def __init__(self, limits: StoreLimits, dropped: Dropped) -> None:
        super().__init__(limits, dropped)
        self.calls: list[str] = []

    def put(self, key: str, record: bytes) -> None:
        self.calls.append("put")
        super().put(key, record)

    async def close(self) -> None:
        self.calls.append("close")
        await super().close()


def archive() -> ResponseArchive:
    return ResponseArchive(MemoryResponseStore(StoreLimits(), Dropped(None, "")))


def kept(
    one: ResponseArchive,
    number: int,
    requested: Sequence[StoredItem],
    printed: str,
    before: int | None = None,
    *,
    is_long: bool = False,
) -> str:
    response_id = f"resp_{number:024x}{number:08x}"
    previous = None if before is None else f"resp_{before:024x}{before:08x}"
    answer = MessageItem("assistant", [OutputText(printed)], item_id("msg", response_id, 0), "completed")
    response = Response(id=response_id, created_at=1, model="m", output=[answer], previous_response_id=previous)
    one.keep(response, requested, is_long=is_long)
    return response_id


def words(items: Sequence[StoredItem]) -> list[str]:
    return [item.content[0].text for item in items if isinstance(item, MessageItem)]  # type: ignore[union-attr]


async def test_conversation_history_is_the_chain_of_responses() -> None:
    one = archive()
    kept(one, 1, [MessageItem("user", "a")], "b")
    last = kept(one, 2, [MessageItem("user", "c")], "d", before=1)
    assert words(await one.history(last)) == ["a", "b", "c", "d"]


async def test_long_response_is_encoded_in_a_thread_and_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    may_end = threading.Event()
    encode = archive_module.record_of

    def record_of(*given: Any) -> bytes:
        threads.append(threading.get_ident())
        assert may_end.wait(30)
        return encode(*given)

    monkeypatch.setattr(archive_module, "record_of", record_of)
    one = archive()
    last = kept(one, 1, [MessageItem("user", "a")], "b", is_long=True)
    found = asyncio.ensure_future(one.history(last))
    await turns(3)
    assert not found.done()
    may_end.set()
    assert words(await found) == ["a", "b"]
    assert threads and threads[0] != threading.get_ident()


async def test_archive_is_closed_after_long_responses_are_written() -> None:
    store = RecordingStore(StoreLimits(), Dropped(None, ""))
    one = ResponseArchive(store)
    kept(one, 1, [MessageItem("user", "a")], "b", is_long=True)
    await one.close()
    assert store.calls == ["put", "close"]


async def test_archive_keeps_input_items_with_ids_and_status() -> None:
    one = archive()
    requested = [
        MessageItem("user", "a"),
        MessageItem("assistant", "b", "msg_own"),
        ReasoningItem([]),
        FunctionCallItem("{}", "c", "f"),
        FunctionOutputItem("c", "42"),
    ]
    response_id = kept(one, 1, requested, "b")
    found = (await one.find(response_id)).input
    assert [item.id and item.id.split("_")[0] for item in found] == ["msg", "msg", "rs", "fc", "fco"]
    assert found[1].id == "msg_own" and len({item.id for item in found}) == 5
    assert {item.status for item in found} == {"completed"}
    assert isinstance(found[0], MessageItem) and found[0].content == [InputText("a")]
    assert isinstance(found[1], MessageItem) and found[1].content == [OutputText("b")]


async def test_archive_resolves_references_to_input_and_output_items() -> None:
    one = archive()
    response_id = kept(one, 1, [MessageItem("user", "a")], "b")
    record = await one.find(response_id)
    references = [ItemReference(str(record.input[0].id)), ItemReference(str(record.response.output[0].id))]
    assert words(await one.resolve([*references, MessageItem("user", [InputText("c")])])) == ["a", "b", "c"]
    with pytest.raises(NotFound) as caught:
        await one.resolve([MessageItem("user", "x"), ItemReference(response_id)])
    assert (caught.value.param, caught.value.code) == ("input[1].id", "item_not_found")


async def test_missing_response_error_names_its_parameter() -> None:
    one = archive()
    response_id = kept(one, 1, [], "b")
    other = response_id[:-1] + "f"
    with pytest.raises(NotFound) as caught:
        await one.find(other)
    assert (caught.value.param, caught.value.code) == ("response_id", "response_not_found")
    with pytest.raises(NotFound) as caught:
        await one.history(other)
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")
    with pytest.raises(NotFound):
        await one.find("../../etc/passwd")


async def test_deleted_response_ends_conversations_that_continue_it() -> None:
    one = archive()
    first = kept(one, 1, [], "b")
    last = kept(one, 2, [], "d", before=1)
    await one.delete(first)
    assert (await one.find(last)).response.id == last
    with pytest.raises(NotFound):
        await one.history(last)
    with pytest.raises(NotFound):
        await one.delete(first)


async def test_response_chain_length_is_bounded() -> None:
    one = archive()
    response_id = kept(one, 7, [], "b", before=7)
    with pytest.raises(InvalidArgument, match=str(CHAIN_MAX)):
        await one.history(response_id)


async def test_archive_without_a_store_refuses_history_and_names_its_flag() -> None:
    one = ResponseArchive(None)
    response_id = kept(one, 1, [], "b")
    assert not one.is_open
    with pytest.raises(NotFound):
        await one.find(response_id)
    with pytest.raises(InvalidArgument, match="--responses-store none"):
        await one.history(response_id)
    await one.close()


async def test_unreadable_stored_response_is_not_found(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryResponseStore(StoreLimits(), Dropped(None, ""))
    store.put(f"{1:024x}", b'{"response": ')
    with pytest.raises(NotFound):
        await ResponseArchive(store).find(f"resp_{1:024x}{1:08x}")
    assert "cannot decode stored response" in caplog.text


async def test_archive_metrics_report_entries_and_bytes() -> None:
    registry = MetricsRegistry()
    one = ResponseArchive(MemoryResponseStore(StoreLimits(), Dropped(registry, "x")), registry, "x")
    kept(one, 1, [], "b")
    assert "x_responses_store_entries 1" in registry.render()
    await one.close()
    assert "x_responses_store_bytes 0" in registry.render()


ITEMS: list[StoredItem] = [MessageItem("user", [InputText(str(number))], f"msg_{number}") for number in range(5)]


def test_items_are_listed_newest_first_in_pages() -> None:
    page = page_of(ITEMS, limit=2)
    assert (words(page.data), page.first_id, page.last_id, page.has_more) == (["4", "3"], "msg_4", "msg_3", True)
    page = page_of(ITEMS, limit=3, after="msg_3")
    assert (words(page.data), page.has_more) == (["2", "1", "0"], False)
    assert words(page_of(ITEMS, order="asc", after="msg_3").data) == ["4"]
    empty = page_of([])
    assert (empty.data, empty.first_id, empty.has_more) == ([], None, False)


@pytest.mark.parametrize(
    ("query", "param"),
    [({"limit": 0}, "limit"), ({"limit": 101}, "limit"), ({"order": "up"}, "order"), ({"after": "x"}, "after")],
)
def test_invalid_page_parameter_is_refused_by_name(query: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        page_of(ITEMS, **query)  # type: ignore[arg-type]
    assert caught.value.param == param
