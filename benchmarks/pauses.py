"""Pauses of a server's event loop, recorded in the server's process while a benchmark loads it.

A timer fires every few milliseconds; a late one is a pause. The processor time of the loop's thread within the pause shows
its cause: a pause in which the thread computed is the server's own, one in which it did not is the machine's.
"""

import asyncio
import gc
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PERIOD_S = 0.002
PAUSE_S = 0.003
"""Delays of a timer beyond this are recorded."""
LONGEST = 5
"""Pauses that a summary names."""


@dataclass(frozen=True, slots=True)
class Pause:
    """A late timer: when it fired (`time.time`), how late, what the loop's thread used of it, and collections within it."""

    at: float
    late_ms: float
    cpu_ms: float
    collection_ms: float
    """Time in the garbage collector."""
    generation: int
    """Oldest generation collected, -1 for none."""


class PauseRecorder:
    """Timer of the running loop, whose pauses are appended to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = self._cpu_s = self._collection_s = self._collecting_since_s = 0.0
        self._generation = -1

    def start(self) -> None:
        """Start recording."""
        gc.callbacks.append(self._on_collection)
        self._arm()

    def close(self) -> None:
        """Stop recording."""
        gc.callbacks.remove(self._on_collection)
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        self._collection_s, self._generation = 0.0, -1
        self._cpu_s = time.thread_time()
        self._due_s = time.monotonic() + PERIOD_S
        self._timer = self._loop.call_later(PERIOD_S, self._fire)

    def _fire(self) -> None:
        late_s = time.monotonic() - self._due_s
        if late_s > PAUSE_S:
            cpu_s = time.thread_time() - self._cpu_s
            pause = Pause(time.time(), late_s * 1e3, cpu_s * 1e3, self._collection_s * 1e3, self._generation)
            with self._path.open("a") as file:
                file.write(json.dumps(asdict(pause)) + "\n")
        self._arm()

    def _on_collection(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self._collecting_since_s = time.monotonic()
        else:
            self._collection_s += time.monotonic() - self._collecting_since_s
            self._generation = max(self._generation, info["generation"])


@asynccontextmanager
async def recorded(service: AbstractAsyncContextManager[None], path: Path) -> AsyncIterator[None]:
    """Run a service, and record the pauses of its loop."""
    async with service:
        recorder = PauseRecorder(path)
        recorder.start()
        try:
            yield
        finally:
            recorder.close()


def pauses_of(path: Path, begin: float, end: float) -> list[Pause]:
    """Return the pauses of a window, longest first."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = [Pause(**json.loads(line)) for line in lines]
    return sorted((one for one in found if begin <= one.at <= end), key=lambda one: -one.late_ms)


def summary(pauses: Sequence[Pause]) -> dict[str, Any]:
    """Return the number of pauses, those in which the thread mostly computed, and the longest ones."""
    return {
        "count": len(pauses),
        "computing": sum(one.cpu_ms > one.late_ms / 2 for one in pauses),
        "longest": [asdict(one) for one in pauses[:LONGEST]],
    }
