"""Worker and caller of the Python API that both packages have; run by either's interpreter.

    python plane_program.py worker | caller

Commands arrive as lines of JSON on standard input, results are lines that begin with `answer `. `benchmarks.plane`
sends the commands.
"""

import asyncio
import gc
import json
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import uvloop

from dynamo.runtime import DistributedRuntime

ENDPOINT = "bench.backend.generate"


async def generate(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Yield that many tokens, one per turn of the loop, as an engine's steps do; then wait as long as requested."""
    for number in range(request["tokens"]):
        yield {"token_ids": [number], "index": 0}
        await asyncio.sleep(0)
    await asyncio.sleep(request["idle_s"])


async def read_response(client: Any, tokens: int, idle_s: float = 0.0) -> None:
    """Send a request and read its whole response."""
    count = 0
    async for element in await client.generate({"tokens": tokens, "idle_s": idle_s}, annotated=False):
        count += len(element["token_ids"])
    assert count == tokens, f"{count} tokens of {tokens}"


def used() -> dict[str, float]:
    """Return processor seconds of all threads of this process, and its memory."""
    gc.collect()
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return {"cpu_s": time.process_time(), "rss_bytes": int(fields["VmRSS"].split()[0]) * 1024}


class Caller:
    """Caller that executes commands."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.idle: list[Any] = []

    async def run(self, calls: int, concurrency: int, tokens: int) -> dict[str, float]:
        """Send that many requests at that concurrency; return the seconds."""
        left = iter(range(calls))

        async def one_after_another() -> None:
            for _ in left:
                await read_response(self.client, tokens)

        began = time.monotonic()
        await asyncio.gather(*(one_after_another() for _ in range(concurrency)))
        return {"elapsed_s": time.monotonic() - began}

    async def hold(self, streams: int) -> dict[str, int]:
        """Open streams that have sent one token and then nothing."""
        for start in range(0, streams, 100):
            some = range(start, min(start + 100, streams))
            opened = [await self.client.generate({"tokens": 1, "idle_s": 3600.0}, annotated=False) for _ in some]
            for stream in opened:
                await anext(aiter(stream))
            self.idle += opened
        return {"streams": len(self.idle)}


async def main() -> None:
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    endpoint = runtime.endpoint(ENDPOINT)
    caller = None
    serving = None
    if sys.argv[1] == "worker":
        serving = asyncio.ensure_future(endpoint.serve_endpoint(generate))
    else:
        client = await endpoint.client()
        await client.wait_for_instances()
        caller = Caller(client)
    print("ready", flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        order = json.loads(line)
        name = order.pop("do")
        answer = used() if name == "used" else await getattr(caller, name)(**order)
        print("answer " + json.dumps(answer), flush=True)
    if serving is not None:
        serving.cancel()


uvloop.run(main())
