"""Worker of the released peer with scripted responses. Run by the peer's own Python."""

import asyncio
import os
import sys

from dynamo.llm import exceptions
from dynamo.runtime import DistributedRuntime


async def generate(request, context):
    mode = request.get("mode")
    if mode == "invalid":
        raise exceptions.InvalidArgument("bad thing")
    if mode == "bug":
        yield {"token_ids": [1], "index": 0}
        raise RuntimeError("boom")
    for number in range(request.get("count", 0)):
        if context.is_stopped():
            print(f"stopped killed={context.is_killed()}", flush=True)
            return
        yield {"token_ids": [number], "index": 0}
        if number % 5 == 4:
            yield {"token_ids": [number, number], "index": 0, "text": "ü"}
        await asyncio.sleep(request.get("gap_s", 0))


async def main():
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", os.environ.get("DYN_REQUEST_PLANE", "tcp"))
    print("serving", flush=True)
    await runtime.endpoint(sys.argv[1]).serve_endpoint(generate)


asyncio.run(main())
