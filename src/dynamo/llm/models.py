"""Served models: what the discovery plane says is served, made ready to serve.

Workers publish a model card each (bucket `v1/mdc`). Cards of one model and endpoint form a worker set: the set
follows one card, and a worker whose card differs is not used until the others left (a swap of the backend needs no
restart of the frontend, lessons.md C10).
"""

import asyncio
import logging
import random
import time
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial

from dynamo.core.backoff import Backoff
from dynamo.core.codec import json_decoder, msgpack_decoder
from dynamo.core.errors import DynamoException, NotFound, NotReady, Overloaded, WorkerUnavailable
from dynamo.core.memory import give_back
from dynamo.core.tasks import TaskOwner
from dynamo.core.threads import in_daemon_thread
from dynamo.kv_router.router import Decision
from dynamo.llm.asset_cache import AssetCache
from dynamo.llm.assets import has_remote
from dynamo.llm.busy import BusyWorkers, Capacity, Thresholds
from dynamo.llm.detokenizer import TokenTable
from dynamo.llm.http.metrics import FrontendMetrics
from dynamo.llm.kv_options import KvRouterOptions, router_config
from dynamo.llm.kv_policy import RouterPolicy
from dynamo.llm.kv_push_router import KvPushRouter, Progress
from dynamo.llm.model_card import ModelFiles, mdc_sum
from dynamo.llm.prefill_options import DisaggregationOptions, config_of_stage
from dynamo.llm.prefill_plan import LOCAL_PREFILL, Conditional
from dynamo.llm.preprocessor import Preprocessor, Timings
from dynamo.llm.publishers import KV_METRICS_TOPIC
from dynamo.llm.router_config import wanted_routing
from dynamo.llm.served_indexers import ServedIndexers
from dynamo.llm.tokenizer import BACKENDS, Tokenizer
from dynamo.protocols.discovery import MODEL_CARDS, EndpointId
from dynamo.protocols.engine import PreprocessedRequest
from dynamo.protocols.load import KvMetrics
from dynamo.protocols.model_card import ModelDeploymentCard, ModelRecord
from dynamo.runtime.client import Client, unreadable_records
from dynamo.runtime.discovery.base import Change, Delete, Put
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.event_plane.base import Event, Subscriber
from dynamo.runtime.push_router import RouterMode
from dynamo.runtime.request_plane.base import Call, Receiver
from dynamo.runtime.request_plane.request_frames import RequestFrames

logger = logging.getLogger(__name__)

FETCH_FIRST_S, FETCH_MAX_S = (
    0.2,
    30.0,
)  # Between tries to get a card's files from a worker that does not hand them over.
PREFILL, DECODE = "prefill", "decode"
PARTIAL = frozenset((PREFILL, "encode"))
"""Types of workers that no client's request is for."""
DEFAULT_BLOCK_SIZE = 16  # Of a card that names none, as upstream.
FETCHES_MAX = 8  # At a time: more than there are models that hang at once, fewer than would fill the line.
FETCH_SYNC_S = 4.0  # The first view waits so long for the files of what was there already.

decode_record = json_decoder(ModelRecord).decode
decode_load = msgpack_decoder(KvMetrics).decode


