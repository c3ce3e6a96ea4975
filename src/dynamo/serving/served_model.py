"""ServedModel: the workers of one model behind one endpoint, and how to speak to them.

The set follows one card: a worker whose card differs is not used until the others left (`llm.models`).
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence

from dynamo.core.codec import msgpack_decoder
from dynamo.core.errors import NotReady, Overloaded, WorkerUnavailable
from dynamo.core.memory import give_back
from dynamo.kv_router.router import Decision
from dynamo.model_card.asset_cache import AssetCache
from dynamo.model_card.assets import has_remote
from dynamo.model_card.card import ModelFiles
from dynamo.protocols.discovery import EndpointId
from dynamo.protocols.engine import RESUMES_SAMPLING, PreprocessedRequest
from dynamo.protocols.load import KvMetrics
from dynamo.protocols.model_card import ModelDeploymentCard, ModelRecord
from dynamo.routing.busy import BusyWorkers, Capacity, Thresholds
from dynamo.routing.kv_push_router import KvPushRouter, Progress
from dynamo.routing.prefill_plan import LOCAL_PREFILL, Conditional
from dynamo.routing.session_affinity import SessionAffinity
from dynamo.runtime.client import Client
from dynamo.runtime.event_plane.base import Event, Subscriber
from dynamo.runtime.push_router import RouterMode
from dynamo.runtime.request_plane.base import Call, Receiver
from dynamo.runtime.request_plane.request_frames import RequestFrames
from dynamo.text.detokenizer import TokenTable
from dynamo.text.preprocessor import Preprocessor, Timings
from dynamo.text.tokenizer.tokenizer import BACKENDS

logger = logging.getLogger(__name__)

PREFILL, DECODE = "prefill", "decode"
PARTIAL = frozenset((PREFILL, "encode"))
"""Types of workers that no client's request is for."""

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
        self.sessions: SessionAffinity | None = None
        """Where sessions go, where no KV router chooses and they are to stay with their workers."""
        self.workers_min = 0
        """How many workers must be there before the first request (`--router-min-initial-workers`)."""
        self._has_begun = False
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
        return any(one.worker_ids() and one.has_begun for one in self.prefill_sets)

    @property
    def has_begun(self) -> bool:
        """Whether as many workers were there as it waits for at first; from then on it does with fewer."""
        if not self._has_begun:
            self._has_begun = len(self.worker_ids()) >= self.workers_min
        return self._has_begun

    @property
    def is_ready(self) -> bool:
        """Whether a request can be answered now."""
        if not self.worker_ids() or not self.has_begun:
            return False
        return not self.is_decode or self.has_prefill or self.prefills_locally

    @property
    def resumes_sampling(self) -> bool:
        """Whether its workers continue penalties and seeded sampling of a resumed request."""
        return self.card.runtime_config.runtime_data.get(RESUMES_SAMPLING) is True

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

    def bound(self, request: PreprocessedRequest, exclude: frozenset[int]) -> int | None:
        """The worker of the request's session, where it has one that may be sent the request."""
        heir = self.current
        if heir.sessions is None:
            return None
        able = frozenset(heir.worker_ids()) - exclude
        return heir.sessions.find(request, able if heir.sessions.is_hard else able - heir._too_busy(exclude))

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

    async def close(self) -> None:
        """Its workers are nobody's any more; calls under way go on."""
        for router in (self.kv, self.sessions):
            if router is not None:
                await router.close()
        await self.client.close()

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
