"""Forwards requests to the server with the client's context: python examples/cancellation/middle.py.

The context carries the cancellation: when the client cancels, the request to the server is cancelled too.
"""

import asyncio

from dynamo.runtime import DistributedRuntime, dynamo_worker


class Middle:
    """Handler with a client of the server."""

    def __init__(self, server):
        self.server = server

    async def generate(self, request, context):
        """Yield the elements of the server's response."""
        async for element in await self.server.round_robin(request, context=context):
            yield element.data()
        print("response of the server ended", flush=True)


@dynamo_worker()
async def main(runtime: DistributedRuntime):
    """Wait for the server, then serve until SIGTERM."""
    server = await runtime.endpoint("cancellation.server.generate").client()
    await server.wait_for_instances()
    print("serving cancellation.middle.generate", flush=True)
    await runtime.endpoint("cancellation.middle.generate").serve_endpoint(Middle(server).generate)


asyncio.run(main())
