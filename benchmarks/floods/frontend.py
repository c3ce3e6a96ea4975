"""Frontend with an event-loop probe: `python -m dynamo.frontend` that also records how late its loop runs a timer.

    FLOODS_PROBE=FILE python benchmarks/floods/frontend.py [options of the frontend]

Every record has the time, how late the timer ran, and the processor time that this process, and the loop's thread alone,
used meanwhile. A delay without processor time of this process is the machine's: other processes had the cores.
"""

import asyncio
import os
import struct
import sys
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from benchmarks.floods.late_stacks import LateStacks

RECORD = struct.Struct("=dddd")
PERIOD_S = 0.004
VARIABLE = "FLOODS_PROBE"
STACKS_VARIABLE = "FLOODS_STACKS"
"""File for the stacks of all threads while the loop is late (`floods.late_stacks`); taking samples costs processor time."""


@dataclass(frozen=True, slots=True)
class LoopLag:
    """One timer of the loop: when it ran, how late, and the processor time since the last one."""

    at_s: float
    late_s: float
    process_s: float
    """Processor time of all threads of the frontend."""
    thread_s: float
    """Processor time of the loop's thread."""

    @property
    def computed_s(self) -> float:
        """The part of the delay in which the frontend computed, in any thread: they share the interpreter lock."""
        return min(self.late_s, self.process_s)

    @property
    def on_loop_s(self) -> float:
        """The part of the delay in which the loop's thread computed: the longest piece of work of the loop."""
        return min(self.late_s, self.thread_s)


async def probe(path: str, late: LateStacks | None) -> None:
    """Write a record every `PERIOD_S` seconds until cancelled."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    while True:
        if late is not None:
            late.beat()
        due_s, process_s, thread_s = time.perf_counter() + PERIOD_S, time.process_time(), time.thread_time()
        await asyncio.sleep(PERIOD_S)
        now_s, late_s = time.perf_counter(), max(time.perf_counter() - due_s, 0.0)
        os.write(file, RECORD.pack(now_s, late_s, time.process_time() - process_s, time.thread_time() - thread_s))


def main() -> int:
    """Run the frontend with the probe on its loop."""
    from dynamo.frontend import main as frontend

    serve, stacks = frontend.serve, os.environ.get(STACKS_VARIABLE)
    late = LateStacks(open(stacks, "a")) if stacks else None  # noqa: SIM115 - open until the process ends

    async def probed(*args: Any) -> int:
        if late is not None:
            late.start()
        task = asyncio.create_task(probe(os.environ[VARIABLE], late))
        serving: Coroutine[Any, Any, int] = serve(*args)
        try:
            return await serving
        finally:
            task.cancel()

    frontend.serve = probed  # type: ignore[assignment]
    return frontend.main()


if __name__ == "__main__":
    sys.exit(main())
