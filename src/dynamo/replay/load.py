"""TurnSource: sessions of turns and their arrival times, in an open or a closed loop."""

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from dynamo.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session."""

    request_id: str
    input_tokens: int
    output_tokens: int
    hash_ids: Sequence[int]
    """The trace's block names of the prompt, first to last; the last block may be incomplete."""
    at_ms: float | None = None
    """Arrival time; None: `delay_ms` after the previous turn was answered."""
    delay_ms: float = 0.0
    priority: float = 0.0
    """Seconds by which the router treats the request as having arrived earlier."""
    strict_priority: int = 0


@dataclass(frozen=True, slots=True)
class ReplaySession:
    """Turns of one conversation, in order; most have one."""

    session_id: str
    turns: Sequence[Turn]
    parent_id: str | None = None
    """The session that started this one: the agent's, if this is a helper's."""

    def __post_init__(self) -> None:
        if not self.turns:
            raise ConfigError(f"session {self.session_id} has no turns")
        for turn in self.turns:
            if turn.input_tokens < 1 or turn.output_tokens < 1:
                raise ConfigError(f"request {turn.request_id}: prompt and answer must have at least one token each")


Due = tuple[float, ReplaySession, int]
"""Arrival time in ms, session, and index of the turn."""


class OpenLoop:
    """Arrivals at fixed times, independent of the completion of other sessions."""

    def __init__(self, sessions: Sequence[ReplaySession], speedup: float = 1.0) -> None:
        if not speedup > 0:
            raise ConfigError(f"--arrival-speedup-ratio {speedup:g}: expected more than 0")
        self._sessions = sessions
        self._speedup = speedup

    def first(self) -> Iterator[Due]:
        """Yield turns that depend on no other turn, in the order of time."""
        known = ((self._time(session.turns[0]), session, 0) for session in self._sessions)
        return iter(sorted(known, key=lambda due: due[0]))

    def after(self, session: ReplaySession, turn: int, now_ms: float) -> Iterable[Due]:
        """Return the turns that become due because a turn was answered."""
        if turn + 1 == len(session.turns):
            return ()
        following = session.turns[turn + 1]
        at_ms = now_ms + following.delay_ms / self._speedup
        if following.at_ms is not None:
            at_ms = max(at_ms, self._time(following))
        return ((at_ms, session, turn + 1),)

    def begun(self, session: ReplaySession, turn: int, now_ms: float) -> Iterable[Due]:
        """Return the turns that become due because a turn was sent to a worker: none."""
        return ()

    def _time(self, turn: Turn) -> float:
        return (turn.at_ms or 0.0) / self._speedup


class ClosedLoop:
    """A fixed number of concurrent sessions; the next begins when one ends. Ignores recorded times, not delays."""

    def __init__(self, sessions: Sequence[ReplaySession], concurrency: int) -> None:
        if concurrency < 1:
            raise ConfigError(f"--replay-concurrency {concurrency}: expected 1 or more")
        self._rest = iter(sessions)
        self._concurrency = concurrency

    def first(self) -> Iterator[Due]:
        """Yield the first turns of the initial sessions."""
        return ((0.0, session, 0) for session in itertools.islice(self._rest, self._concurrency))

    def after(self, session: ReplaySession, turn: int, now_ms: float) -> Iterable[Due]:
        """Return the session's next turn, or the next session's first."""
        if turn + 1 < len(session.turns):
            return ((now_ms + session.turns[turn + 1].delay_ms, session, turn + 1),)
        following = next(self._rest, None)
        return () if following is None else ((now_ms, following, 0),)

    def begun(self, session: ReplaySession, turn: int, now_ms: float) -> Iterable[Due]:
        """Return the turns that become due because a turn was sent to a worker: none."""
        return ()


class TurnSource(Protocol):
    """A source of turns. Each turn is yielded once."""

    def first(self) -> Iterator[Due]:
        """Yield turns that depend on no other turn, in the order of time."""
        ...

    def begun(self, session: ReplaySession, turn: int, now_ms: float) -> Iterable[Due]:
        """Return the turns that become due because a turn was sent to a worker for the first time."""
        ...

    def after(self, session: ReplaySession, turn: int, now_ms: float) -> Iterable[Due]:
        """Return the turns that become due because a turn was answered."""
        ...


def merge(*sources: Iterable[Due]) -> Iterator[Due]:
    """Merge several sources in the order of time."""
    return heapq.merge(*sources, key=lambda due: due[0])
