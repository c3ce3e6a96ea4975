"""Served models: worker sets built from the model cards in discovery.

Each worker publishes a model card (bucket `v1/mdc`). Cards of one model and endpoint form a worker set: the set
follows one card, and a worker whose card differs is not used until the others have left (a change of the backend needs
no restart of the frontend).
"""

import asyncio
import logging
import time
import weakref
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from dynamo.core.amortized import LoopTurn
from dynamo.core.codec import UNREADABLE, json_decoder
from dynamo.core.errors import DynamoException, NotFound, NotReady
from dynamo.core.tasks import TaskOwner
from dynamo.kv_events.worker_publishers import KV_METRICS_TOPIC
from dynamo.model_card.asset_cache import AssetCache
from dynamo.model_card.card import mdc_sum
from dynamo.protocols.discovery import MODEL_CARDS, EndpointId
from dynamo.protocols.model_card import ModelDeploymentCard, ModelRecord
from dynamo.routing.busy import Capacity, Thresholds
from dynamo.routing.settings import DisaggregationOptions, KvRouterOptions
from dynamo.runtime.client import unreadable_records
from dynamo.runtime.discovery.base import Change, Delete, Put
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.serving.card_fetches import CardFetches, needs_files
from dynamo.serving.metrics import FrontendMetrics
from dynamo.serving.model_lookup import DEPARTED, DepartedModels, ModelAccess, check_name, choose_set
from dynamo.serving.served_model import PREFILL, ServedModel
from dynamo.serving.served_model_factory import ServedModelFactory
from dynamo.text.tokenizer.choices import BACKEND_NAMES

if TYPE_CHECKING:
    from dynamo.routing.remote_indexer import ServedIndexers
    from dynamo.text.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

DISCOVERY_WAIT_S = 5.0  # Models that are already published should be served from the first request on.
FETCH_SYNC_S = 4.0  # Maximum wait of the first view for the files of the cards it found.

decode_record = json_decoder(ModelRecord).decode


def served_indexers(runtime: DistributedRuntime) -> "ServedIndexers":
    """Return the indexes that this process serves to other routers."""
    from dynamo.routing.remote_indexer import ServedIndexers

    return ServedIndexers(runtime)


