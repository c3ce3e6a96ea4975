"""ServedModel: the worker set of one model behind one endpoint, with its clients, routers and preprocessor.

The set follows one card: a worker whose card differs is not used until the others have left (`models`).
"""

import asyncio
import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from dynamo.core.amortized import AmortizedUpdate, AmortizedValue
from dynamo.core.codec import msgpack_decoder
from dynamo.core.errors import NoMatchingWorker, NotReady, Overloaded, WorkerUnavailable
from dynamo.core.memory import trim_memory
from dynamo.core.threads import in_daemon_thread
from dynamo.model_card.asset_cache import AssetCache
from dynamo.model_card.assets import has_remote
from dynamo.model_card.card import ModelFiles
from dynamo.protocols.discovery import EndpointId, record_key
from dynamo.protocols.engine import RESUMES_SAMPLING, PreprocessedRequest
from dynamo.protocols.load import KvMetrics
from dynamo.protocols.model_card import ModelDeploymentCard, ModelRecord
from dynamo.routing.busy import BusyWorkers, Capacity, Thresholds
from dynamo.routing.prefill_plan import LOCAL_PREFILL, Conditional
from dynamo.runtime.client import Client
from dynamo.runtime.event_plane.base import Event, Subscriber
from dynamo.runtime.push_router import RouterMode
from dynamo.runtime.request_plane.base import Call, Receiver
from dynamo.runtime.request_plane.request_frames import RequestFrames
from dynamo.serving.routed_requests import RoutedRequests
from dynamo.text.detokenizer import TokenTable
from dynamo.text.preparing import Timings
from dynamo.text.tokenizer.choices import BACKEND_NAMES

if TYPE_CHECKING:
    from dynamo.kv_router.router import Decision
    from dynamo.routing.kv_push_router import KvPushRouter, RequestProgress
    from dynamo.routing.session_affinity import SessionAffinity
    from dynamo.text.preprocessor import Preprocessor

logger = logging.getLogger(__name__)

PREFILL, DECODE = "prefill", "decode"
PARTIAL = frozenset((PREFILL, "encode"))
"""Worker types that receive no client requests."""

LOADS_MAX = 4
"""Models whose files are read at the same time: each takes several times the memory that it keeps, and a processor."""

decode_load = msgpack_decoder(KvMetrics).decode
_loads = threading.BoundedSemaphore(LOADS_MAX)


def workers_to_avoid(workers: Iterable[int], exclude: frozenset[int], unsound: frozenset[int]) -> frozenset[int]:
    """Return the workers that the KV router must not choose for a request.

    `exclude` are workers that failed the request, some of which may have left; `unsound` failed some request recently.
    An unsound worker is better than none.
    """
    avoid = exclude | unsound
    return exclude if avoid.issuperset(workers) else avoid


