"""Console data: what the pages and `dynamo top` show of one frontend, and of the processes that share its port."""

import asyncio
import itertools
import time
from typing import Any

import msgspec

from dynamo import __version__
from dynamo.console.history import INTERVAL_S, ActivitySample, SampleHistory
from dynamo.console.live_feed import LiveFeed
from dynamo.console.request_views import RequestSelection, RequestView, view_of
from dynamo.console.totals import Totals, merged, totals_of
from dynamo.console.worker_paces import WorkerPaces
from dynamo.console.worker_rows import WorkerRow, WorkerRows
from dynamo.core.clock import Clock, SystemClock
from dynamo.core.codec import json_decoder, json_encode
from dynamo.core.tasks import TaskOwner
from dynamo.http.server.siblings import Siblings
from dynamo.kv_router.explain import Candidate, Explanation
from dynamo.serving.models import Models
from dynamo.serving.pipeline import Pipeline

WORKERS_INTERVAL_S = 2.0
WORKER_COST_S = 0.1
"""Seconds between two reads of the workers' status for each worker: a call costs a fraction of a millisecond on both sides."""
ROW_COST_S = 0.02
"""Seconds for which the rows of the workers are shown, for each worker: building one takes a fraction of a millisecond."""
EXPLAINED_MAX = 4000
"""Candidates of the decisions of one view: each takes some microseconds."""
DECISIONS_MIN = 5
CANDIDATES_SHOWN = 24
"""Candidates of a decision, the cheapest first; the chosen one is always shown."""
STALE_S = 10.0
"""Age of the workers' status at which a new view waits for a read of it."""
PACES_AGE_S = 2.0
"""Age after which the paces of the workers are computed again: a millisecond for a thousand requests."""
HISTORY_SENT = 300
"""Samples with which a page begins."""


class RoutedDecision(msgspec.Struct):
    """One decision of a KV router."""

    model: str
    role: str
    """Role of the workers among which it chose."""
    decision: Explanation
    """With the cheapest candidates and the chosen one."""
    candidates: int = 0
    """Number of all candidates."""


class RouterSummary(msgspec.Struct):
    """State of one KV router."""

    model: str
    role: str
    policy: str
    indexed_blocks: int
    waiting: int


class RoutingView(msgspec.Struct):
    """Routers and their last decisions, the newest first."""

    routers: list[RouterSummary]
    decisions: list[RoutedDecision]


decode_decisions = json_decoder(list[RoutedDecision]).decode
decode_totals = json_decoder(Totals).decode
decode_views = json_decoder(list[RequestView]).decode
decode_selection = json_decoder(RequestSelection).decode


class WorkerSetInfo(msgspec.Struct):
    """Workers of a model behind one endpoint."""

    endpoint: str
    role: str
    workers: int
    router_mode: str
    router_waiting: int | None
    """Requests in the queue of the KV router; None without one."""
    is_guessing: bool
    """Whether the router predicts cached blocks because workers publish no KV events."""


class ModelOverview(msgspec.Struct):
    """A served model."""

    name: str
    is_ready: bool
    type: str
    context_length: int
    block_size: int
    kv_blocks: int | None
    sets: list[WorkerSetInfo]


class Overview(msgspec.Struct):
    """State of a frontend, as `GET /console/api/overview` returns it and every stream begins with it."""

    version: str
    started_at: float
    interval_s: float
    is_draining: bool
    models: list[ModelOverview]
    workers: list[WorkerRow]
    samples: list[ActivitySample]


class WorkersEvent(msgspec.Struct):
    """Models and workers, sent when the workers have been read again."""

    models: list[ModelOverview]
    workers: list[WorkerRow]


