"""A worker that prints each step of its handler; runs under the released package and under ours."""

import asyncio
import os
import sys

from dynamo.runtime import DistributedRuntime

GAP_S = 0.1
POLL_S = 0.01


async def generate(request, context):
    try:
        for number in range(20):
            yield {"number": number}
            print(f"step {number} stopped={context.is_stopped()} killed={context.is_killed()}", flush=True)
            # The cancellation arrives in the first step, however long it takes.
            while not context.is_stopped():  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
            await asyncio.sleep(GAP_S)
        print("step finished", flush=True)
    except GeneratorExit:
        print("step closed", flush=True)
        raise


async def main():
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", os.environ.get("DYN_REQUEST_PLANE", "tcp"))
    print("serving", flush=True)
    await runtime.endpoint(sys.argv[1]).serve_endpoint(generate)


asyncio.run(main())
