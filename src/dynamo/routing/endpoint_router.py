"""EndpointRouter: the KV router of one endpoint's workers outside a frontend (`dynamo.router`, `KvRouter`).

It follows the endpoint's instances, their model cards and their cached blocks; it places requests and sends them.
"""

import asyncio
import logging
import math
import random
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from dynamo.core.amortized import AmortizedUpdate
from dynamo.core.boundaries import Rollback
from dynamo.core.clock import SystemClock
from dynamo.core.codec import MSGPACK, UNREADABLE, decode, encode, json_decoder, msgpack_decoder
from dynamo.core.config import setting
from dynamo.core.errors import CannotConnect, ConfigError, InvalidArgument
from dynamo.core.tasks import TaskOwner
from dynamo.kv_events.worker_publishers import KV_METRICS_TOPIC
from dynamo.kv_router.config import RoutingConfig
from dynamo.kv_router.hicache import Runs, held_from
from dynamo.kv_router.policy import PolicyProfile
from dynamo.kv_router.router import Decision, Rank, RouteRequest, WorkerFacts
from dynamo.kv_router.runs import pack
from dynamo.protocols.discovery import MODEL_CARDS
from dynamo.protocols.engine import PreprocessedRequest, Routing
from dynamo.protocols.load import KvMetrics
from dynamo.protocols.model_card import ModelDeploymentCard, ModelRecord
from dynamo.routing.busy import BusyWorkers, Capacity, Thresholds
from dynamo.routing.kv_push_router import KvPushRouter, RequestProgress, facts_of
from dynamo.runtime.client import Client
from dynamo.runtime.component import Endpoint
from dynamo.runtime.context import Context
from dynamo.runtime.discovery.base import Put, Synced
from dynamo.runtime.event_plane.base import Event
from dynamo.runtime.push_router import RouterMode
from dynamo.runtime.request_plane.base import Item
from dynamo.runtime.streams import ResponseStream
from dynamo.text.multimodal.routing_hashes import hashes_of

logger = logging.getLogger(__name__)

REQUEST_FIELDS = frozenset(PreprocessedRequest.__struct_fields__)
FIRST_VIEW_S = 5.0  # Maximum wait for the first complete view of the model cards.

decode_record = json_decoder(ModelRecord).decode
decode_load = msgpack_decoder(KvMetrics).decode


class Produced(msgspec.Struct):
    """Output tokens of a response item."""

    token_ids: list[int] = msgspec.field(default_factory=list)


@dataclass(slots=True)
class CountedProgress:
    """Progress of a request; apart from its stream, which ends the request when it is no longer referenced."""

    tokens: int = 0
    is_over: bool = False


class RequestTimes:
    """Times of a routed request: its start, when it was sent, and its first output."""

    def __init__(self) -> None:
        self.received_ms = int(time.time() * 1000)
        """Unix time."""
        self.started_s = self.sent_s = time.perf_counter()
        self.first_s = 0.0

    def report(self, decision: Decision | None) -> dict[str, float]:
        """Return `routing_data.timing` of the last item, in milliseconds, with the cached share of the prompt's blocks."""
        start_s, now_s = self.started_s, time.perf_counter()
        found: dict[str, float] = {"request_received_ms": self.received_ms}
        if self.first_s:
            found["prefill_wait_time_ms"] = (self.sent_s - start_s) * 1e3
            found["prefill_time_ms"] = max(0.0, self.first_s - self.sent_s) * 1e3
            found["ttft_ms"] = (self.first_s - start_s) * 1e3
        found["total_time_ms"] = (now_s - start_s) * 1e3
        if decision is not None:
            found |= {"kv_hit_rate": decision.hit_rate, "router_queue_depth": decision.queue_depth}
        return found