class Models:
    """All models that this frontend can serve."""

    def __init__(
        self,
        runtime: DistributedRuntime,
        metrics: FrontendMetrics,
        *,
        router_mode: str,
        kv_options: KvRouterOptions | None = None,
        namespace: str | None = None,
        namespace_prefix: str | None = None,
        thresholds: Thresholds | None = None,
        assets: AssetCache | None = None,
        tokenizers: Sequence[str] = BACKEND_NAMES,
        disaggregation: DisaggregationOptions | None = None,
        workers_min: int = 0,
    ) -> None:
        """`tokenizers`: the backends to try for every model (`text.tokenizer`). `workers_min`: see `ServedModel`."""
        self._runtime = runtime
        self._assets = assets or AssetCache()
        self._metrics = metrics
        kv_options = kv_options or KvRouterOptions()
        self._indexers = served_indexers(runtime) if kv_options.serve_indexer else None
        """Indexes of its KV routers, served to other routers."""
        self._namespace = namespace
        self._namespace_prefix = namespace_prefix
        self._factory = ServedModelFactory(
            runtime,
            metrics,
            self._assets,
            tokenizers,
            router_mode=router_mode,
            kv_options=kv_options,
            thresholds=thresholds or Thresholds(),
            disaggregation=disaggregation or DisaggregationOptions(),
            workers_min=workers_min,
        )
        self._follow_tokenizers(metrics)
        self._unreadable = unreadable_records(metrics.registry, MODEL_CARDS)
        self._tasks = TaskOwner("models")
        self._sets: dict[tuple[str, str], ServedModel] = {}
        self._keys: dict[str, tuple[str, str]] = {}
        self._past: weakref.WeakKeyDictionary[ServedModel, tuple[str, str]] = weakref.WeakKeyDictionary()
        """Sets whose last worker left, with their keys, as long as streams hold them."""
        self._served: dict[str, list[ServedModel]] = {}
        self._departed = DepartedModels()
        self._synced = asyncio.Event()
        self._applying = asyncio.Lock()
        """Serializes the application of records from the watch and from completed fetches."""
        self._fetches = CardFetches(self._assets, self._tasks, self._applying, self._apply)
        """Fetches of the files of cards. Their workers receive no requests for other models of their endpoint."""

    def _follow_tokenizers(self, metrics: FrontendMetrics) -> None:
        """Read the metrics of the tokenizers' caches when they are scraped."""
        metrics.tokenizer_cache_hits.labels().follow(lambda: sum(one.cache_hits for one in self._tokenizers()))
        metrics.tokenizer_cache_misses.labels().follow(lambda: sum(one.cache_misses for one in self._tokenizers()))
        cache_bytes = metrics.registry.gauge(
            f"{metrics.prefix}_tokenizer_cache_bytes", "Estimated memory of cached tokens in bytes"
        )
        cache_bytes.labels().follow(lambda: sum(one.cache_bytes for one in self._tokenizers()))

    def start(self) -> None:
        """Start to watch discovery; a failed watch is restarted."""
        self._runtime.health.checks.append(lambda: self._tasks.is_sound)
        self._runtime.health.checks.append(
            lambda: all(
                router is None or router.is_sound for one in self._sets.values() for router in (one.kv, one.sessions)
            )
        )
        self._tasks.supervise(self.watch, "watch")

    @property
    def runtime(self) -> DistributedRuntime:
        """Return the runtime in which the models are found and called."""
        return self._runtime

    async def watch(self) -> None:
        """Watch discovery forever. After a restart, drop the models that left meanwhile."""
        stale = {*self._keys, *self._fetches.keys}
        events: AsyncIterator[Change] = self._runtime.discovery.watch(MODEL_CARDS)
        turn = LoopTurn()
        async for event in events:
            await turn.yield_if_long()
            match event:
                case Put(key=key, value=value):
                    stale.discard(key)
                    await self._put(key, value)
                case Delete(key=key):
                    await self._delete(key)
                case _:
                    for key in stale:
                        await self._delete(key)
                    stale.clear()
                    self._tasks.start(self._settle(), "first view")

    async def _settle(self) -> None:
        """Mark the first view complete when the files of its cards have been fetched or `FETCH_SYNC_S` has passed."""
        await self._fetches.wait(FETCH_SYNC_S)
        async with self._applying:  # A fetched card may still be loading.
            self._synced.set()

    async def wait_synced(self, timeout_s: float) -> None:
        """Return when everything published before has been applied, or after the timeout."""
        try:
            async with asyncio.timeout(timeout_s):  # Before 3.12 `wait_for` may swallow a cancellation.
                await self._synced.wait()
        except TimeoutError:
            logger.warning("discovery has not responded within %g s; models will appear when it does", timeout_s)

    def find(self, name: str, kind: str, access: ModelAccess | None = None) -> ServedModel:
        """Return the worker set that serves requests of that kind for a model.

        `access` is that of the caller's API key, if any. Raise `HttpError` (403) for a model that the key may not use,
        `NotFound` for one that is not served, `NotReady` if no worker serves it now.
        """
        check_name(name)
        sets = self._served.get(name) or [one for one in self.all_sets() if name in (one.card.model_aliases or ())]
        if access is not None:
            allowed = [one for one in sets if access.may_use(one.name)]
            if not allowed:
                access.require(sets[0].name if sets else name)
            sets = allowed
        if not sets and self.has_departed(name):
            raise NotReady(DEPARTED.format(name=name))
        if not sets:
            listed = [one for one in sorted(self._served) if access is None or access.may_use(one)]
            raise NotFound(f"Model not found: {name!r}; served: {', '.join(listed) or 'none yet'}")
        return choose_set(name, kind, sets)

    def has_departed(self, name: str) -> bool:
        """Return whether the model's last worker left a moment ago, and with it all others of its endpoint.

        Its records may have been lost, or it is being restarted. A worker that still serves other models has removed this
        one on purpose, such as an unloaded adapter.
        """
        endpoint = self._departed.endpoint_of(name)
        if endpoint is None:
            return False
        return all(str(one.endpoint) != endpoint for one in self.all_sets())  # A set that is loading does not count.

    def served(self) -> dict[str, list[ServedModel]]:
        """Return every model with a worker by name, with its sets."""
        return {name: sets for name, sets in self._served.items() if any(one.is_ready for one in sets)}

    def listed(self) -> dict[str, list[ServedModel]]:
        """Return `served`, with each alias as a model of its own; a model's name takes precedence over another's alias."""
        served = self.served()
        named: dict[str, list[ServedModel]] = {}
        for sets in served.values():
            for one in sets:
                for alias in one.card.model_aliases or ():
                    named.setdefault(alias, []).append(one)
        return {**named, **served}

    def thresholds(self) -> dict[str, Thresholds]:
        """Return the busy thresholds of every served model."""
        return {name: sets[0].busy.thresholds for name, sets in sorted(self._served.items())}

    async def set_thresholds(self, name: str, update: Thresholds) -> Thresholds:
        """Set the busy thresholds of a model that `update` names; return all of them. Raise `NotFound`."""
        if name not in self._served:
            raise NotFound(f"Model '{name}' not found. Thresholds can only be set for discovered models.")
        thresholds = self._served[name][0].busy.thresholds.merged(update)
        for one in self._served[name]:
            for pool in (one, *one.prefill_sets):
                pool.busy.thresholds = thresholds if pool is one else thresholds.of_prefill()
                await self._watch_load(pool)
        return thresholds

    async def _watch_load(self, served: ServedModel) -> None:
        """Subscribe to the workers' load reports, if a threshold needs them."""
        if served.busy.thresholds.is_set and served.monitor is None:
            subscriber = await self._runtime.event_plane.subscriber(served.endpoint, KV_METRICS_TOPIC)
            name = f"load of {served.endpoint}"
            served.monitor = self._tasks.supervise(lambda: served.listen(subscriber), name)

    def all_sets(self) -> list[ServedModel]:
        """Return every loaded worker set that accepts client requests."""
        return [one for sets in self._served.values() for one in sets]

    def every_set(self) -> list[ServedModel]:
        """Return all worker sets, including those whose workers do only one phase of each request."""
        return [one for one in self._sets.values() if one.checksum and one.is_loaded]

    def _tokenizers(self) -> "list[Tokenizer]":
        return [one.preprocessor.tokenizer for one in self._sets.values() if one.has_preprocessor]

    async def close(self) -> None:
        """Remove all sets and close their clients."""
        sets, self._sets = list(self._sets.values()), {}
        self._served.clear()
        await self._tasks.cancel_and_wait()
        if self._indexers is not None:
            await self._indexers.close()
        for one in sets:
            await one.close()

    async def _put(self, key: str, value: bytes) -> None:
        try:
            record = decode_record(value)
            checksum = mdc_sum(record.card_json)
        except (
            *UNREADABLE,
            ValueError,
        ) as error:  # Keep the last valid record until its owner publishes a valid one.
            self._unreadable.inc()
            logger.warning("model record %s cannot be decoded: %s", key, error)
            return
        if not self._wants(record.namespace):
            return
        self._fetches.stop(key)
        if self._must_fetch(record, checksum):
            self._fetches.start(key, record, checksum)
            self._part(str(EndpointId(record.namespace, record.component, record.endpoint)))
            return
        async with self._applying:
            await self._apply(key, record, checksum)

    def _must_fetch(self, record: ModelRecord, checksum: str) -> bool:
        """Return whether the card refers to files on the worker that are not fetched yet for this set."""
        endpoint = EndpointId(record.namespace, record.component, record.endpoint)
        served = self._sets.get((record.card_json.display_name, str(endpoint)))
        return needs_files(record.card_json) and (served is None or served.checksum != checksum)

    async def _apply(self, key: str, record: ModelRecord, checksum: str) -> None:
        endpoint = EndpointId(record.namespace, record.component, record.endpoint)
        place = (record.card_json.display_name, str(endpoint))
        before = self._keys.get(key)
        if before is not None and before != place:
            await self._remove(key)
        started_s = time.perf_counter()
        served = self._sets.get(place)
        if served is not None and before is None and self._is_usual(served, record, checksum):
            served.records[key] = (record, checksum)
            self._keys[key] = place
            served.update_router()
            logger.info("model %s: worker %x of %s", served.name, record.instance_id, endpoint)
            return
        if served is None:
            served = await self._begin_set(place, endpoint, record.card_json)
            for past in [past for past, old_place in self._past.items() if old_place == place]:
                past.successor = served
                del self._past[past]
        served.records[key] = (record, checksum)
        self._keys[key] = place
        self._part(place[1])
        if await self._follow(place, served):
            took_ms = (time.perf_counter() - started_s) * 1e3
            logger.info("model %s: worker %x of %s, in %.0f ms", served.name, record.instance_id, endpoint, took_ms)

    def _is_usual(self, served: ServedModel, record: ModelRecord, checksum: str) -> bool:
        """Return whether a worker has the card that its set uses, and its endpoint serves no other model.

        Its arrival or departure then changes nothing but the workers of the set, in constant time: thousands may join at once.
        """
        return (
            served.is_loaded
            and served.checksum == checksum
            and not served.excludes(record.instance_id)
            and sum(one.endpoint == served.endpoint for one in self._sets.values()) == 1
        )

    async def _begin_set(self, place: tuple[str, str], endpoint: EndpointId, card: ModelDeploymentCard) -> ServedModel:
        """Create the set for the first card of its model and endpoint."""
        served = self._sets[place] = await self._factory.create(endpoint, card)
        await self._factory.start_routing(served, card)
        if served.kv is not None:
            await self._update_index(place[1])
        await self._watch_load(served)
        return served

    async def _delete(self, key: str) -> None:
        self._fetches.stop(key)
        async with self._applying:
            await self._remove(key)

    async def _remove(self, key: str) -> None:
        place = self._keys.pop(key, None)
        served = self._sets.get(place) if place is not None else None
        if place is None or served is None:
            return
        name = place[0]
        first = next(iter(served.records))
        is_shared = first != key and served.records[first][1] == served.checksum  # Another record has the set's card.
        record = served.records.pop(key, None)
        if is_shared and record is not None and self._is_usual(served, *record):
            served.update_router()
            return
        if not served.records:
            del self._sets[place]
            if record is not None:
                self._departed.add([name, *(record[0].card_json.model_aliases or ())], place[1])
        self._part(place[1])
        if served.records:
            await self._follow(place, served)
            return
        self._past[served] = place
        self._publish(name)
        if served.monitor is not None:
            served.monitor.cancel()
        if served.kv is not None:
            await self._update_index(place[1])
        await served.close()
        if name not in self._served:
            self._metrics.hide_model(name)
            logger.info("model %s: the last worker left", name)

    async def _update_index(self, path: str) -> None:
        """Update the indexes of an endpoint's KV routers that are served to other routers."""
        if self._indexers is not None:
            held = {name: one.kv.machine for (name, at), one in self._sets.items() if at == path and one.kv is not None}
            await self._indexers.follow(path, held)

    async def _follow(self, place: tuple[str, str], served: ServedModel) -> bool:
        try:
            await served.follow()
        except DynamoException as error:
            logger.error("model %s cannot be served: %s", place[0], error)  # noqa: TRY400 - the message is sufficient
            served.checksum = ""
            return False
        self._publish(place[0])
        served.update_router()
        card = served.card
        if not served.answers_clients:
            return True
        served.busy.capacity = Capacity(card.runtime_config.total_kv_blocks, card.runtime_config.max_num_batched_tokens)
        values = {
            "context_length": card.context_length,
            "kv_cache_block_size": card.kv_cache_block_size,
            "max_num_batched_tokens": card.runtime_config.max_num_batched_tokens,
            "max_num_seqs": card.runtime_config.max_num_seqs,
            "total_kv_blocks": card.runtime_config.total_kv_blocks,
        }
        self._metrics.show_model(place[0], values)
        return True

    def _part(self, endpoint: str) -> None:
        """Assign the workers of an endpoint to the models they serve, and exclude them from its other models."""
        sets = {name: one for (name, place), one in self._sets.items() if place == endpoint}
        instances = {name: {record.instance_id for record, _ in one.records.values()} for name, one in sets.items()}
        for record in self._fetches.records:  # Its model is known, although it cannot be served yet.
            if str(EndpointId(record.namespace, record.component, record.endpoint)) == endpoint:
                instances.setdefault(record.card_json.display_name, set()).add(record.instance_id)
        everyone = frozenset().union(*instances.values())
        for name, one in sets.items():
            own = frozenset(instances[name])
            one.leave_out(own, everyone - own)

    def _publish(self, name: str) -> None:
        loaded = [one for (model, _), one in self._sets.items() if model == name and one.checksum and one.is_loaded]
        sets = [one for one in loaded if one.answers_clients]
        for decode in sets:
            if decode.is_decode:
                decode.prefill_sets = [
                    one
                    for one in loaded
                    if one.worker_type == PREFILL and one.endpoint.namespace == decode.endpoint.namespace
                ]
        if sets:
            self._served[name] = sets
        else:
            self._served.pop(name, None)

    def _wants(self, namespace: str) -> bool:
        if self._namespace_prefix is not None:
            return namespace.startswith(self._namespace_prefix)
        return self._namespace is None or namespace == self._namespace
