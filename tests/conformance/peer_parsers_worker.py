"""Models that repeat their prompt, one for each parser named. Run by the peer's own Python."""

import asyncio
import sys

from dynamo.llm import ModelInput, ModelRuntimeConfig, ModelType, WorkerType, register_model
from dynamo.runtime import DistributedRuntime

TOKENS_A_CHUNK = 3


async def generate(request, context):
    ids = request["token_ids"]
    for at in range(0, len(ids), TOKENS_A_CHUNK):
        yield {"token_ids": ids[at : at + TOKENS_A_CHUNK], "index": 0}
    yield {"token_ids": [], "index": 0, "finish_reason": "stop"}


async def main():
    runtime = DistributedRuntime(asyncio.get_running_loop(), "etcd", "tcp")
    served = []
    for name in sys.argv[2:]:
        endpoint = runtime.endpoint(f"parsers.{name}.generate")
        config = ModelRuntimeConfig()
        config.tool_call_parser = name
        await register_model(
            ModelInput.Tokens,
            ModelType.Chat,
            endpoint,
            sys.argv[1],
            name,
            worker_type=WorkerType.Aggregated,
            runtime_config=config,
            kv_cache_block_size=16,
        )
        served.append(endpoint.serve_endpoint(generate))
    await asyncio.gather(*served)


asyncio.run(main())
