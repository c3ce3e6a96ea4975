"""ResponseArchive: stored responses, retrieved by id, by an item's id, and as the history of a later request.

A conversation is a chain: each record has the input added since the previous response, and the id of that response.
"""

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from functools import partial

import msgspec

from dynamo.api.responses.ids import INPUT, item_id, key_of
from dynamo.api.responses.store import ResponseStore
from dynamo.core.codec import json_decoder, json_encode
from dynamo.core.errors import InvalidArgument, NotFound
from dynamo.core.metrics import MetricsRegistry
from dynamo.core.threads import in_few_threads
from dynamo.protocols.response_items import (
    CompactionItem,
    FunctionCallItem,
    FunctionOutputItem,
    InputItem,
    InputText,
    ItemReference,
    MessageItem,
    OutputText,
    ReasoningItem,
    StoredItem,
)
from dynamo.protocols.responses import ItemPage, Response, StoredResponse
from dynamo.protocols.strict import INVALID

logger = logging.getLogger(__name__)

CHAIN_MAX = 1000  # Longer than any conversation that fits a model's context; bounds the work of one request.
PAGE_MAX = 100  # OpenAI's page limit.
PAGE = 20

_decode = json_decoder(StoredResponse).decode


class ResponseArchive:
    """Typed access to the responses of a store."""

    def __init__(self, store: ResponseStore | None, registry: MetricsRegistry | None = None, prefix: str = "") -> None:
        """Without a store nothing is kept."""
        self._store = store
        self._unwritten: dict[str, asyncio.Future[None]] = {}
        """Records that are being encoded, by key."""
        if registry is not None and store is not None:
            entries = registry.gauge(f"{prefix}_responses_store_entries", "Stored responses")
            entries.labels().follow(lambda: store.entries)
            size = registry.gauge(f"{prefix}_responses_store_bytes", "Size of the stored responses in bytes")
            size.labels().follow(lambda: store.size)

    @property
    def is_open(self) -> bool:
        """Whether responses are kept."""
        return self._store is not None

    def keep(
        self, response: Response, input_items: Sequence[StoredItem], owner: str | None = None, *, is_long: bool = False
    ) -> None:
        """Store a response, which no longer changes, and its input for their owner (see `StoredResponse.owner`).

        One that `is_long` is encoded in a thread; a reader of it waits for that.
        """
        key = key_of(response.id)
        if self._store is None or key is None:
            return
        if not is_long:
            self._store.put(key, record_of(response, input_items, owner))
            return
        encoding = in_few_threads(partial(record_of, response, input_items, owner), "response storing", 1)
        self._unwritten[key] = asyncio.ensure_future(self._put(self._store, key, encoding))

    async def _put(self, store: ResponseStore, key: str, encoding: Awaitable[bytes]) -> None:
        """Store a record once it is encoded."""
        try:
            store.put(key, await encoding)
        finally:
            del self._unwritten[key]

    async def find(self, response_id: str, owner: str | None = None) -> StoredResponse:
        """Return a stored response. Raise `NotFound`, also for one of another owner."""
        record = await self._record(response_id, owner)
        if record is None or record.response.id != response_id:
            raise NotFound(
                f"Response with id '{response_id[:80]}' not found.", param="response_id", code="response_not_found"
            )
        return record

    async def delete(self, response_id: str, owner: str | None = None) -> None:
        """Delete a response. Raise `NotFound`."""
        await self.find(response_id, owner)
        key = key_of(response_id)
        if self._store is not None and key is not None:
            await self._store.delete(key)

    async def history(self, response_id: str, owner: str | None = None) -> list[StoredItem]:
        """Return the conversation up to and including a response. Raise `NotFound` and `InvalidArgument`."""
        param = "previous_response_id"
        if self._store is None:
            raise InvalidArgument(
                f"{INVALID}`{param}`: this frontend keeps no responses (--responses-store none)", param=param
            )
        chain: list[StoredResponse] = []
        wanted: str | None = response_id
        while wanted is not None:
            record = await self._record(wanted, owner)
            if record is None or record.response.id != wanted:
                raise previous_not_found(wanted)
            chain.append(record)
            if len(chain) > CHAIN_MAX:
                raise InvalidArgument(
                    f"{INVALID}`{param}`: the conversation has more than {CHAIN_MAX} responses", param=param
                )
            wanted = record.response.previous_response_id
        items: list[StoredItem] = []
        for record in reversed(chain):
            items += record.input
            items += record.response.output
        return items

    async def resolve(self, items: Sequence[InputItem], owner: str | None = None) -> list[StoredItem]:
        """Return the items with every reference replaced by the referenced item. Raise `NotFound`."""
        found: list[StoredItem] = []
        for number, item in enumerate(items):
            if isinstance(item, ItemReference):
                found.append(await self._referred(item.id, number, owner))
            else:
                found.append(item)
        return found

    async def close(self) -> None:
        """Close the store."""
        if self._store is not None:
            if self._unwritten:
                await asyncio.wait(list(self._unwritten.values()))
            await self._store.close()

    async def _referred(self, id: str, number: int, owner: str | None = None) -> StoredItem:
        record = await self._record(id, owner)
        if record is not None:
            for item in (*record.response.output, *record.input):
                if item.id == id:
                    return item
        raise NotFound(f"Item with id '{id[:80]}' not found.", param=f"input[{number}].id", code="item_not_found")

    async def _record(self, id: str, owner: str | None = None) -> StoredResponse | None:
        key = key_of(id)
        if self._store is None or key is None:
            return None
        unwritten = self._unwritten.get(key)
        if unwritten is not None:
            await asyncio.wait([unwritten])
        raw = await self._store.get(key)
        if raw is None:
            return None
        try:
            record: StoredResponse = _decode(raw)
        except msgspec.MsgspecError as error:
            logger.warning("cannot decode stored response %s: %s", key, error)
            return None
        return record if record.owner == owner else None


