"""Command that prints or records the forward-pass metrics of workers: `python -m dynamo.common.recv_forward_pass_metrics`.

`--output` writes a line for each message: `{"received_at_ns": …, "metrics": {…}}`, the time being that of this process.
"""

import argparse
import asyncio
import logging
import math
import signal
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, nullcontext, suppress
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
        self.messages += 1
        stream = (metrics.worker_id, metrics.dp_rank)
        last = self.last_counter.get(stream)
        if last is not None and metrics.counter_id <= last:
            self.non_increasing_counters += 1
            return
        if last is not None:
            self.counter_gaps += metrics.counter_id - last - 1
        self.last_counter[stream] = metrics.counter_id


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


async def _receive(subscriber: Any, output: BinaryIO | None, flush_interval: float) -> AsyncGenerator[bytes, None]:
    """Yield messages until the subscriber ends; flush the file also while none arrives."""
    receiving = asyncio.ensure_future(asyncio.to_thread(subscriber.recv))
    flush_at = time.monotonic() + flush_interval
    try:
        while True:
            await asyncio.wait([receiving], timeout=None if output is None else max(0, flush_at - time.monotonic()))
            if output is not None and time.monotonic() >= flush_at:
                output.flush()
                flush_at = time.monotonic() + flush_interval
            if not receiving.done():
                continue
            message = receiving.result()
            if message is None:
                return
            receiving = asyncio.ensure_future(asyncio.to_thread(subscriber.recv))
            yield message
    finally:
        subscriber.shutdown()  # Ends the thread that waits in recv, for which the loop's end would wait.
        await asyncio.wait([receiving])


async def _run_recv(subscriber: Any, args: argparse.Namespace) -> None:
    """Log and record each message."""
    stats = _RecordingStats()
    history: History = []
    is_logged = args.output is None or args.log_metrics
    try:
        with nullcontext() if args.output is None else args.output.open("xb") as output:
            async with aclosing(_receive(subscriber, output, args.flush_interval)) as messages:
                async for message in messages:
                    received_at_ns, metrics = time.time_ns(), decode(message)
                    if metrics is None:
                        stats.rejected += 1
                        continue
                    stats.observe(metrics)
                    if output is not None:
                        output.write(
                            msgspec.json.encode({"received_at_ns": received_at_ns, "metrics": metrics}) + b"\n"
                        )
                    if is_logged:
                        _log(metrics)
                    if args.save_plot and len(history) < PLOT_SAMPLES_MAX:
                        history.append((received_at_ns / 1e9, metrics))
    finally:
        subscriber.shutdown()
        logger.info(
            "messages=%d rejected=%d streams=%d counter_gaps=%d non_increasing_counters=%d",
            stats.messages,
            stats.rejected,
            len(stats.last_counter),
            stats.counter_gaps,
            stats.non_increasing_counters,
        )
        if history:
            _save_plot(args.save_plot, history)


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
