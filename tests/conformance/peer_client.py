"""A client of the released peer: executes each line of its input. Run by the peer's own Python."""

import asyncio
import json
import os
import sys

from dynamo.runtime import Context, DistributedRuntime


async def send_request(client, request, stop_after=None):
    context = Context()
    received = []
    try:
        async for element in await client.generate(request, annotated=False, context=context):
            received.append(element)
            if len(received) == stop_after:
                context.stop_generating()
    except Exception as error:
        return {"heard": received, "error": type(error).__name__, "message": str(error)}
    return {"heard": received, "error": None}


async def main():
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", os.environ.get("DYN_REQUEST_PLANE", "tcp"))
    client = await runtime.endpoint(sys.argv[1]).client()
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        order = json.loads(line)
        if order["do"] == "ids":
            answer = client.instance_ids()
        elif order["do"] == "many":
            answers = await asyncio.gather(*(send_request(client, order["request"]) for _ in range(order["times"])))
            answer = [sum(len(a["heard"]) for a in answers), sum(a["error"] is not None for a in answers)]
        else:
            answer = await send_request(client, order["request"], order.get("stop_after"))
        print("answer " + json.dumps(answer), flush=True)
    runtime.shutdown()


asyncio.run(main())
