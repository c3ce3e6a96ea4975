"""Counts until the client cancels: python examples/cancellation/server.py."""

import asyncio

from dynamo.runtime import DistributedRuntime, dynamo_worker


async def generate(request, context):
    """Yield a number every 50 ms; check for cancellation before each one."""
    for number in range(request):
        if context.is_stopped():
            print(f"cancelled before {number}", flush=True)
            raise asyncio.CancelledError
        await asyncio.sleep(0.05)
        yield number


@dynamo_worker()
async def main(runtime: DistributedRuntime):
    """Serve until SIGTERM."""
    print("serving cancellation.server.generate", flush=True)
    await runtime.endpoint("cancellation.server.generate").serve_endpoint(generate)


asyncio.run(main())