class ConsoleData:
    """Reader of everything that the console shows."""

    def __init__(
        self, pipeline: Pipeline, models: Models, siblings: Siblings | None = None, clock: Clock | None = None
    ) -> None:
        self._pipeline = pipeline
        self._models = models
        self._siblings = siblings
        self._clock = clock or SystemClock()
        self._started_at = self._clock.wall()
        self.history = SampleHistory()
        self.workers = WorkerRows(models, pipeline.recent.worker_errors)
        self.feed = LiveFeed(self._take, INTERVAL_S, self._clock)
        self._tasks = TaskOwner("console workers")
        self._refresh: asyncio.Task[None] | None = None
        self._refreshed_s = float("-inf")
        self._has_news = False
        self._paces, self._paces_s = WorkerPaces(), float("-inf")
        self._last_rows: list[WorkerRow] = []
        self._rows_s = float("-inf")
        if siblings is not None:
            siblings.answer("console-totals", self._own_totals)
            siblings.answer("console-requests", self._own_requests)
            siblings.answer("console-decisions", self._own_decisions)

    async def close(self) -> None:
        """End the streams and close the clients."""
        await self.feed.close()
        await self._tasks.cancel_and_wait()
        await self.workers.close()

    def overview(self, samples: int = HISTORY_SENT) -> Overview:
        """Return the state with the last samples."""
        return Overview(
            __version__,
            self._started_at,
            INTERVAL_S,
            self._pipeline.is_draining,
            self.models(),
            self.workers.rows(),
            self.history.last(samples),
        )

    def models(self) -> list[ModelOverview]:
        """Return every model, by name."""
        found: dict[str, ModelOverview] = {}
        for served in sorted(
            self._models.every_set(), key=lambda one: (one.name, one.answers_clients, str(one.endpoint))
        ):
            card = served.card
            info = found.setdefault(
                served.name,
                ModelOverview(served.name, False, "", card.context_length, card.kv_cache_block_size, None, []),
            )
            if served.answers_clients:
                info.is_ready = info.is_ready or served.is_ready
                info.type = card.model_type
                info.kv_blocks = card.runtime_config.total_kv_blocks
            waiting = None if served.kv is None else len(served.kv.machine.waiting)
            info.sets.append(
                WorkerSetInfo(
                    str(served.endpoint),
                    served.worker_type,
                    len(served.worker_ids()),
                    served.mode.value,
                    waiting,
                    served.kv is not None and served.kv.is_guessing,
                )
            )
        return list(found.values())

    async def requests(self, selection: RequestSelection) -> list[RequestView]:
        """Return the selected requests in flight and recent ones, of all processes."""
        views = self._views(selection)
        if self._siblings is not None:
            for text in await self._siblings.query(f"console-requests {json_encode(selection).decode()}"):
                views += decode_views(text)
        return selection.of_views(views)

    async def routing(self, limit: int, request_id: str = "") -> RoutingView:
        """Return the KV routers of this process and the last decisions of all processes, or those about one request."""
        decisions = self._decisions(limit, request_id)
        if self._siblings is not None:
            for text in await self._siblings.query(f"console-decisions {limit} {request_id}"):
                decisions += decode_decisions(text)
        decisions.sort(key=lambda one: -one.decision.at)
        routers = [
            RouterSummary(
                one.name, one.worker_type, one.kv.config.policy, one.kv.machine.index.size, len(one.kv.machine.waiting)
            )
            for one in self._models.every_set()
            if one.kv is not None
        ]
        return RoutingView(routers, decisions[: limit * max(1, len(routers))])

    def _decisions(self, limit: int, request_id: str) -> list[RoutedDecision]:
        """Return the last decisions of each router; fewer of routers with many workers, because each is computed for all."""
        found = []
        for one in self._models.every_set():
            if one.kv is None:
                continue
            count = max(DECISIONS_MIN, min(limit, EXPLAINED_MAX // max(1, len(one.kv.machine.ranks))))
            for decision in itertools.islice(one.kv.explain(request_id or None), min(limit, count)):
                total = len(decision.candidates)
                decision.candidates = shown_candidates(decision)
                found.append(RoutedDecision(one.name, one.worker_type, decision, total))
        return found

    async def wait_fresh(self) -> None:
        """Read the workers unless that was done a moment ago, so that the first view is complete."""
        if self._clock.now() - self._refreshed_s > STALE_S:
            await self.refresh_workers()

    async def refresh_workers(self) -> None:
        """Read the state of all workers now."""
        self._refreshed_s = self._clock.now()
        await self.workers.refresh()
        self._has_news = True
        self._rows_s = float("-inf")

    def _views(self, selection: RequestSelection) -> list[RequestView]:
        """Return views of the selected requests of this process."""
        now_s, wall_s = time.perf_counter(), time.time()
        facts = selection.of_facts([*self._pipeline.in_flight(), *self._pipeline.recent.all()], now_s)
        views = [view_of(one, now_s, wall_s, self._worker_paces(now_s)) for one in facts]
        return selection.of_views(views)

    def _worker_paces(self, now_s: float) -> WorkerPaces:
        """Return the paces of recent requests, computed at most every `PACES_AGE_S`."""
        if now_s - self._paces_s > PACES_AGE_S:
            self._paces, self._paces_s = WorkerPaces(self._pipeline.recent.all()), now_s
        return self._paces

    async def _take(self) -> bytes | None:
        """Take a sample, start a read of the workers when it is due, and return the events."""
        totals = [totals_of(self._pipeline.metrics)]
        if self._siblings is not None:
            totals += [decode_totals(text) for text in await self._siblings.query("console-totals")]
        sample = self.history.add(self._clock.wall(), merged(totals))
        rows = self._rows()
        events = b""
        if self._has_news:
            self._has_news = False
            events = event("workers", WorkersEvent(self.models(), rows))
        self._refresh_when_due(len(rows))
        if sample is None:
            return events or None
        used, total = (sum(part) for part in zip(*(row.usage() for row in rows), strict=True)) if rows else (0.0, 0.0)
        sample.workers = sum(bool(row.models) and row.state == "serving" for row in rows)
        sample.kv_usage = round(used / total, 4) if total else None
        sample.router_waiting = sum(
            len(one.kv.machine.waiting) for one in self._models.every_set() if one.kv is not None
        )
        return events + event("sample", sample)

    def _rows(self) -> list[WorkerRow]:
        """Return the rows of the workers, built again less often the more there are."""
        now_s = self._clock.now()
        if now_s - self._rows_s >= ROW_COST_S * len(self._last_rows):
            self._last_rows, self._rows_s = self.workers.rows(), now_s
        return self._last_rows

    def _refresh_when_due(self, workers: int) -> None:
        interval_s = max(WORKERS_INTERVAL_S, WORKER_COST_S * workers)
        if self._clock.now() - self._refreshed_s < interval_s or (self._refresh and not self._refresh.done()):
            return
        self._refreshed_s = self._clock.now()
        self._refresh = self._tasks.start(self.refresh_workers(), "workers")

    async def _own_totals(self, question: str) -> str:
        return json_encode(totals_of(self._pipeline.metrics)).decode()

    async def _own_decisions(self, question: str) -> str:
        limit, _, request_id = question.partition(" ")
        return json_encode(self._decisions(int(limit), request_id)).decode()

    async def _own_requests(self, question: str) -> str:
        return json_encode(self._views(decode_selection(question))).decode()


def event(name: str, value: Any) -> bytes:
    """Return a server-sent event."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), json_encode(value))


def shown_candidates(decision: Explanation) -> list[Candidate]:
    """Return the cheapest candidates of a decision, and the chosen one."""
    chosen = (decision.worker_id, decision.dp_rank)
    return [
        one
        for place, one in enumerate(decision.candidates)
        if place < CANDIDATES_SHOWN or (one.worker_id, one.dp_rank) == chosen
    ]
