"""Elements with annotations, whose effect at a client is printed as JSON lines.

Runs under our Python and under a released peer's.
"""

import asyncio
import json
import sys

from dynamo.runtime import DistributedRuntime

ENVELOPE = {"_dynamo_annotated": True}
ELEMENTS = [
    None,
    {"a": None},
    "",
    [],
    {"x": object()},
    {**ENVELOPE, "data": {"b": 2}, "event": "progress", "comment": ["half"], "id": "7"},
    {"_dynamo_annotated": False, "data": 5},
    {"_dynamo_annotated": None, "data": 1},
    {"_dynamo_annotated": "yes", "data": 1},
    ENVELOPE,
    {**ENVELOPE, "data": None, "event": "x"},
    {**ENVELOPE, "event": "only"},
    {**ENVELOPE, "data": 1, "extra": 7},
    {**ENVELOPE, "data": 1, "comment": []},
    {**ENVELOPE, "comment": "text"},
    {**ENVELOPE, "data": 1, "id": 7},
    {**ENVELOPE, "data": 1, "event": 3},
    {**ENVELOPE, "data": 1, "comment": [1]},
    {**ENVELOPE, "event": "error", "comment": ["out of", "memory"]},
    {**ENVELOPE, "event": "error"},
    {**ENVELOPE, "event": "error", "data": 4},
]


async def generate(number):
    yield ELEMENTS[number]
    yield "after"


async def received(client, number, annotated):
    """Return the elements of a response; last, for one that failed, `ValueError` and the error's first words."""
    elements = []
    try:
        stream = await client.generate(number, annotated=annotated)
        async for one in stream:
            element = [one.data(), one.event(), one.comments(), one.id()] if annotated else one
            elements.append(element)
    except ValueError as error:
        message = str(error).removeprefix("Internal: ").removeprefix("critical error: ")
        elements.append(
            ["ValueError", " ".join(message.replace(" as msgpack", "").replace(":", ";").split(";")[0].split())]
        )
    return elements


async def main():
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    endpoint = runtime.endpoint("annotations.worker.generate")
    serving = asyncio.ensure_future(endpoint.serve_endpoint(generate))
    client = await endpoint.client()
    await client.wait_for_instances()
    for annotated in (True, False):
        for number in range(len(ELEMENTS)):
            print(json.dumps([number, annotated, await received(client, number, annotated)]), flush=True)
    runtime.shutdown()
    await asyncio.wait([serving], timeout=10)
    sys.exit(0)


asyncio.run(main())
