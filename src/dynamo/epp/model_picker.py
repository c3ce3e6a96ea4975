"""ModelPicker: picks workers of a Dynamo runtime with the production KV router (`DYN_EPP_MODE=dynamo`).

Decisions are those of a frontend with `--router-mode kv` in the same state: the same preprocessor, routers and rules. A
request is counted at its prefill worker until its first output, and at its other worker until it ends.
"""

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from dynamo.core.boundaries import Rollback
from dynamo.core.config import read_bool, setting
from dynamo.core.errors import NotFound, WorkerUnavailable
from dynamo.epp.addresses import WorkerAddresses, is_in
from dynamo.epp.phases import PickRequest
from dynamo.epp.picker import EndpointChoice, no_worker, routing_headers
from dynamo.epp.prompts import PromptReader, kind_of
from dynamo.epp.replies import REMOVED_HEADERS, ROUTING_HEADERS
from dynamo.kv_router.router import Decision
from dynamo.protocols.embeddings import EmbeddingRequest
from dynamo.protocols.engine import PreprocessedRequest, Routing
from dynamo.protocols.openai import ChatCompletionRequest, CompletionRequest
from dynamo.routing.prefill_plan import DECODE_OVERRIDE, prefill_routing_request
from dynamo.serving.embeddings import work_of
from dynamo.serving.models import Models
from dynamo.serving.phase_routing import computes_locally, onward_costs, prefill_set_of, reach_of
from dynamo.serving.preparation import prepared_of
from dynamo.serving.request_headers import Headers, headed, metadata_of, new_id, with_headers
from dynamo.serving.served_model import ServedModel
from dynamo.serving.text_models import text_model

logger = logging.getLogger(__name__)

ADDRESS_TRIES = 4
"""Maximum choices of a request whose workers have no address: discovery and pods are two views."""
OWN_HEADERS = frozenset(name.encode() for name in (*ROUTING_HEADERS, *REMOVED_HEADERS))
"""Headers that clients may not set behind a gateway."""


class PickProgress:
    """Progress of a picked request, as the KV router reads it."""

    def __init__(self) -> None:
        self.tokens = 0
        self.is_over = False


