"""Scheduler: vLLM's scheduler, extended to publish each step (`--scheduler-cls`, DYN_FORWARDPASS_METRIC_PORT).

It runs in vLLM's engine process, which imports it by name; `listeners.PassListener` subscribes in the worker's process.
"""

import itertools
import struct
import time
from collections import deque
from typing import Any

import zmq
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from dynamo.core.codec import msgpack_encode
from dynamo.protocols.load import ForwardPass
from dynamo.vllm.config import forward_pass_port
from dynamo.vllm.steps import queued_requests, scheduled_requests

UNSENT_MAX = 10_000  # Steps; a slow subscriber loses steps instead of using memory.
PENDING_MAX = 64  # Steps scheduled and not computed; vLLM has two at once, and one for each pipeline stage.


class StepPublisher:
    """Publisher of the numbered steps of one rank."""

    def __init__(self, rank: int) -> None:
        self._socket: Any = zmq.Context.instance().socket(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, UNSENT_MAX)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(f"tcp://127.0.0.1:{forward_pass_port() + rank}")
        self._numbers = itertools.count(1)
        self._pending: deque[tuple[int, float, ForwardPass]] = deque(maxlen=PENDING_MAX)
        self._last_end = 0.0

    def scheduled(self, output: Any, requests: Any, waiting: Any) -> None:
        """Record a scheduled step; steps are computed in order."""
        if output.total_num_scheduled_tokens:
            passed = ForwardPass(
                0.0, scheduled_requests(output.num_scheduled_tokens, requests), queued_requests(waiting)
            )
            self._pending.append((id(output), time.monotonic(), passed))

    def computed(self, output: Any) -> None:
        """Publish a computed step; its duration starts at its scheduling or, if later, at the previous step's end."""
        now = time.monotonic()
        while self._pending:
            number, planned, passed = self._pending.popleft()
            if number == id(output):
                passed.wall_time = now - max(planned, self._last_end)
                self._socket.send_multipart([b"", struct.pack(">Q", next(self._numbers)), msgpack_encode(passed)])
                break
        self._last_end = now

    def close(self) -> None:
        self._socket.close()


class _PublishesSteps:
    """Mixin that adds publication to a vLLM scheduler."""

    def __init__(self, vllm_config: Any, *given: Any, **more: Any) -> None:
        super().__init__(vllm_config, *given, **more)  # type: ignore[call-arg]
        self.publisher = StepPublisher(vllm_config.parallel_config.data_parallel_rank)

    def schedule(self, *given: Any, **more: Any) -> Any:
        output = super().schedule(*given, **more)  # type: ignore[misc]
        self.publisher.scheduled(output, self.requests, self.waiting)  # type: ignore[attr-defined]
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        self.publisher.computed(scheduler_output)
        return outputs

    def shutdown(self) -> None:
        self.publisher.close()
        super().shutdown()  # type: ignore[misc]


class PlainReportingScheduler(_PublishesSteps, Scheduler):  # type: ignore[misc]
    """Scheduler for engines that wait for each step before they schedule the next."""


class ReportingScheduler(_PublishesSteps, AsyncScheduler):  # type: ignore[misc]
    """Scheduler for all other engines; vLLM checks for its base class to enable asynchronous scheduling."""

    def __new__(cls, vllm_config: Any, *given: Any, **more: Any) -> Any:
        if not vllm_config.scheduler_config.async_scheduling:
            return PlainReportingScheduler(vllm_config, *given, **more)
        return super().__new__(cls)
