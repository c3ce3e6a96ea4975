"""Stacks of all threads of this process while its event loop is late, by a thread that takes samples.

A C function that holds the interpreter lock also delays this thread. It then runs before the function's thread is far from
the call, whose line is in the sample. `faulthandler`'s timer would sample without the lock, and crashes the interpreter when
another thread changes its frames meanwhile.
"""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from types import FrameType
from typing import TextIO

PERIOD_S = 0.005
LATE_S = 0.03
LIMIT = 12
"""Innermost calls of a stack that are written."""


class LateStacks:
    """Samples of one loop, which calls `beat` periodically; a sample is written at each look while the last beat is old."""

    def __init__(self, out: TextIO, late_s: float = LATE_S, clock: Callable[[], float] = time.perf_counter) -> None:
        """`late_s`: age of the last beat in seconds from which the loop is late."""
        self._out = out
        self._late_s = late_s
        self._clock = clock
        self._beat_s = self._looked_s = clock()
        self._used_ns: dict[int, int] = {}

    def beat(self) -> None:
        """Record that the loop runs. Call it in the loop's thread."""
        self._beat_s = self._clock()

    def start(self) -> None:
        """Look every `PERIOD_S` seconds, in a daemon thread, until the process ends."""
        threading.Thread(target=self._run, name="late-stacks", daemon=True).start()

    def look(self, frames: Mapping[int, FrameType]) -> bool:
        """Write the stacks of `frames`, by thread, if the loop is late; return whether it is.

        Each has the processor time of its thread in milliseconds since the last look.
        """
        now_s, used_ns = self._clock(), _used_ns()
        age_s = now_s - self._beat_s
        is_late = age_s > self._late_s
        if is_late:
            print(f"--- {now_s:.4f}: late {age_s * 1e3:.1f} ms, {(now_s - self._looked_s) * 1e3:.1f} ms since the last look", file=self._out)  # fmt: skip
            for thread in threading.enumerate():
                if (frame := frames.get(thread.ident or 0)) is not None and thread is not threading.current_thread():
                    native = thread.native_id or 0
                    spent_ns = used_ns.get(native, 0) - self._used_ns.get(native, 0)
                    print(f"{thread.name}: {spent_ns / 1e6:.1f} ms", file=self._out)
                    for one in traceback.extract_stack(frame, LIMIT):
                        print(f"    {one.filename}:{one.lineno} {one.name}", file=self._out)
            self._out.flush()
        self._used_ns, self._looked_s = used_ns, now_s
        return is_late

    def _run(self) -> None:
        while True:
            time.sleep(PERIOD_S)
            self.look(sys._current_frames())


def _used_ns() -> dict[int, int]:
    """Return the processor time of each thread of this process in nanoseconds, by its number; empty where Linux has no record."""
    found: dict[int, int] = {}
    try:
        numbers = os.listdir("/proc/self/task")
    except OSError:
        return found
    for number in numbers:
        try:
            with open(f"/proc/self/task/{number}/schedstat", "rb", buffering=0) as file:
                found[int(number)] = int(file.read().split()[0])
        except (OSError, IndexError):  # It ended meanwhile.
            continue
    return found
