"""An environment of the virtual connector: starts and stops worker processes as the decisions require.

Run by the Python of either implementation: `virtual_supervisor.py NAMESPACE COMMAND…` keeps as many processes of the command as the
decode workers of the last decision, from 1, and writes a line of JSON for each decision that it has carried out.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys

from dynamo._core import DistributedRuntime, VirtualConnectorClient

STOP_S = 60.0


async def stop(process):
    """Terminate a worker, which completes its requests; kill one that takes too long."""
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOP_S)
    except TimeoutError:
        process.kill()
        await process.wait()


async def supervise(namespace, command):
    runtime = DistributedRuntime(asyncio.get_running_loop(), os.environ.get("DYN_DISCOVERY_BACKEND", "file"), "tcp")
    client = VirtualConnectorClient(runtime, namespace)
    workers = [await asyncio.create_subprocess_exec(*command)]
    try:
        while True:
            await client.wait()
            decision = await client.get()
            wanted = max(1, decision.num_decode_workers)
            while len(workers) < wanted:
                workers.append(await asyncio.create_subprocess_exec(*command))
            while len(workers) > wanted:
                await stop(workers.pop())
            await client.complete(decision)
            print(json.dumps({"carried_out": decision.decision_id, "workers": len(workers)}), flush=True)
    finally:
        for worker in workers:
            worker.terminate()
        await asyncio.gather(*(stop(worker) for worker in workers if worker.returncode is None))


async def main():
    running = asyncio.ensure_future(supervise(sys.argv[1], sys.argv[2:]))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await running


if __name__ == "__main__":
    asyncio.run(main())
