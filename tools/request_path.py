"""Print the source files that one streaming chat completion executes in the frontend, in order of first call.

    python tools/request_path.py [--router-mode round-robin|kv]

Runs a mocker in a process of its own and the frontend here, and traces requests after a few have warmed it up: a file
counts if every traced request calls one of its functions. Files used only at start, by periodic tasks or by the worker
are therefore absent.
"""

import argparse
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE = f"{ROOT}/src/dynamo/"
MODEL = "m"
WARM_REQUESTS, TRACED_REQUESTS = 3, 5
START_S = 60.0


class Tracer:
    """Profile function of the event loop's thread: records the functions called while it is active."""

    def __init__(self) -> None:
        self.is_active = False
        self.calls: dict[str, str] = {}
        """First function called in each file, in order."""

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Record the call of a Python function of the package."""
        if event == "call" and self.is_active and frame.f_code.co_filename.startswith(SOURCE):
            self.calls.setdefault(frame.f_code.co_filename.removeprefix(SOURCE), frame.f_code.co_qualname)


def chat(port: int) -> None:
    """Send one streaming chat and read its response. Raise `OSError` or `RuntimeError`."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_S)
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    body = json.dumps({"model": MODEL, "messages": messages, "stream": True, "max_tokens": 8})
    connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
    response = connection.getresponse()
    text = response.read()
    if response.status != 200 or not text.endswith(b"data: [DONE]\n\n"):
        raise RuntimeError(f"status {response.status}: {text[:500]!r}")
    connection.close()


def trace(port: int, tracer: Tracer, found: list[dict[str, str]]) -> None:
    """Warm up, trace, and stop the frontend; runs in a thread of its own."""
    deadline = time.monotonic() + START_S
    try:
        while True:
            try:
                chat(port)
                break
            except (OSError, RuntimeError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
        for _ in range(WARM_REQUESTS):
            chat(port)
        for _ in range(TRACED_REQUESTS):
            time.sleep(0.1)
            tracer.calls = {}
            tracer.is_active = True
            chat(port)
            time.sleep(0.05)  # The request is closed after its last byte was sent.
            tracer.is_active = False
            found.append(tracer.calls)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


def free_port() -> int:
    """Return a TCP port that is free now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def main() -> int:
    """Trace the requests and print the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--router-mode", default="round-robin", choices=("round-robin", "kv"))
    router_mode = parser.parse_args().router_mode
    from dynamo.cpu.config import DEMO_MODEL

    with tempfile.TemporaryDirectory() as folder:
        shared = {"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": folder, "DYN_LOG": "error"}
        os.environ.update(shared)
        command = [sys.executable, "-m", "dynamo.mocker", "--model-path", str(DEMO_MODEL), "--model-name", MODEL]
        port, tracer, found = free_port(), Tracer(), list[dict[str, str]]()
        with subprocess.Popen([*command, "--speedup-ratio", "100"], stdout=sys.stderr) as worker:
            try:
                threading.Thread(target=trace, args=(port, tracer, found), daemon=True).start()
                serve(port, router_mode, tracer)
            finally:
                worker.terminate()
    if len(found) < TRACED_REQUESTS:
        print("the frontend did not serve the requests", file=sys.stderr)
        return 1
    report(found)
    return 0


def serve(port: int, router_mode: str, tracer: Any) -> None:
    """Run the frontend in this thread until it is signalled."""
    from dynamo.frontend.main import main as frontend

    sys.argv = ["frontend", "--http-port", str(port), "--router-mode", router_mode]
    sys.setprofile(tracer)
    try:
        frontend()
    finally:
        sys.setprofile(None)


def report(found: list[dict[str, str]]) -> None:
    """Print every file that all traced requests executed, with its first function."""
    shown = [name for name in found[0] if all(name in calls for calls in found)]
    for name in shown:
        print(f"{name:50} {found[0][name]}")
    print(f"{len(shown)} files")


if __name__ == "__main__":
    sys.exit(main())
