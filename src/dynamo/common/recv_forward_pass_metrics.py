"""Command that prints or records the forward-pass metrics of workers: `python -m dynamo.common.recv_forward_pass_metrics`.

`--output` writes a line for each message: `{"received_at_ns": …, "metrics": {…}}`, the time being that of this process.
"""

import argparse
import asyncio
import logging
import math
import signal
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from dynamo.common.forward_pass_metrics import ForwardPassMetrics, decode
from dynamo.common.utils.runtime import create_runtime
from dynamo.core.config import environ
from dynamo.llm.forward_pass_api import FpmEventSubscriber
from dynamo.runtime.logging import configure_dynamo_logging

logger = logging.getLogger(__name__)

PLOT_SAMPLES_MAX = 1_000_000  # Of 200 bytes each; a plot shows fewer.

History = list[tuple[float, ForwardPassMetrics]]
"""Times of receipt in seconds, and the messages."""


@dataclass
class _RecordingStats:
    """Counts of received messages. A gap is a message lost after the first one of its stream."""

    messages: int = 0
    rejected: int = 0
    counter_gaps: int = 0
    non_increasing_counters: int = 0
    last_counter: dict[tuple[str, int], int] = field(default_factory=dict)

    def observe(self, metrics: ForwardPassMetrics) -> None:
        """Count a message of a worker's rank."""
        stream, number = (metrics.worker_id, metrics.dp_rank), metrics.counter_id
        step = number - self.last_counter.get(stream, number - 1)
        self.messages += 1
        if step < 1:
            self.non_increasing_counters += 1
        else:
            self.last_counter[stream] = number
            self.counter_gaps += step - 1

    def log(self) -> None:
        """Log the counts."""
        counts = {
            "messages": self.messages,
            "rejected": self.rejected,
            "streams": len(self.last_counter),
            "counter_gaps": self.counter_gaps,
            "non_increasing_counters": self.non_increasing_counters,
        }
        logger.info(" ".join(f"{name}={count}" for name, count in counts.items()))


def _positive_seconds(value: str) -> float:
    seconds = float(value)
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{value}: must be a positive number of seconds")
    return seconds


def _parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Receive the forward-pass metrics of workers.")
    variables = environ()
    for flag, default in (("namespace", "dynamo"), ("component", "backend"), ("endpoint", "generate")):
        parser.add_argument(f"--{flag}", default=default, help=f"Workers' {flag} (default: {default})")
    for flag, variable, default in (
        ("discovery-backend", "DYN_DISCOVERY_BACKEND", "etcd"),
        ("request-plane", "DYN_REQUEST_PLANE", "nats"),
    ):
        parser.add_argument(f"--{flag}", default=variables.get(variable, default), help=f"Default: {default}")
    parser.add_argument("--mode", choices=("recv", "tracking"), default="recv", help="Each message, or the newest ones")
    parser.add_argument(
        "--poll-interval", type=_positive_seconds, default=2.0, help="Seconds between outputs of tracking (default: 2)"
    )
    parser.add_argument("--save-plot", metavar="PATH", help="PNG file with a plot, written at the end (mode recv)")
    parser.add_argument("--output", type=Path, help="New file to which messages are written (mode recv)")
    parser.add_argument(
        "--flush-interval", type=_positive_seconds, default=1.0, help="Seconds between flushes of --output (default: 1)"
    )
    parser.add_argument("--log-metrics", action="store_true", help="Log messages with --output as well")
    args = parser.parse_args(argv)
    if args.mode == "tracking" and (args.output or args.save_plot):
        parser.error("--output and --save-plot require --mode recv")
    return args


class _Recorder:
    """Destination of received messages: a file, the log, and the samples of a plot."""

    def __init__(self, args: argparse.Namespace, output: BinaryIO | None) -> None:
        self._output = output
        self._is_logged = output is None or args.log_metrics
        self._samples_max = PLOT_SAMPLES_MAX if args.save_plot else 0
        self.stats = _RecordingStats()
        self.history: History = []

    def add(self, message: bytes) -> None:
        """Record a message, with this moment as the time of its receipt."""
        moment_ns, metrics = time.time_ns(), decode(message)
        if metrics is None:
            self.stats.rejected += 1
            return
        self.stats.observe(metrics)
        if self._output is not None:
            self._output.write(_line(moment_ns, metrics))
        if self._is_logged:
            _log(metrics)
        if len(self.history) < self._samples_max:
            self.history.append((moment_ns / 1e9, metrics))

    async def flush_every(self, interval_s: float) -> None:
        """Write buffered lines to the file at every interval, also while no message arrives."""
        while self._output is not None:
            await asyncio.sleep(interval_s)
            self._output.flush()