class RoutedStream(ResponseStream):
    """Response stream that releases its request at its end; the first item contains the chosen worker, the last one times.

    The router counts tokens and the end as they arrive or, with `follows_reader`, as the stream is read.
    """

    def __init__(self, router: KvPushRouter, request_id: str, annotated: bool, *, follows_reader: bool = False) -> None:
        super().__init__(annotated)
        self._follows_reader = follows_reader
        self.progress = CountedProgress()
        self._times = RequestTimes()
        self._decision: Decision | None = None
        self._names_worker = False
        """Whether the next item contains the chosen worker."""
        self._router = router
        self._request_id = request_id
        self._is_released = False

    def sent(self, decision: Decision) -> None:
        """Record that the request was sent to the worker of the decision."""
        self._decision, self._names_worker = decision, True
        self._times.sent_s = time.perf_counter()

    def on_token(self, token_id: int) -> None:
        self._note_first()
        if not self._follows_reader:
            self._count(token_id)
        super().on_token(token_id)

    def on_item(self, item: Item) -> None:
        self._note_first()
        if not self._follows_reader:
            self._count(item)
        super().on_item(item)

    def _note_first(self) -> None:
        if not self._times.first_s:
            self._times.first_s = time.perf_counter()

    def _count(self, element: int | Item) -> None:
        if isinstance(element, int):
            self.progress.tokens += 1
        elif element.data is not None and element.event is None:
            try:
                self.progress.tokens += len(decode(element.data, element.codec, Produced).token_ids)
            except UNREADABLE:
                self.progress.tokens += 1  # An engine with its own item format; the item counts as the first token.

    def release(self) -> None:
        """Release the request from its worker."""
        if not self._is_released:
            self._is_released = True
            self._router.release(self._request_id)

    def _over(self) -> None:
        super()._over()
        self.progress.is_over = True
        if not (self._follows_reader and self._unread):
            self.release()

    def _leave(self) -> None:
        super()._leave()
        self.release()  # Also if the response is complete and was not read to its end.

    def _give(self, element: int | Item) -> Any:
        given = super()._give(element)
        if self._follows_reader:
            self._count(element)
            if self._is_over and not self._unread:
                self.release()
        if not isinstance(given, dict):
            return given
        if given.get("finish_reason") is not None:
            given.setdefault("routing_data", {})["timing"] = self._times.report(self._decision)
        decision = self._decision
        if self._names_worker and decision is not None:
            self._names_worker = False
            worker_id, dp_rank = decision.worker_id, decision.dp_rank
            chosen = {
                "prefill_worker_id": worker_id,
                "prefill_dp_rank": dp_rank,
                "decode_worker_id": worker_id,
                "decode_dp_rank": dp_rank,
            }
            given.setdefault("routing_data", {})["worker_id"] = chosen
        return given


def min_initial_workers() -> int:
    """Return `DYN_ROUTER_MIN_INITIAL_WORKERS`. Raises `ConfigError`."""
    number = setting("DYN_ROUTER_MIN_INITIAL_WORKERS", 0, int)
    if number < 0:
        raise ConfigError(f"DYN_ROUTER_MIN_INITIAL_WORKERS={number}: must be at least 0")
    return number


