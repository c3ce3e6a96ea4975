"""Receives three numbers and cancels: python examples/cancellation/client.py [--middle]."""

import asyncio
import sys

from dynamo.runtime import Context, DistributedRuntime, dynamo_worker


@dynamo_worker()
async def main(runtime: DistributedRuntime, component: str):
    """Print the numbers received until the request is cancelled."""
    client = await runtime.endpoint(f"cancellation.{component}.generate").client()
    await client.wait_for_instances()
    context = Context()
    async for element in await client.generate(1000, context=context):
        print(f"received {element.data()}", flush=True)
        if element.data() == 2:
            context.stop_generating()
            break
    print("cancelled", flush=True)


asyncio.run(main("middle" if "--middle" in sys.argv else "server"))
