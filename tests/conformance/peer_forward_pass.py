"""The released consumer of forward-pass metrics: prints, as JSON, the messages that its own classes decode."""

import asyncio
import json
import sys

import msgspec

from dynamo.common.forward_pass_metrics import decode
from dynamo.llm import FpmEventSubscriber
from dynamo.runtime import DistributedRuntime


async def main():
    endpoint = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp").endpoint(sys.argv[1])
    subscriber = FpmEventSubscriber(endpoint)
    print("listening", flush=True)
    while (payload := await asyncio.get_running_loop().run_in_executor(None, subscriber.recv)) is not None:
        print("heard " + json.dumps(msgspec.to_builtins(decode(bytes(payload)))), flush=True)


asyncio.run(main())