class EndpointRouter:
    """Router that chooses workers of one endpoint by cached blocks and load, and sends requests to them."""

    def __init__(
        self,
        endpoint: Endpoint,
        config: RoutingConfig,
        *,
        profile: PolicyProfile | None = None,
        thresholds: Thresholds | None = None,
        rng: random.Random | None = None,
        workers_min: int = 0,
    ) -> None:
        """Create a router that is started when `workers_min` workers have registered."""
        self.endpoint = endpoint
        self.kv = KvPushRouter(endpoint.runtime, endpoint.id, config, profile=profile, rng=rng)
        self.busy = BusyWorkers(thresholds or Thresholds(), Capacity(None, None))
        self._cards: dict[str, tuple[int, ModelDeploymentCard]] = {}
        """Instance id and model card by discovery key."""
        self._client: Client | None = None
        self._tasks = TaskOwner(f"router of {endpoint}")
        self._synced = asyncio.Event()
        self._update = AmortizedUpdate(self._set_workers)
        self._workers_min = workers_min
        self._has_enough = asyncio.Event()
        self._clock = SystemClock()

    @property
    def client(self) -> Client:
        """Client of the endpoint, available after `start`."""
        assert self._client is not None, "the router is not started"
        return self._client

    @property
    def is_sound(self) -> bool:
        """False while a failed watch is being restarted."""
        return self._tasks.is_sound and self.kv.is_sound

    async def start(self) -> None:
        """Start; return once the present instances are known, and the initial workers among them."""
        self._client = await self.endpoint.client(RouterMode.KV)
        self._client.on_change(self._drop_absent)
        self._tasks.supervise(self._watch, "cards")
        if self.busy.thresholds.is_set:
            self._tasks.supervise(self._listen, "loads")
        try:
            async with asyncio.timeout(FIRST_VIEW_S):
                await self._synced.wait()
        except TimeoutError:
            logger.warning("no model cards of %s within the start timeout; check the discovery backend", self.endpoint)
        self._set_workers()
        await self.kv.start()
        if not self._has_enough.is_set():
            logger.info(
                "waiting for %d workers of %s (DYN_ROUTER_MIN_INITIAL_WORKERS)", self._workers_min, self.endpoint
            )
            await self._has_enough.wait()

    async def close(self) -> None:
        """Stop; requests in progress continue."""
        await self._tasks.cancel_and_wait()
        self._update.close()
        await self.kv.close()
        if self._client is not None:
            await self._client.close()

    def models(self) -> set[str]:
        """Return the model names on the workers' cards."""
        return {card.display_name for _, card in self._cards.values()}

    # Requests.

    def to_route_request(
        self,
        tokens: list[int],
        request_id: str = "",
        *,
        block_mm_infos: Any = None,
        lora_name: str | None = None,
        cache_salt: str | None = None,
    ) -> RouteRequest:
        """Return the routing request of a prompt. Raises `InvalidArgument` for a prompt that cannot be hashed."""
        hashes = hashes_of(
            tokens,
            self.kv.config.block_size,
            block_mm_infos=block_mm_infos,
            lora_name=lora_name,
            cache_salt=cache_salt,
            is_eagle=self.kv.is_eagle,
        )
        route_request = RouteRequest(request_id, pack(hashes), len(tokens))
        self.kv.complete(
            route_request, tokens, lora_name=lora_name, cache_salt=cache_salt, block_mm_infos=block_mm_infos
        )
        route_request.busy, route_request.avoid = self._busy(frozenset()), self._avoid(frozenset())
        return route_request

    async def place(self, route_request: RouteRequest, progress: RequestProgress) -> Decision:
        """Choose the worker for a request and count it there until release. Raises the errors of `Router.place`."""
        return await self.kv.place(route_request, progress)

    def overlap_scores(self, route_request: RouteRequest) -> dict[str, Any]:
        """Return the number of cached prompt blocks of each rank, by tier, in upstream's format.

        The count of a slower tier includes the faster ones.
        """
        machine, size = self.kv.machine, self.kv.config.block_size
        held = machine.overlaps(route_request.blocks, self._clock.now(), route_request.held, route_request.sequence)
        shared = None if self.kv.shared is None else route_request.shared
        return overlap_table(held, machine.loads(), size, route_request.tokens, shared)

    def potential_loads(self, route_request: RouteRequest) -> list[dict[str, int]]:
        """Return the load of each rank including this prompt, in upstream's format."""
        self.kv.refresh()
        self.kv.prepare(route_request)
        return load_table(self.kv.machine.potential(route_request, self._clock.now()))

    async def generate(
        self,
        request: Mapping[str, Any],
        *,
        annotated: bool = False,
        context: Context | None = None,
        follows_reader: bool = False,
    ) -> RoutedStream:
        """Send a request to the worker chosen for it and return the response stream; see `RoutedStream`.

        Raises `InvalidArgument` for an unreadable request, and the errors of choosing and sending.
        """
        typed = read_request(request)
        request_id = context.id() if context is not None else str(uuid.uuid4())
        stream = RoutedStream(self.kv, request_id, annotated, follows_reader=follows_reader)
        metadata = context.metadata_to_send() if context is not None else {}
        headers = context.propagated() if context is not None else {}
        tried: set[int] = set()
        with Rollback(stream.release):
            while True:
                exclude = frozenset(tried)
                decision = await self.kv.choose(
                    typed,
                    request_id,
                    stream.progress,
                    avoid=self._avoid(exclude),
                    busy=self._busy(exclude),
                    metadata=metadata,
                )
                body = encode(sent_as(request, typed, decision), MSGPACK)
                try:
                    call = await self.client.send(
                        body,
                        stream,
                        request_id=request_id,
                        instance_id=decision.worker_id,
                        headers=headers,
                        metadata=metadata,
                    )
                    break
                except CannotConnect:
                    self.kv.release(request_id)
                    tried.add(decision.worker_id)
                    if tried >= set(self.client.instance_ids()):
                        raise
        stream.sent(decision)
        stream.bind(call, context)
        return stream

    # Instances.

    def _avoid(self, exclude: frozenset[int]) -> frozenset[int]:
        unsound = self.client.unsound()
        if not (exclude or unsound):
            return exclude
        present, avoid = frozenset(self.client.instance_ids()), exclude | unsound
        return exclude if avoid >= present and not exclude >= present else avoid

    def _busy(self, exclude: frozenset[int]) -> frozenset[int]:
        if not self.busy.thresholds.is_set:
            return frozenset()
        return self.busy.busy(frozenset(self.client.instance_ids()) - exclude)

    def _drop_absent(self) -> None:
        if self._client is not None:
            self.kv.keep(set(self._client.instance_ids()))
        self._update.request()

    def _set_workers(self) -> None:
        """Pass the present workers to the router; a worker without a card counts as one rank of unknown capacity."""
        if self._client is None:
            return
        present = self._client.instance_ids()
        if len(present) >= self._workers_min:
            self._has_enough.set()
        cards = dict(self._cards.values())
        self.kv.set_facts([facts_of(one, cards[one]) if one in cards else WorkerFacts(one) for one in present])
        self.busy.keep(present)
        self.kv.apply_cards(cards.values())
        for card in cards.values():
            runtime = card.runtime_config
            self.busy.capacity = Capacity(runtime.total_kv_blocks, runtime.max_num_batched_tokens)

    async def _watch(self) -> None:
        prefix = self.endpoint.id.path + "/"
        stale = set(self._cards)
        async for change in self.endpoint.discovery.watch(MODEL_CARDS):
            if isinstance(change, Synced):
                for key in stale:
                    self._cards.pop(key, None)
                stale.clear()
                self._synced.set()
            elif change.key.startswith(prefix):
                stale.discard(change.key)
                if isinstance(change, Put):
                    self._enter(change.key, change.value)
                else:
                    self._cards.pop(change.key, None)
            else:
                continue
            self._update.request()

    def _enter(self, key: str, value: bytes) -> None:
        try:
            record = decode_record(value)
        except UNREADABLE as error:
            logger.warning("unreadable model record %s: %s; keeping the previous one", key, error)
            return  # The previous card stays until the owner repairs the record or removes it.
        self._cards[key] = (record.instance_id, record.card_json)

    async def _listen(self) -> None:
        subscriber = await self.endpoint.runtime.event_plane.subscriber(self.endpoint.id, KV_METRICS_TOPIC)
        try:
            async for event in subscriber:
                if isinstance(event, Event):
                    try:
                        self.busy.apply(decode_load(event.payload))
                    except UNREADABLE as error:
                        logger.warning("unreadable load message of %s: %s", self.endpoint, error)
        finally:
            await subscriber.close()