class ServedModel:
    """Worker set of one model behind one endpoint, with its clients, routers and preprocessor."""

    def __init__(
        self,
        endpoint: EndpointId,
        client: Client,
        assets: AssetCache,
        timings: Timings | None = None,
        tokenizers: Sequence[str] = BACKEND_NAMES,
    ) -> None:
        self.endpoint = endpoint
        self.client = client
        self._assets = assets
        self._timings = timings
        self._tokenizers = tokenizers
        self.records: dict[str, tuple[ModelRecord, str]] = {}
        """Record and card checksum, by discovery key."""
        self.checksum = ""
        self._card: ModelDeploymentCard | None = None
        self._preprocessor: Preprocessor | None = None
        self.takes_text = False
        """Whether its workers take requests in the client's form (`text_models`)."""
        self.takes_tensors = False
        """Whether its workers take tensors (`grpc`)."""
        self._tables: dict[tuple[bool, frozenset[int]], TokenTable] = {}
        self._other_cards: frozenset[int] = frozenset()
        self._other_models: frozenset[int] = frozenset()
        self._excluded: frozenset[int] = frozenset()
        """Instances of the endpoint that must not be used for this model."""
        self.busy = BusyWorkers(Thresholds(), Capacity(None, None))
        """Workers above a busy threshold."""
        self.worker_type = "aggregated"
        """Phase of a request that its workers do, from the card."""
        self.mode = RouterMode.ROUND_ROBIN
        self.prefill_sets: list[ServedModel] = []
        """For decode workers: the prefill worker sets of the same model."""
        self.conditional: Conditional | None = None
        """For decode workers: rule by which they compute a prompt themselves."""
        self.never_whole = False
        """For decode workers: never compute a prompt, even without a prefill worker (`--enforce-disagg`)."""
        self.kv: KvPushRouter | None = None
        """KV router (`--router-mode kv`), if any."""
        self.routed: RoutedRequests | None = None
        """Metrics of the requests sent to its workers."""
        self.sessions: SessionAffinity | None = None
        """Session affinity without a KV router, if enabled."""
        self.workers_min = 0
        """Number of workers required before the first request (`--router-min-initial-workers`)."""
        self._has_begun = False
        self._turn = 0
        """Counts the requests whose rank was chosen by `next_rank`."""
        self.monitor: asyncio.Task[None] | None = None
        """Task that receives the workers' load reports, if a threshold needs them."""
        self.successor: ServedModel | None = None
        """Set that replaced this one after its last worker left the registry."""
        self._router_update = AmortizedUpdate(self._update_router)
        self._above_threshold = AmortizedValue(self._find_busy)
        client.on_change(self._workers_changed)

    def _workers_changed(self) -> None:
        if self.kv is not None:
            self.kv.keep(set(self.client.instance_ids()))
        self.update_router()

    def update_router(self) -> None:
        """Update the KV router with the cards of the present workers; with very many, within a fraction of a second."""
        self._router_update.request()

    def _update_router(self) -> None:
        self.busy.keep(self.client.instance_ids())
        if self.kv is not None:
            cards = {record.instance_id: record.card_json for record, _ in self.records.values()}
            self.kv.set_workers({one: cards[one] for one in self.worker_ids() if one in cards})

    @property
    def name(self) -> str:
        """Served model name."""
        return self.card.display_name

    @property
    def card(self) -> ModelDeploymentCard:
        """Card that the set follows or followed: a stream may outlive the records of its model."""
        for record, checksum in self.records.values():
            if checksum == self.checksum:
                self._card = record.card_json
                break
        assert self._card is not None, "a set is created for a record"
        return self._card

    @property
    def preprocessor(self) -> "Preprocessor":
        """Template and tokenizer of the card."""
        assert self._preprocessor is not None, "a set is published only after it is loaded"
        return self._preprocessor

    @property
    def has_preprocessor(self) -> bool:
        """Whether template and tokenizer are loaded."""
        return self._preprocessor is not None

    @property
    def is_loaded(self) -> bool:
        """Whether the card's template and tokenizer are loaded or not needed."""
        return self._preprocessor is not None or self.takes_text or self.takes_tensors or not self.answers_clients

    @property
    def answers_clients(self) -> bool:
        """Whether its workers accept client requests, rather than one phase of them."""
        return self.worker_type not in PARTIAL

    @property
    def is_decode(self) -> bool:
        """Whether its workers do the decode phase of prompts computed elsewhere."""
        return self.worker_type == DECODE

    @property
    def has_prefill(self) -> bool:
        """Whether a prefill worker is present."""
        return any(one.worker_ids() and one.has_begun for one in self.prefill_sets)

    @property
    def has_begun(self) -> bool:
        """Whether `workers_min` workers were present once; afterwards fewer suffice."""
        if not self._has_begun:
            self._has_begun = len(self.worker_ids()) >= self.workers_min
        return self._has_begun

    @property
    def is_ready(self) -> bool:
        """Whether a request can be served now."""
        if not self.worker_ids() or not self.has_begun:
            return False
        return not self.is_decode or self.has_prefill or self.prefills_locally

    @property
    def resumes_sampling(self) -> bool:
        """Whether its workers continue penalties and seeded sampling of a resumed request."""
        return self.card.runtime_config.runtime_data.get(RESUMES_SAMPLING) is True

    @property
    def prefills_locally(self) -> bool:
        """Whether its decode workers report that they can compute a prompt themselves, and may do so."""
        return not self.never_whole and self.card.runtime_config.runtime_data.get(LOCAL_PREFILL) is True

    @property
    def current(self) -> "ServedModel":
        """The set that follows the same card now: itself, or its replacement after its last worker left."""
        successor = self.successor
        return successor.current if successor is not None and successor.checksum == self.checksum else self

    def card_of(self, instance_id: int) -> ModelDeploymentCard | None:
        """Return the card published by a worker."""
        usual = self.records.get(record_key(self.endpoint, instance_id))
        if usual is not None:
            return usual[0].card_json
        for record, _ in self.records.values():  # The key of an adapter's card is longer.
            if record.instance_id == instance_id:
                return record.card_json
        return None

    def pick(self, exclude: frozenset[int]) -> int:
        """Return the worker of the next request without a KV router. Raise `WorkerUnavailable`."""
        return self.client.pick(exclude | self._excluded | self._too_busy(exclude))

    def next_rank(self, worker_id: int) -> int | None:
        """Return the data-parallel rank of a worker's next request, each in turn; None for a worker of one rank."""
        card = self.card_of(worker_id)
        if card is None or card.runtime_config.data_parallel_size < 2:
            return None
        self._turn += 1
        config = card.runtime_config
        return config.data_parallel_start_rank + self._turn % config.data_parallel_size

    def bound(self, request: PreprocessedRequest, exclude: frozenset[int]) -> int | None:
        """Return the worker bound to the request's session, if it is eligible."""
        successor = self.current
        if successor.sessions is None:
            return None
        able = frozenset(successor.worker_ids()) - exclude
        return successor.sessions.find(
            request, able if successor.sessions.is_hard else able - successor._too_busy(exclude)
        )

    def worker_ids(self) -> list[int]:
        """Return the instances that serve this card now."""
        return [one for one in self.client.instance_ids() if one not in self._excluded]

    def admit(self) -> None:
        """Raise `Overloaded` if every worker is above a busy threshold; called before any work for the request.

        The same holds for the prefill workers of a decode worker.
        """
        reason, kind = self._overload(), "worker"
        if not reason:
            pools = [one._overload() for one in self.current.prefill_sets if one.worker_ids()]
            reason, kind = pools[0] if pools and all(pools) else "", "prefill worker"
        if reason:
            raise Overloaded(f"Service temporarily overloaded: every {kind} of model `{self.name}` is over {reason}")

    def _overload(self) -> str:
        """Return the flag of a busy threshold that every worker exceeds; empty if one does not."""
        if not self.busy.thresholds.is_set:
            return ""
        self._book()
        reasons = [self.busy.why(worker) for worker in self.worker_ids()]
        return (reasons[0] or "") if reasons and all(reasons) else ""

    def _book(self) -> None:
        """Update the loads counted by the KV router."""
        if self.kv is not None:
            self.kv.refresh()
            self.busy.book(self.kv.machine.loads(), self.kv.machine.queued()[1])

    async def listen(self, subscriber: Subscriber) -> None:
        """Receive the workers' load reports forever."""
        try:
            async for event in subscriber:
                if isinstance(event, Event):
                    self._on_load(event.payload)
        finally:
            await subscriber.close()

    def _on_load(self, payload: bytes) -> None:
        try:
            self.busy.apply(decode_load(payload))
        except ValueError as error:
            logger.warning("malformed load report from %s: %s", self.endpoint, error)

    def table(self, *, skip_special_tokens: bool, shown: frozenset[int] = frozenset()) -> TokenTable:
        """Return the text of each token id. `shown` are special tokens that are not skipped."""
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
                    table.text_json[token_id] = None  # Slow path: the generation checks whether the token ends it.
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
        """Send a request to a worker of this set that is not excluded, if there is one.

        If the set has been replaced, the request is sent to a worker of the replacement.
        """
        successor = self.successor
        if successor is not None and successor.checksum == self.checksum:
            return await successor.send(
                body,
                receiver,
                request_id=request_id,
                instance_id=instance_id,
                headers=headers,
                exclude=exclude,
                metadata=metadata,
                frames=frames,
            )
        if instance_id is None:
            exclude |= self._excluded | self._too_busy(exclude)
        return await self.client.send(
            body,
            receiver,
            request_id=request_id,
            instance_id=instance_id,
            headers=headers,
            metadata=metadata or {},
            exclude=exclude,
            frames=frames,
        )

    async def choose(
        self,
        request: PreprocessedRequest,
        request_id: str,
        progress: "RequestProgress",
        exclude: frozenset[int],
        metadata: Mapping[str, str],
        onward: Mapping[str, float] | None = None,
    ) -> "tuple[ServedModel, Decision] | None":
        """Return the set and the KV router's decision; None without a KV router.

        `onward`: for prefill workers, costs of the decode phase (`phase_routing.onward_costs`).
        `release` the request in the router when it ends or moves. Raise the errors of the router.
        """
        successor = self.current
        if successor is not self:
            return await successor.choose(request, request_id, progress, exclude, metadata, onward)
        if self.kv is None:
            return None
        unsound, avoid = self.client.unsound(), self._excluded
        if exclude or unsound:
            avoid |= workers_to_avoid(self.worker_ids(), exclude, unsound)
        try:
            chosen = await self.kv.choose(
                request,
                request_id,
                progress,
                avoid=avoid,
                busy=self._too_busy(exclude),
                metadata=metadata,
                onward=onward,
            )
        except NoMatchingWorker:
            raise
        except NotReady as error:
            raise WorkerUnavailable(str(error)) from None
        return self, chosen

    async def preview(self, request: PreprocessedRequest, request_id: str, metadata: Mapping[str, str]) -> "Decision":
        """Return the KV router's decision for a request without counting it. Raise the errors of the router."""
        kv = self.current.kv
        assert kv is not None, "the caller checks that there is a KV router"
        route_request = kv.to_route_request(request, request_id, avoid=self.client.unsound(), metadata=metadata)
        await kv.know(route_request)
        try:
            return kv.look(route_request)
        except NotReady as error:
            raise WorkerUnavailable(str(error)) from None

    def inflight(self, instance_id: int) -> int:
        """Return the number of this frontend's requests in flight to a worker."""
        return self.client.inflight(instance_id)

    def has_other(self, exclude: frozenset[int]) -> bool:
        """Return whether another eligible worker is known that could take over a stream."""
        successor = self.successor
        if successor is not None and successor.checksum == self.checksum:
            return successor.has_other(exclude)
        return self.client.has_sound(exclude | self._excluded)

    def _too_busy(self, exclude: frozenset[int]) -> frozenset[int]:
        """Return the busy workers; empty if all eligible workers are busy, as a busy worker is better than none."""
        if not self.busy.thresholds.is_set:
            return frozenset()
        busy = self._above_threshold.get() - exclude
        return frozenset() if busy.issuperset(frozenset(self.worker_ids()) - exclude) else busy

    def _find_busy(self) -> frozenset[int]:
        self._book()
        return self.busy.busy(self.worker_ids())

    async def close(self) -> None:
        """Close routers and client; active calls continue."""
        self._router_update.close()
        for router in (self.kv, self.sessions):
            if router is not None:
                await router.close()
        await self.client.close()

    async def follow(self) -> None:
        """Choose the card to follow after the records changed, and load its files. Raise `ConfigError`."""
        sums = [checksum for _, checksum in self.records.values()]
        if self.checksum not in sums:
            self.checksum = max(set(sums), key=sums.count)
            card = self.card
            self.worker_type = card.worker_type
            self.takes_text, self.takes_tensors = card.model_input == "Text", card.model_input == "Tensor"
            preprocessor = None
            if self.answers_clients and not self.takes_text and not self.takes_tensors:
                work = partial(load, card, self._assets, self._tokenizers)
                preprocessor = await in_daemon_thread(work, "model files")
                preprocessor.timings = self._timings
            self._preprocessor = preprocessor  # Until here, requests used the previous preprocessor.
            self._tables.clear()
        self._other_cards = frozenset(
            record.instance_id for record, checksum in self.records.values() if checksum != self.checksum
        )
        self._excluded = self._other_cards | self._other_models
        if self._other_cards:
            logger.warning(
                "model %s: %d worker(s) of %s publish another card and are not used",
                self.name, len(self._other_cards), self.endpoint,
            )  # fmt: skip

    def excludes(self, worker_id: int) -> bool:
        """Return whether a worker of the endpoint is not used for this set."""
        return worker_id in self._excluded

    def leave_out(self, own: frozenset[int], others: frozenset[int]) -> None:
        """Exclude workers that serve only other models, even after they stop serving any."""
        before = self._other_models.intersection(self.client.instance_ids())
        self._other_models = others | (before - own)
        self._excluded = self._other_cards | self._other_models


def load(card: ModelDeploymentCard, assets: AssetCache, tokenizers: Sequence[str]) -> "Preprocessor":
    """Load template and tokenizer of a card; slow, so it must not run on the loop.

    It runs in a thread that ends with it: a tokenizer library keeps megabytes of caches for each thread that used it.
    """
    with _loads:
        return _load(card, assets, tokenizers)


def _load(card: ModelDeploymentCard, assets: AssetCache, tokenizers: Sequence[str]) -> "Preprocessor":
    if has_remote(card):
        card = assets.localise(card)
    from dynamo.text.preprocessor import Preprocessor  # With the template engine, which the start does not need.

    preprocessor = Preprocessor(ModelFiles.from_card(card), card, tokenizers)
    preprocessor.tokenizer.table(skip_special_tokens=True)
    trim_memory()  # Reading a tokenizer needs several times the memory that it keeps.
    return preprocessor