def record_of(response: Response, input_items: Sequence[StoredItem], owner: str | None) -> bytes:
    """Return what is stored of a response."""
    items = [settled(item, response.id, number) for number, item in enumerate(input_items)]
    return json_encode(StoredResponse(response, items, owner))


def previous_not_found(response_id: str) -> NotFound:
    """Return the error for a missing `previous_response_id`."""
    return NotFound(
        f"Previous response with id '{response_id[:80]}' not found.",
        param="previous_response_id",
        code="previous_response_not_found",
    )


def settled(item: StoredItem, response_id: str, number: int) -> StoredItem:
    """Return an item in listed form: with an id, complete, and with its content in parts."""
    if isinstance(item, CompactionItem):
        name = item.id or item_id("cmp", response_id, INPUT + number)
        return CompactionItem(item.encrypted_content, name, item.created_by)
    status = item.status or "completed"
    match item:
        case MessageItem():
            content = item.content
            if isinstance(content, str):
                content = [OutputText(content) if item.role == "assistant" else InputText(content)]
            return MessageItem(
                item.role, content, item.id or item_id("msg", response_id, INPUT + number), status, item.phase
            )
        case FunctionCallItem():
            name = item.id or item_id("fc", response_id, INPUT + number)
            return FunctionCallItem(item.arguments, item.call_id, item.name, name, status)
        case FunctionOutputItem():
            name = item.id or item_id("fco", response_id, INPUT + number)
            return FunctionOutputItem(item.call_id, item.output, name, status)
        case ReasoningItem():
            name = item.id or item_id("rs", response_id, INPUT + number)
            return ReasoningItem(item.summary, name, item.content, item.encrypted_content, status)


def page_of(
    items: Sequence[StoredItem], *, limit: int = PAGE, order: str = "desc", after: str | None = None
) -> ItemPage:
    """Return one page of items. Raise `InvalidArgument` for invalid page parameters."""
    if not 1 <= limit <= PAGE_MAX:
        raise InvalidArgument(f"{INVALID}`limit` must be between 1 and {PAGE_MAX}, got {limit}", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidArgument(f"{INVALID}`order` must be `asc` or `desc`", param="order")
    ordered = list(items) if order == "asc" else list(reversed(items))
    if after is not None:
        places = [number for number, item in enumerate(ordered) if item.id == after]
        if not places:
            raise InvalidArgument(f"{INVALID}`after`: no item has the id `{after[:80]}`", param="after")
        ordered = ordered[places[0] + 1 :]
    data = ordered[:limit]
    return ItemPage(
        data=data,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
        has_more=len(ordered) > limit,
    )