class ServedModel:
    """The workers of one model behind one endpoint, and how to speak to them."""

    def __init__(
        self,
        endpoint: EndpointId,
        client: Client,
        assets: AssetCache,
        timings: Timings | None = None,
        tokenizers: Sequence[str] = tuple(BACKENDS),
    ) -> None:
        self.endpoint = endpoint
        self.client = client
        self._assets = assets
        self._timings = timings
        self._tokenizers = tokenizers
        self.records: dict[str, tuple[ModelRecord, str]] = {}
        """Discovery key to record and card checksum."""
        self.checksum = ""
        self._card: ModelDeploymentCard | None = None
        self._preprocessor: Preprocessor | None = None
        self.takes_text = False
        """Whether its workers take requests as clients write them (`llm.text_models`)."""
        self.takes_tensors = False
        """Whether its workers take tensors (`llm.grpc`)."""
        self._tables: dict[tuple[bool, frozenset[int]], TokenTable] = {}
        self._other_cards: frozenset[int] = frozenset()
        self._other_models: frozenset[int] = frozenset()
        self._strangers: frozenset[int] = frozenset()
        """Instances of the endpoint that are not to be asked for this model."""
        self.busy = BusyWorkers(Thresholds(), Capacity(None, None))
        """Who is over the busy thresholds."""
        self.worker_type = "aggregated"
        """What its workers do of each request, as their card says."""
        self.mode = RouterMode.ROUND_ROBIN
        self.prefill_sets: list[ServedModel] = []
        """Of workers that decode: those beside them that compute prompts."""
        self.conditional: Conditional | None = None
        """Of workers that decode: when they compute a prompt all the same."""
        self.never_whole = False
        """Of workers that decode: they never do, not even when nobody else would (`--enforce-disagg`)."""
        self.kv: KvPushRouter | None = None
        """Who chooses by what the workers hold (`--router-mode kv`)."""
        self.monitor: asyncio.Task[None] | None = None
        """Listens to the workers' loads, where a threshold asks for them."""
        self.heir: ServedModel | None = None
        """The set that took this one's place after its last worker left the registry."""
        client.on_change(self._workers_changed)

    def _workers_changed(self) -> None:
        self.busy.keep(self.client.instance_ids())
        self.tell_router()

    def tell_router(self) -> None:
        """The KV router hears who is there, and what their cards say."""
        if self.kv is not None:
            cards = {record.instance_id: record.card_json for record, _ in self.records.values()}
            self.kv.set_workers({one: cards[one] for one in self.worker_ids() if one in cards})

    @property
    def name(self) -> str:
        """The served name."""
        return self.card.display_name

    @property
    def card(self) -> ModelDeploymentCard:
        """The card the set follows, or followed: a stream may outlive the records of its model."""
        for record, checksum in self.records.values():
            if checksum == self.checksum:
                self._card = record.card_json
                break
        assert self._card is not None, "a set is made for a record"
        return self._card

    @property
    def preprocessor(self) -> Preprocessor:
        """Template and tokenizer of the card."""
        assert self._preprocessor is not None, "a set is published only when it is loaded"
        return self._preprocessor

    @property
    def has_preprocessor(self) -> bool:
        """Whether template and tokenizer are there."""
        return self._preprocessor is not None

    @property
    def is_loaded(self) -> bool:
        """Whether the card's template and tokenizer are there, or not needed."""
        return self._preprocessor is not None or self.takes_text or self.takes_tensors or not self.answers_clients

    @property
    def answers_clients(self) -> bool:
        """Whether requests of clients are for its workers, or only parts of them."""
        return self.worker_type not in PARTIAL

    @property
    def is_decode(self) -> bool:
        """Whether its workers go on where others have computed the prompt."""
        return self.worker_type == DECODE

    @property
    def has_prefill(self) -> bool:
        """Whether somebody beside it computes prompts now."""
        return any(one.worker_ids() for one in self.prefill_sets)

    @property
    def is_ready(self) -> bool:
        """Whether a request can be answered now."""
        return bool(self.worker_ids()) and (not self.is_decode or self.has_prefill or self.prefills_locally)

    @property
    def prefills_locally(self) -> bool:
        """Whether its decode workers say that they can compute a prompt themselves, and may."""
        return not self.never_whole and self.card.runtime_config.runtime_data.get(LOCAL_PREFILL) is True

    @property
    def current(self) -> "ServedModel":
        """The set that follows the same card now: itself, or whoever took its place after its last worker left."""
        heir = self.heir
        return heir.current if heir is not None and heir.checksum == self.checksum else self

    def card_of(self, instance_id: int) -> ModelDeploymentCard | None:
        """What that worker itself publishes."""
        for record, _ in self.records.values():
            if record.instance_id == instance_id:
                return record.card_json
        return None

    def pick(self, exclude: frozenset[int]) -> int:
        """Who would be sent the next request, where no KV router chooses. Raises `WorkerUnavailable`."""
        return self.client.pick(exclude | self._strangers | self._too_busy(exclude))

    def worker_ids(self) -> list[int]:
        """The instances that serve this card now."""
        return [one for one in self.client.instance_ids() if one not in self._strangers]

    def admit(self) -> None:
        """Raises `Overloaded` when every worker is over a busy threshold; before any work is done for the request."""
        if not self.busy.thresholds.is_set:
            return
        workers = self.worker_ids()
        reasons = [self.busy.why(worker) for worker in workers]
        if workers and all(reasons):
            raise Overloaded(
                f"Service temporarily overloaded: every worker of model `{self.name}` is over {reasons[0]}"
            )

    async def listen(self, subscriber: Subscriber) -> None:
        """Follows the workers' loads for ever."""
        try:
            async for event in subscriber:
                if isinstance(event, Event):
                    self._hear_load(event.payload)
        finally:
            await subscriber.close()

    def _hear_load(self, payload: bytes) -> None:
        try:
            self.busy.apply(decode_load(payload))
        except ValueError as error:
            logger.warning("a load of %s cannot be read: %s", self.endpoint, error)

    def table(self, *, skip_special_tokens: bool, shown: frozenset[int] = frozenset()) -> TokenTable:
        """Token id to text. `shown` are special tokens that are not skipped with the others."""
        if not skip_special_tokens:
            shown = frozenset()
        table = self._tables.get((skip_special_tokens, shown))
        if table is None:
            tokenizer = self.preprocessor.tokenizer
            table = tokenizer.table(skip_special_tokens)
            if shown:
                full = tokenizer.table(skip_special_tokens=False)
                table = TokenTable(full.raw, full.text_json, tokenizer.special_ids - shown, full.byte_ids)
            for token_id in self.preprocessor.defaults.eos_token_ids:
                if token_id < len(table.text_json):
                    table.text_json[token_id] = None  # Off the fast path: the generation sees whether it ends there.
            self._tables[skip_special_tokens, shown] = table
        return table

    async def send(
        self,
        body: bytes,
        receiver: Receiver,
        *,
        request_id: str,
        instance_id: int | None,
        headers: Mapping[str, str],
        exclude: frozenset[int],
        metadata: Mapping[str, str] | None = None,
        frames: RequestFrames | None = None,
    ) -> Call:
        """Sends a request to a worker of this set that is not excluded, if there is one.

        A stream may outlive its set: then to a worker of the set that follows the same card now.
        """
        heir = self.heir
        if heir is not None and heir.checksum == self.checksum:
            return await heir.send(
                body,
                receiver,
                request_id=request_id,
                instance_id=instance_id,
                headers=headers,
                exclude=exclude,
                metadata=metadata,
                frames=frames,
            )
        return await self.client.send(
            body,
            receiver,
            request_id=request_id,
            instance_id=instance_id,
            headers=headers,
            metadata=metadata or {},
            exclude=exclude | self._strangers | self._too_busy(exclude),
            frames=frames,
        )

    async def choose(
        self,
        request: PreprocessedRequest,
        request_id: str,
        progress: Progress,
        exclude: frozenset[int],
        metadata: Mapping[str, str],
    ) -> "tuple[ServedModel, Decision] | None":
        """The set and the worker that the KV router chooses; None where there is no such router.

        `release` it when the request ends or goes elsewhere. Raises what choosing raises.
        """
        heir = self.current
        if heir is not self:
            return await heir.choose(request, request_id, progress, exclude, metadata)
        if self.kv is None:
            return None
        avoid = exclude | self._strangers | self.client.unsound()
        if avoid >= frozenset(self.worker_ids()) and exclude < frozenset(self.worker_ids()):
            avoid = exclude | self._strangers  # One that failed a while ago is better than none.
        try:
            chosen = await self.kv.choose(
                request,
                request_id,
                progress,
                avoid=avoid,
                busy=self._too_busy(exclude),
                metadata=metadata,
            )
        except NotReady as error:
            raise WorkerUnavailable(str(error)) from None
        return self, chosen

    def has_other(self, exclude: frozenset[int]) -> bool:
        """Whether a worker that is not excluded would take a stream over, as far as one can tell."""
        heir = self.heir
        if heir is not None and heir.checksum == self.checksum:
            return heir.has_other(exclude)
        return self.client.has_sound(exclude | self._strangers)

    def _too_busy(self, exclude: frozenset[int]) -> frozenset[int]:
        """The busy workers, unless nobody else is left: then one of them is better than none."""
        if not self.busy.thresholds.is_set:
            return frozenset()
        able = frozenset(self.worker_ids()) - exclude
        busy = self.busy.busy(able)
        return frozenset() if busy == able else busy

    async def follow(self) -> None:
        """Chooses the card to follow after the records changed, and loads what it needs. Raises `ConfigError`."""
        sums = [checksum for _, checksum in self.records.values()]
        if self.checksum not in sums:
            self.checksum = max(set(sums), key=sums.count)
            card = self.card
            self.worker_type = card.worker_type
            self.takes_text, self.takes_tensors = card.model_input == "Text", card.model_input == "Tensor"
            preprocessor = None
            if self.answers_clients and not self.takes_text and not self.takes_tensors:
                preprocessor = await asyncio.to_thread(load, card, self._assets, self._tokenizers)
                preprocessor.timings = self._timings
            self._preprocessor = preprocessor  # Requests that came meanwhile were prepared by the one before.
            self._tables.clear()
        self._other_cards = frozenset(
            record.instance_id for record, checksum in self.records.values() if checksum != self.checksum
        )
        self._strangers = self._other_cards | self._other_models
        if self._other_cards:
            logger.warning(
                "model %s: %d worker(s) of %s publish another card and are not used",
                self.name, len(self._other_cards), self.endpoint,
            )  # fmt: skip

    def leave_out(self, own: frozenset[int], others: frozenset[int]) -> None:
        """Those others serve other models only: they are not asked for this one, not even when they serve none."""
        before = self._other_models.intersection(self.client.instance_ids())
        self._other_models = others | (before - own)
        self._strangers = self._other_cards | self._other_models


