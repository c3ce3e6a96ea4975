"""Forward-pass metrics of the released peer: publishes or prints them. Run by the peer's own Python."""

import asyncio
import sys

from dynamo.llm import FpmDirectPublisher, FpmEventSubscriber
from dynamo.runtime import DistributedRuntime


async def main():
    endpoint = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp").endpoint(sys.argv[1])
    if sys.argv[2] == "publish":
        publisher = FpmDirectPublisher(endpoint, "7")
        print("publishing", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        publisher.shutdown()
        return
    subscriber = FpmEventSubscriber(endpoint)
    print("listening", flush=True)
    while (payload := await asyncio.get_running_loop().run_in_executor(None, subscriber.recv)) is not None:
        print("heard " + bytes(payload).hex(), flush=True)


asyncio.run(main())