class PickBooking:
    """Requests that the routers count for one pick."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.progress = PickProgress()
        self.prefill_progress = PickProgress()
        self.served: ServedModel | None = None
        """Set whose router counts the request until it ends."""
        self.prefill: ServedModel | None = None
        """Set whose router counts the request until its first output."""

    def first_output(self) -> None:
        """Record the first output: the prompt is computed."""
        self.progress.tokens = 1
        self.release_prefill()

    def release(self) -> None:
        """Release the request at all workers."""
        self.progress.is_over = True
        self.release_prefill()
        self.release_worker()

    def release_worker(self) -> None:
        """Release the request at the worker that answers."""
        served, self.served = self.served, None
        if served is not None and served.kv is not None:
            served.kv.release(self.request_id)

    def release_prefill(self) -> None:
        """Release the request at its prefill worker."""
        self.prefill_progress.is_over = True
        served, self.prefill = self.prefill, None
        if served is not None and served.kv is not None:
            served.kv.release(self.request_id)


def once(act: Callable[[], None]) -> Callable[[], None]:
    """Return a function that acts when it is first called: the end of a request is reported by its response and its stream."""
    left = [act]

    def called() -> None:
        if left:
            left.pop()()

    return called


class ModelPicker:
    """Picker of all models that the runtime discovers."""

    def __init__(self, models: Models, addresses: WorkerAddresses) -> None:
        self._models = models
        self._addresses = addresses
        self._turn = itertools.count()
        self._reader = PromptReader.from_environment(models)
        self._adds_special_tokens = setting("DYN_EMBEDDING_TOKENIZATION_ADD_SPECIAL_TOKENS", True, read_bool)
        self._open: Counter[int] = Counter()
        """Open picks of workers that take text, which no router counts."""

    @property
    def is_ready(self) -> bool:
        """Whether a model has a worker."""
        return self._addresses.is_synced and bool(self._models.served())

    async def pick(self, request: PickRequest) -> EndpointChoice:
        """Choose a worker. Raises the errors of the frontend for the same request."""
        if not request.body and request.method in ("GET", "HEAD", "OPTIONS"):
            return self._any(request)
        parsed = await self._reader.read(request.path.partition("?")[0], request.body)
        if parsed is None:
            return self._any(request)
        headers = [(name, value) for name, value in request.headers if name not in OWN_HEADERS]
        if isinstance(parsed, ChatCompletionRequest | CompletionRequest):
            return await self._generation(request, parsed, headers)
        with_headers(None, headers)  # Refuses invalid headers.
        if isinstance(parsed, EmbeddingRequest):
            return await self._embedding(request, parsed, headers)
        return self._whole(request, text_model(self._models, parsed.model, kind_of(parsed), None))

    def _any(self, request: PickRequest) -> EndpointChoice:
        """Choose a worker by turn, for a request that is not routed by its content."""
        able = sorted(address for address in set(self._addresses.all().values()) if is_in(address, request.subset))
        if not able:
            raise no_worker(request.subset)
        return EndpointChoice(able[next(self._turn) % len(able)], {})

    def _whole(self, request: PickRequest, model: ServedModel) -> EndpointChoice:
        """Choose a worker that takes the client's text: among those with the fewest open picks, by turn."""
        model.admit()
        addresses = {one: address for one, address in self._addresses.all().items() if is_in(address, request.subset)}
        able = [one for one in model.current.worker_ids() if one in addresses]
        if not able:
            raise no_worker(request.subset)
        fewest = min(self._open[one] for one in able)
        free = {one for one in able if self._open[one] == fewest}
        chosen = model.current.pick(frozenset(model.current.worker_ids()) - free)
        self._open[chosen] += 1
        return EndpointChoice(
            addresses[chosen], routing_headers(chosen, None), model.name, on_end=once(partial(self._close_pick, chosen))
        )

    def _close_pick(self, worker_id: int) -> None:
        self._open[worker_id] -= 1
        if not self._open[worker_id]:
            del self._open[worker_id]

    async def _embedding(self, request: PickRequest, parsed: EmbeddingRequest, headers: Headers) -> EndpointChoice:
        """Choose the worker of embeddings: by their tokens, which it computes."""
        model = self._models.find(parsed.model, kind_of(parsed))
        if model.takes_text:
            return self._whole(request, model)
        if model.is_decode:
            raise NotFound(
                f"Model not found: {model.name!r} is served by prefill and decode workers, which only generate"
            )
        model.admit()
        work = await work_of(parsed, model.preprocessor, special=self._adds_special_tokens)
        tokens = PreprocessedRequest(model.name, list(itertools.chain.from_iterable(work.token_ids)))
        booking = PickBooking(new_id())
        with Rollback(booking.release):
            decision, address = await self._worker(
                model, headed(tokens, headers), booking, metadata_of(headers), frozenset(), request.subset
            )
        return EndpointChoice(
            address,
            routing_headers(decision.worker_id, decision.dp_rank),
            model.name,
            booking.first_output,
            booking.release,
        )

    async def _generation(
        self, request: PickRequest, parsed: ChatCompletionRequest | CompletionRequest, headers: Headers
    ) -> EndpointChoice:
        """Choose the workers of a generation: every step, in order."""
        parsed.nvext = with_headers(parsed.nvext, headers)
        model = self._models.find(parsed.model, kind_of(parsed))
        if model.takes_text:
            return self._whole(request, model)
        model.admit()
        metadata = metadata_of(headers)
        prepared = (await prepared_of(model, parsed, headers, len(request.body)))[0]
        booking = PickBooking(new_id())
        with Rollback(booking.release):
            prefill = None
            if model.is_decode:
                prepared, prefill, unreachable = await self._prefill(model, prepared, booking, metadata)
            else:
                unreachable = frozenset()
            decision, address = await self._worker(model, prepared, booking, metadata, unreachable, request.subset)
        chosen = None if prefill is None else (prefill.worker_id, prefill.dp_rank)
        return EndpointChoice(
            address,
            routing_headers(decision.worker_id, decision.dp_rank, chosen),
            model.name,
            booking.first_output,
            booking.release,
        )

    async def _prefill(
        self, model: ServedModel, prepared: PreprocessedRequest, booking: PickBooking, metadata: dict[str, str]
    ) -> tuple[PreprocessedRequest, Decision | None, frozenset[int]]:
        """Choose a prefill worker; return the decode request and the decode workers that cannot receive its blocks."""
        served = prefill_set_of(model)
        may_stay_whole = model.current.prefills_locally
        if served is None and not may_stay_whole:
            raise WorkerUnavailable("no prefill worker serves the model at the moment")
        if served is None or computes_locally(model, prepared, booking.request_id):
            return prepared, None, frozenset()
        try:
            found = await served.choose(
                prefill_routing_request(prepared),
                booking.request_id,
                booking.prefill_progress,
                frozenset(),
                metadata,
                onward_costs(model, prepared, booking.request_id, served),
            )
        except WorkerUnavailable:
            if not may_stay_whole:
                raise
            return prepared, None, frozenset()
        assert found is not None, "every set of this process has a KV router"
        used, decision = found
        booking.prefill = used
        reach = reach_of(model, prepared, used, decision.worker_id)
        routing = msgspec.structs.replace(prepared.routing or Routing(), prefill_worker_id=decision.worker_id)
        if reach.constraints is not None:
            routing.routing_constraints = reach.constraints
        after = msgspec.structs.replace(prepared, routing=routing, router_config_override=dict(DECODE_OVERRIDE))
        return after, decision, reach.out_of_reach

    async def _worker(
        self,
        model: ServedModel,
        prepared: PreprocessedRequest,
        booking: PickBooking,
        metadata: dict[str, str],
        unreachable: frozenset[int],
        subset: frozenset[str] | None,
    ) -> tuple[Decision, str]:
        """Choose the worker that answers, among those with an address in the gateway's subset; return its address."""
        exclude = unreachable
        if subset is not None:
            exclude |= self._outside(model.worker_ids(), subset)
        for _ in range(ADDRESS_TRIES):
            if set(model.current.worker_ids()) <= exclude:
                raise no_worker(subset)
            found = await model.choose(prepared, booking.request_id, booking.progress, exclude, metadata)
            assert found is not None, "every set of this process has a KV router"
            used, decision = found
            booking.served = used
            address = self._addresses.address_of(decision.worker_id)
            if address is not None and is_in(address, subset):
                return decision, address
            logger.warning("worker %x has no ready pod; choosing another one", decision.worker_id)
            booking.release_worker()
            exclude |= {decision.worker_id}
        raise no_worker(subset)

    def _outside(self, workers: Sequence[int], subset: frozenset[str]) -> frozenset[int]:
        """Return the workers that are not among the gateway's candidates."""
        addresses = self._addresses.all()
        return frozenset(one for one in workers if one not in addresses or not is_in(addresses[one], subset))
