"""Coordinator of the virtual connector, driven step by step; run by the Python of either implementation.

Reads words from standard input: `init`, `decide PREFILL DECODE` (`-` leaves a number), `get`, `complete`, `settle`, `wait`. Writes a line of JSON
for each: the state of the coordinator, whether it is ready, and the result.
"""

import asyncio
import json
import os
import sys

from dynamo._core import DistributedRuntime, VirtualConnectorClient, VirtualConnectorCoordinator

MAX_WAIT_S = 3600


def fields(decision):
    return [decision.num_prefill_workers, decision.num_decode_workers, decision.decision_id]


async def settle(coordinator):
    """Wait until the coordinator is ready: the released one reads a completion some time after it was written."""
    for _ in range(100):
        if await coordinator.is_scaling_ready():
            return
        await asyncio.sleep(0.05)


async def main():
    runtime = DistributedRuntime(asyncio.get_running_loop(), "etcd", "tcp")
    coordinator = VirtualConnectorCoordinator(runtime, sys.argv[1], 1, MAX_WAIT_S, 2)
    client = VirtualConnectorClient(runtime, sys.argv[1])
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        word, *arguments = line.split()
        result = None
        if word == "init":
            await coordinator.async_init()
        elif word == "decide":
            await coordinator.update_scaling_decision(*(None if one == "-" else int(one) for one in arguments))
        elif word == "get":
            result = fields(await client.get())
        elif word == "complete":
            await client.complete(await client.get())
            await settle(coordinator)
        elif word == "settle":
            await settle(coordinator)
        elif word == "wait":
            try:
                await asyncio.wait_for(client.wait(), 1)
                result = "decision"
            except TimeoutError:
                result = "none"
        state = [fields(coordinator.read_state()), await coordinator.is_scaling_ready(), result]
        print("state", json.dumps(state), flush=True)
    sys.stdout.flush()
    os._exit(0)  # The released client's wait is not cancelled by its timeout.


if __name__ == "__main__":
    asyncio.run(main())