def _line(moment_ns: int, metrics: ForwardPassMetrics) -> bytes:
    return msgspec.json.encode({"received_at_ns": moment_ns, "metrics": metrics}) + b"\n"


async def _record(subscriber: Any, recorder: _Recorder, flush_interval_s: float) -> None:
    """Record messages until the subscriber ends."""
    flushing = asyncio.ensure_future(recorder.flush_every(flush_interval_s))
    receiving = asyncio.ensure_future(asyncio.to_thread(subscriber.recv))
    try:
        while (message := await asyncio.shield(receiving)) is not None:
            receiving = asyncio.ensure_future(asyncio.to_thread(subscriber.recv))
            recorder.add(message)
    finally:
        flushing.cancel()
        subscriber.shutdown()  # Ends the thread that waits in recv, for which the loop's end would wait.
        await asyncio.wait([flushing, receiving])


async def _run_recv(subscriber: Any, args: argparse.Namespace) -> None:
    """Log and record each message."""
    with nullcontext() if args.output is None else args.output.open("xb") as output:
        recorder = _Recorder(args, output)
        try:
            await _record(subscriber, recorder, args.flush_interval)
        finally:
            recorder.stats.log()
            if recorder.history:
                _save_plot(args.save_plot, recorder.history)


async def _run_tracking(subscriber: Any, args: argparse.Namespace) -> None:
    """Log the newest message of each rank at every interval."""
    subscriber.start_tracking()
    try:
        while True:
            await asyncio.sleep(args.poll_interval)
            recent = subscriber.get_recent_stats()
            logger.info("%d ranks", len(recent))
            for message in recent.values():
                if metrics := decode(message):
                    _log(metrics)
    finally:
        subscriber.shutdown()


def _log(metrics: ForwardPassMetrics) -> None:
    content = msgspec.json.encode(metrics).decode()
    logger.info("[worker=%s dp=%d counter=%d] %s", metrics.worker_id, metrics.dp_rank, metrics.counter_id, content)


def _save_plot(path: str, history: History) -> None:
    """Write a plot of the messages. Raise `ImportError` without matplotlib."""
    try:
        from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise ImportError("--save-plot requires matplotlib: pip install matplotlib") from None
    panels = {
        "step (ms)": [metrics.wall_time * 1000 for _, metrics in history],
        "prefill tokens": [metrics.scheduled_requests.sum_prefill_tokens for _, metrics in history],
        "decode requests": [metrics.scheduled_requests.num_decode_requests for _, metrics in history],
        "decode KV tokens": [metrics.scheduled_requests.sum_decode_kv_tokens for _, metrics in history],
        "queued prefill tokens": [metrics.queued_requests.sum_prefill_tokens for _, metrics in history],
    }
    times = [moment - history[0][0] for moment, _ in history]
    figure = Figure(figsize=(12, 3 * len(panels)), layout="constrained")
    for axes, (label, values) in zip(figure.subplots(len(panels), sharex=True), panels.items(), strict=True):
        axes.plot(times, values)
        axes.set_ylabel(label)
    axes.set_xlabel("seconds")
    figure.savefig(path)
    logger.info("plot written to %s", path)


async def run(args: argparse.Namespace) -> None:
    """Receive until the task is cancelled."""
    runtime, _ = create_runtime(args.discovery_backend, args.request_plane)
    try:
        subscriber = FpmEventSubscriber(runtime.endpoint(f"{args.namespace}.{args.component}.{args.endpoint}"))
        await (_run_tracking if args.mode == "tracking" else _run_recv)(subscriber, args)
    finally:
        runtime.shutdown()


async def _run_with_signals(args: argparse.Namespace) -> None:
    """Run until SIGTERM, which ends the recording as Ctrl-C does."""
    loop = asyncio.get_running_loop()
    running = asyncio.ensure_future(run(args))
    loop.add_signal_handler(signal.SIGTERM, running.cancel)
    try:
        with suppress(asyncio.CancelledError):
            await running
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def main() -> None:
    """Receive as the arguments state, until a signal."""
    args = _parse_args()
    configure_dynamo_logging()
    with suppress(KeyboardInterrupt):
        asyncio.run(_run_with_signals(args))


if __name__ == "__main__":
    main()
