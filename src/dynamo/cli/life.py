"""Life of a graph: the decision that follows the end of a process. Pure; time is an argument."""

import enum
import signal
from collections import deque
from dataclasses import dataclass

from dynamo.cli.graph import FRONTEND, PLANNER

RESTART_DELAYS_S = (0.0, 1.0, 4.0)  # Before each restart of the window: a port or device may need time to be released.
RESTARTS_MAX = len(RESTART_DELAYS_S)  # Per process and window; a further crash is not transient.
RESTART_WINDOW_S = 60.0
PLANNER_DELAY_S = 30.0  # After `RESTARTS_MAX`: workers serve without a planner, so its crashes never end the graph.
LISTING_S_MAX = 60.0  # A frontend reads a tokenizer in seconds; if it lists no model by then, it has failed.


class Phase(enum.Enum):
    """Stage of the graph's life."""

    STARTING = "starting"
    SERVING = "serving"
    ENDING = "ending"


@dataclass(frozen=True, slots=True)
class RestartProcess:
    """Restart this process after `delay_s`; `reason` is the message for the user."""

    name: str
    reason: str
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EndGraph:
    """End the whole graph with this exit status; `culprit` is the process whose log shows the cause."""

    status: int
    reason: str
    culprit: str | None = None


class GraphLife:
    """State machine that decides whether a graph continues, from the events of its processes."""

    def __init__(self) -> None:
        self.phase = Phase.STARTING
        self._complete_since: float | None = None
        self._restarts: dict[str, deque[float]] = {}

    def progressed(self, *, workers_left: int, is_listed: bool, now: float) -> EndGraph | None:
        """Record the missing workers and whether the frontend lists the model; only listing has a time limit."""
        assert self.phase is Phase.STARTING, "a graph becomes ready once"
        if workers_left > 0:
            self._complete_since = None
        elif is_listed:
            self.phase = Phase.SERVING
        elif self._complete_since is None:
            self._complete_since = now
        elif now - self._complete_since > LISTING_S_MAX:
            self.phase = Phase.ENDING
            return EndGraph(
                1, f"{FRONTEND} lists no model {LISTING_S_MAX:.0f} s after its workers were ready", FRONTEND
            )
        return None

    def stop(self, reason: str) -> EndGraph:
        """End the graph at the request of the user or the system."""
        self.phase = Phase.ENDING
        return EndGraph(0, reason)

    def survive(self, name: str) -> None:
        """Continue without a process whose exit would have ended the serving graph."""
        self.phase = Phase.SERVING
        self._restarts.pop(name, None)

    def exited(self, name: str, status: int, now: float) -> RestartProcess | EndGraph | None:
        """Decide what follows the exit of a process; None while the graph is ending.

        The frontend is restarted like a worker: the workers keep running, and it finds them in discovery.
        """
        if self.phase is Phase.ENDING:
            return None
        reason = describe_exit(name, status)
        if self.phase is Phase.STARTING:
            self.phase = Phase.ENDING
            return EndGraph(2 if status == 2 else 1, f"{reason} before it was ready", name)
        return self._restart(name, reason, now)

    def _restart(self, name: str, reason: str, now: float) -> RestartProcess | EndGraph:
        restarts = self._restarts.setdefault(name, deque(maxlen=RESTARTS_MAX))
        while restarts and now - restarts[0] > RESTART_WINDOW_S:
            restarts.popleft()
        if len(restarts) == RESTARTS_MAX and name == PLANNER:
            return RestartProcess(name, f"{reason}; the workers stay as they are", PLANNER_DELAY_S)
        if len(restarts) == RESTARTS_MAX:
            self.phase = Phase.ENDING
            return EndGraph(1, f"{reason}, the {RESTARTS_MAX + 1}th time within {RESTART_WINDOW_S:.0f} s", name)
        delay_s = RESTART_DELAYS_S[len(restarts)]
        restarts.append(now)
        return RestartProcess(name, reason, delay_s)


def describe_exit(name: str, status: int) -> str:
    """Return a text such as `worker-1 was killed by SIGKILL` or `frontend ended with status 1`."""
    if status >= 0:
        return f"{name} ended with status {status}"
    try:
        word = signal.Signals(-status).name
    except ValueError:
        word = f"signal {-status}"
    return f"{name} was killed by {word}"
