"""A worker of a realtime model: returns each frame of its request. Run by either package's Python."""

import asyncio
import sys

from dynamo.llm import ModelInput, ModelType, WorkerType, register_model
from dynamo.runtime import DistributedRuntime


async def generate(request_stream, context):
    count = 0
    async for frame in request_stream:
        count += 1
        yield {
            "type": "response.output_text.delta",
            "event_id": f"e{count}",
            "response_id": "r",
            "item_id": "i",
            "output_index": 0,
            "content_index": 0,
            "delta": f"{count} {frame['type']}",
        }
    print(f"ended after {count} frames", flush=True)


async def main():
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    endpoint = runtime.endpoint(sys.argv[1])
    serving = asyncio.ensure_future(endpoint.serve_bidirectional_endpoint(generate))
    await register_model(
        ModelInput.Text,
        ModelType.Realtime,
        endpoint,
        "realtime",
        worker_type=WorkerType.Aggregated,
        skip_model_assets=True,
    )
    print("serving", flush=True)
    await serving


asyncio.run(main())
