"""Released router: prints the cached blocks of each worker once per request line on standard input."""

import asyncio
import json
import sys

from dynamo.llm import KvRouter, KvRouterConfig
from dynamo.runtime import DistributedRuntime


async def main() -> None:
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    router = KvRouter(runtime.endpoint("dynamo.backend.generate"), 4, KvRouterConfig())
    while line := await asyncio.to_thread(sys.stdin.readline):
        scores = await router.get_overlap_scores(json.loads(line))
        print(json.dumps(scores["workers"]), flush=True)


asyncio.run(main())
