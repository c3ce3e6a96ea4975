"""Models that return the contents of a file, one for each reasoning parser. Run by the peer's own Python."""

import asyncio
import sys

from tokenizers import Tokenizer

from dynamo.llm import ModelInput, ModelRuntimeConfig, ModelType, WorkerType, register_model
from dynamo.runtime import DistributedRuntime

MODEL, TEXT, *NAMES = sys.argv[1:]
TOKENIZER = Tokenizer.from_file(f"{MODEL}/tokenizer.json")


def reported():
    with open(TEXT, encoding="utf-8") as file:
        return TOKENIZER.encode(file.read(), add_special_tokens=False).ids


async def generate(request, context):
    yield {
        "token_ids": reported(),
        "index": 0,
    }  # In one piece: 1.6.1 does not recognize a marker whose "<" arrived alone.
    yield {"token_ids": [], "index": 0, "finish_reason": "stop"}


async def main():
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    serving = []
    for name in NAMES:
        endpoint = runtime.endpoint(f"thoughts.{name}.generate")
        config = ModelRuntimeConfig()
        config.reasoning_parser = name
        serving.append(asyncio.ensure_future(endpoint.serve_endpoint(generate)))
        await register_model(
            ModelInput.Tokens,
            ModelType.Chat,
            endpoint,
            MODEL,
            name,
            worker_type=WorkerType.Aggregated,
            runtime_config=config,
        )
    await asyncio.gather(*serving)


asyncio.run(main())
