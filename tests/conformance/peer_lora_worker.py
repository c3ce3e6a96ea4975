"""A released worker of a model and a LoRA adapter: returns the adapter of each request. Run by the peer's Python."""

import asyncio
import sys

from dynamo.llm import ModelInput, ModelRuntimeConfig, ModelType, WorkerType, register_model
from dynamo.runtime import DistributedRuntime


async def generate(request, context):
    """Yield token 65 for the model and 66 for an adapter, `max_tokens` times."""
    name = (request.get("routing") or {}).get("lora_name")
    print(f"asked for {name}", flush=True)
    yield {"token_ids": [66 if name else 65], "index": 0, "finish_reason": "length"}


async def main():
    model_path, name, adapter = sys.argv[1:4]
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    endpoint = runtime.endpoint("dynamo.released.generate")
    config = ModelRuntimeConfig()
    for more in ({"model_name": name}, {"lora_name": adapter, "base_model_path": model_path, "max_gpu_lora_count": 4}):
        await register_model(
            ModelInput.Tokens, ModelType.Chat | ModelType.Completions, endpoint, model_path,
            worker_type=WorkerType.Aggregated, kv_cache_block_size=16, runtime_config=config, **more,
        )  # fmt: skip
    await endpoint.serve_endpoint(generate)


asyncio.run(main())
