"""Load: what is asked of the cluster, and when: sessions of turns, on their own clock or as others end."""

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from dynamo.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Turn:
    """One request."""

    request_id: str
    input_tokens: int
    output_tokens: int
    hash_ids: Sequence[int]
    """What its prompt is made of: the trace's block names, first to last; the last may be cut short."""
    at_ms: float | None = None
    """When it comes; None: when the turn before it is answered and `delay_ms` are over."""
    delay_ms: float = 0.0
    priority: float = 0.0
    """Seconds by which it counts as earlier than it came."""
    strict_priority: int = 0


@dataclass(frozen=True, slots=True)
class Session:
    """Turns of one conversation, in order; most have one."""

    session_id: str
    turns: Sequence[Turn]
    parent_id: str | None = None
    """The session that started it: an agent's, where this is one of its helpers."""

    def __post_init__(self) -> None:
        if not self.turns:
            raise ConfigError(f"session {self.session_id} has no turn")
        for turn in self.turns:
            if turn.input_tokens < 1 or turn.output_tokens < 1:
                raise ConfigError(f"request {turn.request_id}: a prompt and an answer have at least one token each")


Due = tuple[float, Session, int]
"""When, and which turn of which session."""


class OpenLoop:
    """Everyone comes when it is their time, whatever became of the others."""

    def __init__(self, sessions: Sequence[Session], speedup: float = 1.0) -> None:
        if not speedup > 0:
            raise ConfigError(f"--arrival-speedup-ratio {speedup:g}: expected more than 0")
        self._sessions = sessions
        self._speedup = speedup

    def first(self) -> Iterator[Due]:
        """What comes whatever happens, in the order of time."""
        known = ((self._time(session.turns[0]), session, 0) for session in self._sessions)
        return iter(sorted(known, key=lambda due: due[0]))

    def after(self, session: Session, turn: int, now_ms: float) -> Iterable[Due]:
        """What comes because a turn was answered."""
        if turn + 1 == len(session.turns):
            return ()
        following = session.turns[turn + 1]
        at_ms = now_ms + following.delay_ms / self._speedup
        if following.at_ms is not None:
            at_ms = max(at_ms, self._time(following))
        return ((at_ms, session, turn + 1),)

    def begun(self, session: Session, turn: int, now_ms: float) -> Iterable[Due]:
        """What comes because a turn went to a worker: nothing."""
        return ()

    def _time(self, turn: Turn) -> float:
        return (turn.at_ms or 0.0) / self._speedup


class ClosedLoop:
    """So many sessions at once; the next begins when one ends. Times of the trace do not count, delays do."""

    def __init__(self, sessions: Sequence[Session], concurrency: int) -> None:
        if concurrency < 1:
            raise ConfigError(f"--replay-concurrency {concurrency}: expected 1 or more")
        self._rest = iter(sessions)
        self._concurrency = concurrency

    def first(self) -> Iterator[Due]:
        """Those who are there from the start."""
        return ((0.0, session, 0) for session in itertools.islice(self._rest, self._concurrency))

    def after(self, session: Session, turn: int, now_ms: float) -> Iterable[Due]:
        """The session's next turn, or the next session's first."""
        if turn + 1 < len(session.turns):
            return ((now_ms + session.turns[turn + 1].delay_ms, session, turn + 1),)
        following = next(self._rest, None)
        return () if following is None else ((now_ms, following, 0),)

    def begun(self, session: Session, turn: int, now_ms: float) -> Iterable[Due]:
        """What comes because a turn went to a worker: nothing."""
        return ()


class Load(Protocol):
    """Who asks what, and when. Each turn is named once."""

    def first(self) -> Iterator[Due]:
        """What comes whatever happens, in the order of time."""
        ...

    def begun(self, session: Session, turn: int, now_ms: float) -> Iterable[Due]:
        """What comes because a turn went to a worker, the first time that it did."""
        ...

    def after(self, session: Session, turn: int, now_ms: float) -> Iterable[Due]:
        """What comes because a turn was answered."""
        ...


def merge(*sources: Iterable[Due]) -> Iterator[Due]:
    """What several sources bring, in the order of time."""
    return heapq.merge(*sources, key=lambda due: due[0])
