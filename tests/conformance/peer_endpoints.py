"""A worker of every kind that records its requests and returns the contents of a file.

Run by the Python of either implementation: `peer_endpoints.py MODEL_DIR RECORDS ANSWERS`.
"""

import asyncio
import json
import os
import sys

from dynamo.llm import ModelInput, ModelRuntimeConfig, ModelType, WorkerType, register_model
from dynamo.runtime import DistributedRuntime

MODEL, RECORDS, ANSWERS = sys.argv[1:]
TEXT, TOKENS = ModelInput.Text, ModelInput.Tokens
MODELS = {
    "tokens": (TOKENS, ModelType.Embedding),
    "texts": (TEXT, ModelType.Embedding),
    "classes": (TEXT, ModelType.Classify | ModelType.Pooling),
    "ranks": (TEXT, ModelType.Rerank),
    "images": (TEXT, ModelType.Images),
    "sounds": (TEXT, ModelType.Audios),
    "films": (TEXT, ModelType.Videos),
    "native": (TOKENS, ModelType.Chat | ModelType.Completions),
}


def answers_to(request):
    with open(RECORDS, "a", encoding="utf-8") as file:
        file.write(json.dumps(request) + "\n")
    with open(ANSWERS, encoding="utf-8") as file:
        return json.load(file)


async def generate(request, context):
    for answer in answers_to(request):
        if answer == "fail":
            raise ValueError("it broke")
        yield answer


async def talk(events, context):
    async for event in events:
        for answer in answers_to(event):
            yield answer


async def main():
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", os.environ.get("DYN_REQUEST_PLANE", "tcp"))
    serving = []
    for name, (kind, surface) in MODELS.items():
        endpoint = runtime.endpoint(f"endpoints.{name}.generate")
        config = ModelRuntimeConfig()
        if name == "native":
            config.set_engine_specific("sglang_generate", "true")
            config.set_engine_specific("vllm_inference_v1_generate", "true")
        await register_model(
            kind, surface, endpoint, MODEL, name, worker_type=WorkerType.Aggregated, runtime_config=config
        )
        serving.append(endpoint.serve_endpoint(generate))
    endpoint = runtime.endpoint("endpoints.talk.generate")
    await register_model(TEXT, ModelType.Realtime, endpoint, MODEL, "talk", worker_type=WorkerType.Aggregated)
    serving.append(endpoint.serve_bidirectional_endpoint(talk))
    print("serving", flush=True)
    await asyncio.gather(*serving)


asyncio.run(main())