def load(card: ModelDeploymentCard, assets: AssetCache, tokenizers: Sequence[str]) -> Preprocessor:
    """Template and tokenizer of a card; takes a while, so not on the loop."""
    if has_remote(card):
        card = assets.localise(card)
    preprocessor = Preprocessor(ModelFiles.from_card(card), card, tokenizers)
    preprocessor.tokenizer.table(skip_special_tokens=True)
    give_back()  # Reading a tokenizer takes several times what stays of it.
    return preprocessor


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
        tokenizers: Sequence[str] = tuple(BACKENDS),
        disaggregation: DisaggregationOptions | None = None,
    ) -> None:
        """`tokenizers`: the backends to try for every model (`llm.tokenizer`)."""
        self._runtime = runtime
        self._disaggregation = disaggregation or DisaggregationOptions()
        self._assets = assets or AssetCache()
        self._tokenizer_backends = tokenizers
        self._metrics = metrics
        self._router_mode = router_mode
        self._kv_options = kv_options or KvRouterOptions()
        self._indexers = ServedIndexers(runtime) if self._kv_options.serve_indexer else None
        """What its KV routers know, told to others."""
        path = self._kv_options.policy_config
        self._policy = None if path is None else RouterPolicy.read(path)
        self._namespace = namespace
        self._namespace_prefix = namespace_prefix
        self._thresholds = thresholds or Thresholds()
        self._timings = Timings(metrics.prepared)
        metrics.tokenizer_cache_hits.labels().follow(lambda: sum(one.cache_hits for one in self._tokenizers()))
        metrics.tokenizer_cache_misses.labels().follow(lambda: sum(one.cache_misses for one in self._tokenizers()))
        cache_bytes = metrics.registry.gauge(
            f"{metrics.prefix}_tokenizer_cache_bytes", "About how much memory remembered tokens take"
        )
        cache_bytes.labels().follow(lambda: sum(one.cache_bytes for one in self._tokenizers()))
        self._unreadable = unreadable_records(metrics.registry, MODEL_CARDS)
        self._tasks = TaskOwner("models")
        self._sets: dict[tuple[str, str], ServedModel] = {}
        self._keys: dict[str, tuple[str, str]] = {}
        self._past: weakref.WeakKeyDictionary[ServedModel, tuple[str, str]] = weakref.WeakKeyDictionary()
        """Sets whose last worker left, and their places, as long as streams hold them."""
        self._served: dict[str, list[ServedModel]] = {}
        self._synced = asyncio.Event()
        self._fetches: dict[str, asyncio.Task[None]] = {}
        """Discovery key to the fetch of its card's files."""
        self._fetching = asyncio.Semaphore(FETCHES_MAX)
        self._applying = asyncio.Lock()
        """Records are applied one at a time: those of the watch, and those whose files have come."""

    def start(self) -> None:
        """Begins to follow the discovery plane; a watch that dies is restarted."""
        self._runtime.health.checks.append(lambda: self._tasks.is_sound)
        self._runtime.health.checks.append(
            lambda: all(one.kv is None or one.kv.is_sound for one in self._sets.values())
        )
        self._tasks.supervise(self.watch, "watch")

    async def watch(self) -> None:
        """Follows the discovery plane for ever. Begun anew after a crash, it forgets what left meanwhile."""
        unheard = {*self._keys, *self._fetches}
        events: AsyncIterator[Change] = self._runtime.discovery.watch(MODEL_CARDS)
        async for event in events:
            match event:
                case Put(key=key, value=value):
                    unheard.discard(key)
                    await self._put(key, value)
                case Delete(key=key):
                    await self._delete(key)
                case _:
                    for key in unheard:
                        await self._delete(key)
                    unheard.clear()
                    self._tasks.start(self._settle(), "first view")

    async def _settle(self) -> None:
        """The first view is complete when the files of its cards have come, or are late."""
        if self._fetches:
            await asyncio.wait(set(self._fetches.values()), timeout=FETCH_SYNC_S)
        async with self._applying:  # One may have come, and be loading.
            self._synced.set()

    async def wait_synced(self, timeout_s: float) -> None:
        """Returns when everything that was published before has been seen, or the time is over."""
        try:
            async with asyncio.timeout(timeout_s):  # Before 3.12 `wait_for` may swallow a cancellation.
                await self._synced.wait()
        except TimeoutError:
            logger.warning("discovery has not answered within %g s; models will appear when it does", timeout_s)

    def find(self, name: str, kind: str) -> ServedModel:
        """The set to ask for that model. Raises `NotFound`, or `NotReady` when no worker serves it now."""
        sets = self._served.get(name) or [one for one in self.all_sets() if name in (one.card.model_aliases or ())]
        if not sets:
            raise NotFound(f"Model not found: {name!r}; served: {', '.join(sorted(self._served)) or 'none yet'}")
        able = [one for one in sets if kind in one.card.model_type]
        if not able:
            raise NotFound(f"Model not found: {name!r} does not serve {kind.lower()}")
        ready = [one for one in able if one.is_ready]
        if not ready and any(one.worker_ids() for one in able):
            raise NotReady(
                f"Model `{name}` is not ready to serve requests yet. It has decode workers but no prefill worker. "
                "Please retry shortly."
            )
        if not ready:
            raise NotReady(
                f"Model `{name}` is not ready to serve requests yet. None of its workers is reachable. "
                "Please retry shortly."
            )
        if len(ready) == 1:
            return ready[0]
        return random.choices(ready, weights=[len(one.worker_ids()) for one in ready])[0]

    def served(self) -> dict[str, list[ServedModel]]:
        """Every model by name, with its sets; only those with a worker."""
        return {name: sets for name, sets in self._served.items() if any(one.is_ready for one in sets)}

    def listed(self) -> dict[str, list[ServedModel]]:
        """The same, and each alias as a model of its own; a model's own name stands above another one's alias."""
        served = self.served()
        named: dict[str, list[ServedModel]] = {}
        for sets in served.values():
            for one in sets:
                for alias in one.card.model_aliases or ():
                    named.setdefault(alias, []).append(one)
        return {**named, **served}

    def thresholds(self) -> dict[str, Thresholds]:
        """The busy thresholds of every model that is served."""
        return {name: sets[0].busy.thresholds for name, sets in sorted(self._served.items())}

    async def set_thresholds(self, name: str, thresholds: Thresholds) -> None:
        """Replaces a model's busy thresholds. Raises `NotFound`."""
        if name not in self._served:
            raise NotFound(f"Model '{name}' not found. Thresholds can only be set for discovered models.")
        for one in self._served[name]:
            one.busy.thresholds = thresholds
            await self._watch_load(one)

    async def _watch_load(self, served: ServedModel) -> None:
        """Listens to the workers' loads from now on, if a threshold needs them."""
        if served.busy.thresholds.is_set and served.monitor is None:
            subscriber = await self._runtime.event_plane.subscriber(served.endpoint, KV_METRICS_TOPIC)
            name = f"load of {served.endpoint}"
            served.monitor = self._tasks.supervise(lambda: served.listen(subscriber), name)

    def all_sets(self) -> list[ServedModel]:
        """Every loaded worker set that answers clients."""
        return [one for sets in self._served.values() for one in sets]

    def every_set(self) -> list[ServedModel]:
        """Those, and the ones whose workers do a part of each request."""
        return [one for one in self._sets.values() if one.checksum and one.is_loaded]

    def _tokenizers(self) -> list[Tokenizer]:
        return [one.preprocessor.tokenizer for one in self._sets.values() if one.has_preprocessor]

    async def close(self) -> None:
        """Forgets all sets and closes their clients."""
        sets, self._sets = list(self._sets.values()), {}
        self._served.clear()
        await self._tasks.cancel_and_wait()
        if self._indexers is not None:
            await self._indexers.close()
        for one in sets:
            if one.kv is not None:
                await one.kv.close()
            await one.client.close()

    async def _put(self, key: str, value: bytes) -> None:
        try:
            record = decode_record(value)
            checksum = mdc_sum(record.card_json)
        except ValueError as error:
            self._unreadable.inc()
            logger.warning("model record %s cannot be read: %s", key, error)
            return
        if not self._wants(record.namespace):
            return
        self._stop_fetch(key)
        if self._must_fetch(record, checksum):
            work = self._fetch(key, record, checksum)
            self._fetches[key] = self._tasks.start(work, f"files of {record.card_json.display_name}")
            return
        async with self._applying:
            await self._apply(key, record, checksum)

    def _must_fetch(self, record: ModelRecord, checksum: str) -> bool:
        """Whether files lie on the worker that no card of this set has brought yet."""
        endpoint = EndpointId(record.namespace, record.component, record.endpoint)
        served = self._sets.get((record.card_json.display_name, str(endpoint)))
        return (
            record.card_json.model_input != "Text"
            and record.card_json.worker_type not in PARTIAL
            and has_remote(record.card_json)
            and (served is None or served.checksum != checksum)
        )

    async def _fetch(self, key: str, record: ModelRecord, checksum: str) -> None:
        """Gets the card's files, however long its worker takes, and then applies the record."""
        name, backoff = record.card_json.display_name, Backoff(FETCH_FIRST_S, FETCH_MAX_S)
        while True:
            try:
                async with self._fetching:
                    await in_daemon_thread(partial(self._assets.localise, record.card_json), f"files of {name}")
                break
            except DynamoException as error:
                logger.warning("model %s: its files cannot be fetched: %s", name, error)
            await asyncio.sleep(backoff.next(random.random()))
        async with self._applying:
            if self._fetches.get(key) is asyncio.current_task():
                del self._fetches[key]
                await self._apply(key, record, checksum)

    def _stop_fetch(self, key: str) -> None:
        fetch = self._fetches.pop(key, None)
        if fetch is not None:
            fetch.cancel()

    async def _apply(self, key: str, record: ModelRecord, checksum: str) -> None:
        endpoint = EndpointId(record.namespace, record.component, record.endpoint)
        place = (record.card_json.display_name, str(endpoint))
        before = self._keys.get(key)
        if before is not None and before != place:
            await self._remove(key)
        started_s = time.perf_counter()
        served = self._sets.get(place)
        if served is None:
            mode, thresholds = wanted_routing(record.card_json)
            client = await self._runtime.endpoint(str(endpoint)).client(mode or self._router_mode)
            served = self._sets[place] = ServedModel(
                endpoint, client, self._assets, self._timings, self._tokenizer_backends
            )
            served.busy.thresholds = thresholds or self._thresholds
            served.mode = RouterMode(mode or self._router_mode)
            served.conditional = self._disaggregation.conditional(self._kv_options.queue_threshold)
            served.never_whole = self._disaggregation.enforce_disagg
            if served.mode is RouterMode.KV and record.card_json.model_input == "Tokens":
                options = router_config(self._kv_options, record.card_json.kv_cache_block_size or DEFAULT_BLOCK_SIZE)
                profile = None
                options = config_of_stage(options, record.card_json.worker_type, self._policy, self._disaggregation)
                if self._policy is not None:
                    profile = self._policy.profile(record.card_json.display_name)
                served.kv = KvPushRouter(self._runtime, endpoint, options, profile=profile)
                await served.kv.start()
                await self._tell_index(place[1])
            await self._watch_load(served)
            for past in [past for past, old_place in self._past.items() if old_place == place]:
                past.heir = served
                del self._past[past]
        served.records[key] = (record, checksum)
        self._keys[key] = place
        self._part(place[1])
        if await self._follow(place, served):
            took_ms = (time.perf_counter() - started_s) * 1e3
            logger.info("model %s: worker %x of %s, in %.0f ms", served.name, record.instance_id, endpoint, took_ms)

    async def _delete(self, key: str) -> None:
        self._stop_fetch(key)
        async with self._applying:
            await self._remove(key)

    async def _remove(self, key: str) -> None:
        place = self._keys.pop(key, None)
        served = self._sets.get(place) if place is not None else None
        if place is None or served is None:
            return
        name = place[0]
        served.records.pop(key, None)
        if not served.records:
            del self._sets[place]
        self._part(place[1])
        if served.records:
            await self._follow(place, served)
            return
        self._past[served] = place
        self._publish(name)
        if served.monitor is not None:
            served.monitor.cancel()
        if served.kv is not None:
            await self._tell_index(place[1])
            await served.kv.close()
        await served.client.close()
        if name not in self._served:
            self._metrics.hide_model(name)
            logger.info("model %s: the last worker left", name)

    async def _tell_index(self, path: str) -> None:
        """Other routers hear of what the KV routers of an endpoint know."""
        if self._indexers is not None:
            held = {name: one.kv.machine for (name, at), one in self._sets.items() if at == path and one.kv is not None}
            await self._indexers.follow(path, held)

    async def _follow(self, place: tuple[str, str], served: ServedModel) -> bool:
        try:
            await served.follow()
        except DynamoException as error:
            logger.error("model %s cannot be served: %s", place[0], error)  # noqa: TRY400 - one line says it
            served.checksum = ""
            return False
        self._publish(place[0])
        served.tell_router()
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
        """Parts the workers of an endpoint among the models that they serve: one may stand there for each model."""
        sets = [one for (_, place), one in self._sets.items() if place == endpoint]
        instances = [frozenset(record.instance_id for record, _ in one.records.values()) for one in sets]
        everyone = frozenset().union(*instances)
        for one, own in zip(sets, instances, strict=True):
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
