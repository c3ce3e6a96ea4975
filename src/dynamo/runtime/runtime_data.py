"""Runtime data: search for instances by the engine data in their model cards."""

import asyncio
from typing import Any, Protocol

import msgspec

from dynamo.core.codec import UNREADABLE
from dynamo.core.errors import InstanceTimeout, InvalidArgument, WorkerUnavailable
from dynamo.protocols.discovery import MODEL_CARDS, EndpointId
from dynamo.runtime.discovery.base import Discovery, Put, Synced


class _Config(msgspec.Struct):
    runtime_data: dict[str, Any] = msgspec.field(default_factory=dict)


class _Card(msgspec.Struct):
    runtime_config: _Config = msgspec.field(default_factory=_Config)


class _Record(msgspec.Struct):
    instance_id: int
    card_json: _Card


class Present(Protocol):
    """Part of a client that the search needs: its present instances."""

    @property
    def endpoint(self) -> EndpointId: ...

    def instance_ids(self) -> list[int]: ...


_read = msgspec.json.Decoder(_Record).decode

POLL_S = 0.05  # Poll interval for an instance whose card is known but whose own record has not arrived.


async def wait_for_instances_by_runtime_data(
    client: Present,
    discovery: Discovery,
    key: str,
    value: str,
    *,
    min_count: int,
    max_count: int | None = None,
    timeout_s: float | None,
) -> list[int]:
    """Return the sorted instances whose card has `runtime_data[key] == value`, once there are `min_count` to `max_count` of them.

    Raise `InvalidArgument` for a count below 1, `InstanceTimeout` after the timeout.
    """
    if min_count < 1:
        raise InvalidArgument(f"min_count {min_count}: must be 1 or more")
    matching: dict[str, int] = {}

    def present() -> list[int]:
        return sorted(set(matching.values()) & set(client.instance_ids()))

    watching = asyncio.ensure_future(_watch(client.endpoint, discovery, key, value, matching))
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                found = present()
                if min_count <= len(found) <= (max_count or len(found)):
                    return found
                await asyncio.wait([watching], timeout=POLL_S)
                if watching.done():
                    watching.result()
                    raise WorkerUnavailable("registry closed")
    except TimeoutError:
        raise InstanceTimeout(
            f"{client.endpoint}: {'exactly' if max_count == min_count else 'at least'} {min_count} instance(s) with "
            f"{key}={value!r} expected within {timeout_s} s, last_match_count={len(present())}"
        ) from None
    finally:
        watching.cancel()


async def _watch(endpoint: EndpointId, discovery: Discovery, key: str, value: str, matching: dict[str, int]) -> None:
    prefix = endpoint.path + "/"
    async for change in discovery.watch(MODEL_CARDS):
        if isinstance(change, Synced) or not change.key.startswith(prefix):
            continue
        matching.pop(change.key, None)
        if not isinstance(change, Put):
            continue
        try:
            record = _read(change.value)
        except UNREADABLE:
            continue  # The model watcher logs malformed cards.
        if record.card_json.runtime_config.runtime_data.get(key) == value:
            matching[change.key] = record.instance_id
