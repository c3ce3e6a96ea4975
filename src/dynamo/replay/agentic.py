"""Agentic: load of agents: trajectories of requests that depend on each other and on tools.

    play      one task, from its first request to the last: sessions of an agent and of the helpers that it starts
    request   arrives when all its dependencies are satisfied and the delay after them (of a tool, for example) is over:
                  complete   another request of the play was answered
                  dispatch   another request of the play was sent to a worker: a helper that runs concurrently

Without lanes, plays begin at their recorded times. With lanes, each lane runs one play after another.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dynamo.core.errors import ConfigError
from dynamo.replay.load import Due, ReplaySession, merge

Trigger = Literal["complete", "dispatch"]


@dataclass(frozen=True, slots=True)
class Need:
    """A dependency on another request of the same play, with the delay after it."""

    request_id: str
    trigger: Trigger = "complete"
    delay_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Play:
    """One task: sessions of requests that depend on each other."""

    play_id: str
    sessions: Sequence[ReplaySession]
    needs: Mapping[str, Sequence[Need]]
    """Dependencies by request; a request without any arrives at its own time."""

    def check(self) -> "Play":
        """Return the play. Raise `ConfigError` if a dependency is missing or circular."""
        known = {turn.request_id for session in self.sessions for turn in session.turns}
        if len(known) < sum(len(session.turns) for session in self.sessions):
            raise ConfigError(f"play {self.play_id}: duplicate request id")
        left = {name: {need.request_id for need in self.needs.get(name, ())} for name in known}
        for name, needed in left.items():
            if not needed <= known:
                raise ConfigError(f"play {self.play_id}: {name} depends on unknown request {min(needed - known)}")
        while left:
            free = {name for name, needed in left.items() if not needed}
            if not free:
                raise ConfigError(f"play {self.play_id}: circular dependency of {min(left)}")
            left = {name: needed - free for name, needed in left.items() if name not in free}
        return self


@dataclass(slots=True)
class _Begun:
    """An active play."""

    play: Play
    began_ms: float
    base_ms: float
    """Offset of the play's own times in milliseconds."""
    where: dict[str, tuple[ReplaySession, int]]
    missing: dict[str, int]
    """Number of unsatisfied dependencies by request."""
    ready_ms: dict[str, float]
    waiting_for: dict[tuple[str, Trigger], list[tuple[str, float]]]
    left: int


@dataclass(slots=True)
class AgenticLoad:
    """Plays at their recorded times or on lanes."""

    plays: Sequence[Play]
    lanes: int | None = None
    speedup: float = 1.0
    _rest: Iterator[Play] = field(init=False)
    _begun: dict[str, _Begun] = field(init=False, default_factory=dict)
    """Active plays by session id."""

    def __post_init__(self) -> None:
        if self.lanes is not None and self.lanes < 1:
            raise ConfigError(f"--agentic-lanes {self.lanes}: expected 1 or more")
        if not self.speedup > 0:
            raise ConfigError(f"--arrival-speedup-ratio {self.speedup:g}: expected more than 0")
        self._rest = iter(())

    def first(self) -> Iterator[Due]:
        """Yield requests that depend on no other request, in the order of time."""
        if self.lanes is not None:
            self._rest = iter(self.plays)
            started = [self._begin(play, 0.0) for play in itertools.islice(self._rest, self.lanes)]
            return merge(*(sorted(due, key=lambda one: one[0]) for due in started))
        known = [due for play in self.plays for due in self._begin(play, base_ms(play) / self.speedup)]
        return iter(sorted(known, key=lambda due: due[0]))

    def begun(self, session: ReplaySession, turn: int, now_ms: float) -> Iterable[Due]:
        """Return the requests that become due because a turn was sent to a worker."""
        return self._happened(session, turn, "dispatch", now_ms)

    def after(self, session: ReplaySession, turn: int, now_ms: float) -> Iterable[Due]:
        """Return the requests that become due because a turn was answered, with the next play if a lane became free."""
        found = self._happened(session, turn, "complete", now_ms)
        begun = self._begun[session.session_id]
        begun.left -= 1
        if begun.left == 0:
            for one in begun.play.sessions:
                del self._begun[one.session_id]
            following = next(self._rest, None)
            if following is not None:
                found += self._begin(following, now_ms)
        return found

    def _begin(self, play: Play, now_ms: float) -> list[Due]:
        where = {
            turn.request_id: (session, place) for session in play.sessions for place, turn in enumerate(session.turns)
        }
        begun = _Begun(play, now_ms, base_ms(play), where, {}, {}, {}, len(where))
        for name in where:
            needs = play.needs.get(name, ())
            begun.missing[name] = len(needs)
            for need in needs:
                begun.waiting_for.setdefault((need.request_id, need.trigger), []).append((name, need.delay_ms))
        for session in play.sessions:
            self._begun[session.session_id] = begun
        return [self._due(begun, name) for name, missing in begun.missing.items() if not missing]

    def _happened(self, session: ReplaySession, turn: int, trigger: Trigger, now_ms: float) -> list[Due]:
        begun = self._begun[session.session_id]
        found = []
        for name, delay_ms in begun.waiting_for.pop((session.turns[turn].request_id, trigger), ()):
            ready_ms = now_ms + delay_ms / self.speedup
            begun.ready_ms[name] = max(begun.ready_ms.get(name, 0.0), ready_ms)
            begun.missing[name] -= 1
            if begun.missing[name] == 0:
                found.append(self._due(begun, name))
        return found

    def _due(self, begun: _Begun, name: str) -> Due:
        session, place = begun.where[name]
        at_ms = begun.ready_ms.get(name, begun.began_ms)
        own_ms = session.turns[place].at_ms
        if own_ms is not None:
            at_ms = max(at_ms, begun.began_ms + (own_ms - begun.base_ms) / self.speedup)
        return at_ms, session, place


def base_ms(play: Play) -> float:
    """Return the time at which a play begins by its own times."""
    times = [turn.at_ms for session in play.sessions for turn in session.turns]
    return min((at_ms for at_ms in times if at_ms is not None), default=0.0)