def overlap_table(
    held: Mapping[Rank, tuple[int, int, int]],
    ranks: Iterable[Rank],
    block_size: int,
    tokens: int,
    shared: Runs | None = None,
) -> dict[str, Any]:
    """Return upstream's table of cached prompt blocks; `held` counts per tier the blocks beyond the faster ones.

    `shared` are the blocks in a cache shared by all workers, if there is one.
    """
    rows = []
    for worker_id, dp_rank in sorted(ranks):
        device, host, disk = held.get((worker_id, dp_rank), (0, 0, 0))
        row = {
            "worker_id": worker_id,
            "dp_rank": dp_rank,
            "device_blocks": device,
            "host_pinned_blocks": device + host,
            "disk_blocks": device + host + disk,
            "host_pinned_extension_blocks": host,
            "disk_extension_blocks": disk,
            "shared_beyond_device_blocks": None if shared is None else held_from(shared, device),
        }
        rows.append(row)
    runs = shared or ()
    shown = {
        "enabled": shared is not None,
        "total_hit_blocks": sum(end - begin for begin, end in runs),
        "ranges": [{"start": begin, "end": end} for begin, end in runs],
        "error": None,
    }
    return {"block_size": block_size, "num_blocks": tokens // block_size, "workers": rows, "shared_cache": shown}


def load_table(loads: Mapping[Rank, tuple[float, float, int]]) -> list[dict[str, int]]:
    """Return upstream's table of loads."""
    return [
        {
            "worker_id": worker_id,
            "dp_rank": dp_rank,
            "potential_prefill_tokens": int(prefill),
            "potential_decode_blocks": math.ceil(decode),
            "active_requests": requests,
        }
        for (worker_id, dp_rank), (prefill, decode, requests) in sorted(loads.items())
    ]


def read_request(request: Mapping[str, Any]) -> PreprocessedRequest:
    """Decode a request of a caller; a field that is None is absent, as in upstream. Raises `InvalidArgument`."""
    given = {name: value for name, value in request.items() if value is not None}
    try:
        return msgspec.convert({"model": "", **given}, PreprocessedRequest)
    except (msgspec.ValidationError, TypeError) as error:
        raise InvalidArgument(f"invalid request: {error}") from None


def sent_as(request: Mapping[str, Any], typed: PreprocessedRequest, decision: Decision) -> dict[str, Any]:
    """Return the request for the worker: the caller's fields, every field that workers read, and the chosen rank."""
    routing = msgspec.structs.replace(typed.routing or Routing(), dp_rank=decision.dp_rank)
    sent: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(typed, routing=routing))
    for name, value in request.items():
        ours = sent.get(name)
        if name == "routing" and isinstance(value, Mapping):
            sent[name] = {**value, **ours} if isinstance(ours, dict) else value
        elif isinstance(ours, dict) and isinstance(value, Mapping):
            sent[name] = {**ours, **value}
        elif value is not None or name not in REQUEST_FIELDS:
            sent[name] = value
    return sent
