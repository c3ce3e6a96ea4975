"""Trace: timing of each engine step, as a file for chrome://tracing and Perfetto."""

import json
import os
import re
import tempfile
import threading
import time
from collections import deque
from typing import Any

from dynamo.core.errors import InvalidArgument
from dynamo.protocols.load import ForwardPass, WorkerLoad

STEPS_MAX = 200_000  # About an hour of a small model; then the oldest are dropped.


class StepTrace:
    """Recorded steps. The engine's thread adds them; another thread writes them after the last one."""

    def __init__(self, prefix: str | None) -> None:
        self._prefix = re.sub(r"[^A-Za-z0-9._-]+", "-", prefix or "dynamo-cpu")
        self._began = time.perf_counter()
        self._steps: deque[tuple[float, float, ForwardPass, WorkerLoad]] = deque(maxlen=STEPS_MAX)

    def add(self, began: float, ended: float, passed: ForwardPass, load: WorkerLoad) -> None:
        """Record a computed step."""
        self._steps.append((began, ended, passed, load))

    def write(self, directory: str) -> str:
        """Write the complete trace and return its path. Raise `InvalidArgument` if the file cannot be written."""
        try:
            os.makedirs(directory, exist_ok=True)
            file, path = tempfile.mkstemp(prefix=f"{self._prefix}-", suffix=".trace.json", dir=directory)
            with os.fdopen(file, "w", encoding="utf-8") as out:
                json.dump({"traceEvents": self.events(), "displayTimeUnit": "ms"}, out)
        except OSError as error:
            raise InvalidArgument(f"{directory}: {error.strerror}") from None
        return path

    def events(self) -> list[dict[str, Any]]:
        """Return Trace Event Format events: a bar for each step, counters for running and waiting requests."""
        process = os.getpid()
        place = {"pid": process, "tid": threading.get_native_id()}
        events: list[dict[str, Any]] = [
            {"name": "process_name", "ph": "M", **place, "args": {"name": "dynamo.cpu"}},
            {"name": "thread_name", "ph": "M", **place, "args": {"name": "engine"}},
        ]
        for began, ended, passed, load in self._steps:
            at = (began - self._began) * 1e6
            done = passed.scheduled_requests
            events.append(
                {
                    "name": "step", "cat": "engine", "ph": "X", "ts": at, "dur": (ended - began) * 1e6, **place,
                    "args": {
                        "prefill_requests": done.num_prefill_requests,
                        "prefill_tokens": done.sum_prefill_tokens,
                        "decode_requests": done.num_decode_requests,
                        "decode_context_tokens": done.sum_decode_kv_tokens,
                    },
                }
            )  # fmt: skip
            curves = {"running": load.running_requests, "waiting": load.waiting_requests}
            events.append({"name": "requests", "ph": "C", "ts": at, **place, "args": curves})
            events.append({"name": "kv blocks", "ph": "C", "ts": at, **place, "args": {"used": load.kv_used_blocks}})
        return events
