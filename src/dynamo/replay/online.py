"""Online: send a load to a running frontend in real time and collect the same outcome as a simulation.

    load ──▶ arrival time ──▶ concurrency limit ──▶ request: first token, further tokens, end
      ▲                                                                   │
      └──────────────────────── dependent arrivals ◀──────────────────────┘

Times are measured by the client. A failed request is counted under its error, and its session ends with it.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol

from dynamo.core.clock import Clock, SystemClock
from dynamo.core.errors import DynamoException
from dynamo.replay.load import Due, ReplaySession, Turn, TurnSource
from dynamo.replay.outcome import Flight, RunOutcome
from dynamo.replay.timeline import Timeline

PROGRESS_S = 0.2


@dataclass(frozen=True, slots=True)
class AnswerChunk:
    """A chunk of an answer."""

    tokens: int = 1
    """Number of tokens in the chunk; 0 if it contains metadata only."""
    total: int | None = None
    """Total tokens of the answer, if the server reports it."""
    cached_tokens: int | None = None
    worker: int | None = None


class ReplayClient(Protocol):
    """A client that sends requests to a server."""

    def send(self, session: ReplaySession, turn: Turn) -> AsyncGenerator[AnswerChunk, None]:
        """Send one turn and yield the chunks of its answer. Raise `DynamoException` if the request fails."""
        ...


@dataclass(slots=True)
class Online:
    """One run against a frontend."""

    load: TurnSource
    client: ReplayClient
    at_once: int = 4096
    """Maximum concurrent requests; further requests wait, and the wait counts as latency."""
    time_ms: float | None = None
    """Time after which the run ends, even if requests are unanswered."""
    interval_ms: float = 1000.0
    clock: Clock = field(default_factory=SystemClock)
    outcome: RunOutcome = field(init=False)
    _began_s: float = field(init=False, default=0.0)
    _places: asyncio.Semaphore = field(init=False)
    _arrived: int = field(init=False, default=0)
    _answered: int = field(init=False, default=0)
    _slots: dict[int, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.outcome = RunOutcome([], 0.0, Timeline(self.interval_ms))
        self._places = asyncio.Semaphore(self.at_once)

    async def run(self, progress: Callable[[int, float], None] | None = None) -> RunOutcome:
        """Run to the end. `progress` is called periodically with the number of answered requests and the time in ms."""
        self._began_s = self.clock.now()
        shown = asyncio.create_task(self._show(progress), name="replay.progress") if progress else None
        limit_s = None if self.time_ms is None else self.time_ms / 1000
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s), asyncio.TaskGroup() as tasks:
                    for due in self.load.first():
                        await self._until(due[0])
                        self._start(tasks, due)
        finally:
            if shown is not None:
                shown.cancel()
        flights = self.outcome.flights
        self.outcome.duration_ms = max((one.finished_ms for one in flights if one.finished_ms >= 0), default=0.0)
        self.outcome.unfinished = sum(one.finished_ms < 0 for one in flights)
        return self.outcome

    @property
    def _now_ms(self) -> float:
        return (self.clock.now() - self._began_s) * 1000

    async def _until(self, at_ms: float) -> None:
        left_s = (at_ms - self._now_ms) / 1000
        if left_s > 0:
            await self.clock.sleep(left_s)

    async def _show(self, progress: Callable[[int, float], None]) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            progress(self._answered, self._now_ms)

    def _start(self, tasks: asyncio.TaskGroup, *dues: Due) -> None:
        for due in dues:
            self._arrived += 1
            tasks.create_task(self._live(tasks, due, f"{self._arrived}"), name=f"replay.request.{self._arrived}")

    async def _live(self, tasks: asyncio.TaskGroup, due: Due, key: str) -> None:
        at_ms, session, place = due
        await self._until(at_ms)
        flight = Flight(key, session, place, session.turns[place], at_ms)
        self.outcome.flights.append(flight)
        async with self._places:
            flight.placed_ms = self._now_ms
            flight.waited_ms = flight.placed_ms - at_ms
            self._start(tasks, *self.load.begun(session, place, flight.placed_ms))
            try:
                await self._receive(flight)
            except DynamoException as error:
                self.outcome.failures[f"{type(error).__name__}: {error}"] += 1
        following: Iterable[Due] = ()
        if flight.finished_ms >= 0:
            self._answered += 1
            self._count(flight)
            following = self.load.after(session, place, flight.finished_ms)
        else:
            following = self.load.after(session, len(session.turns) - 1, self._now_ms)
        self._start(tasks, *following)

    async def _receive(self, flight: Flight) -> None:
        count = 0
        total: int | None = None
        last_ms = flight.placed_ms
        async with contextlib.aclosing(self.client.send(flight.session, flight.turn)) as pieces:
            async for chunk in pieces:
                if chunk.tokens:
                    last_ms = self._now_ms
                    count += chunk.tokens
                    if flight.first_ms < 0:
                        flight.first_ms = last_ms
                    elif flight.second_ms < 0:
                        flight.second_ms = last_ms
                total = chunk.total if chunk.total is not None else total
                flight.cached_tokens = flight.cached_tokens if chunk.cached_tokens is None else chunk.cached_tokens
                if chunk.worker is not None:
                    flight.worker = chunk.worker
                    flight.slot = self._slots.setdefault(chunk.worker, len(self._slots))
        if flight.first_ms < 0:
            raise DynamoException("the answer has no tokens")
        flight.turn = replace(flight.turn, output_tokens=total or count)
        flight.finished_ms = last_ms

    def _count(self, flight: Flight) -> None:
        """Add a request to the timeline, where all workers count as one place."""
        turn, timeline, outcome = flight.turn, self.outcome.timeline, self.outcome
        outcome.admitted_tokens += turn.input_tokens
        outcome.reused_tokens += flight.cached_tokens
        computed = turn.input_tokens - flight.cached_tokens
        timeline.count(0, (turn.input_tokens, flight.cached_tokens, 0, computed), flight.first_ms)
        timeline.hold(0, 0, 1, 0, flight.arrived_ms, flight.first_ms)
        timeline.hold(0, 1, 0, 0, flight.first_ms, flight.finished_ms)
        steps = max(1, round((flight.finished_ms - flight.first_ms) / self.interval_ms))
        for part in range(steps):  # Distribute tokens evenly from the first to the last.
            generated = turn.output_tokens * (part + 1) // steps - turn.output_tokens * part // steps
            at_ms = flight.first_ms + (flight.finished_ms - flight.first_ms) * (part + 0.5) / steps
            timeline.count(0, (0, 0, generated, 0), at_ms)
