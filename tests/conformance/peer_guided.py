"""A worker of the released peer under several names, which records the guided decoding options of its requests.

Run by the peer's own Python: `peer_guided.py MODEL_DIR RECORDS NAME:TOOL_CALL_PARSER:REASONING_PARSER:TAG …`, where TAG
is what `set_structural_tag` is given, as JSON; each part may be empty.
"""

import asyncio
import json
import sys

from dynamo.llm import ModelInput, ModelRuntimeConfig, ModelType, WorkerType, register_model
from dynamo.runtime import DistributedRuntime

MODEL, RECORDS, *NAMES = sys.argv[1:]


def write_down(record):
    with open(RECORDS, "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


async def generate(request, context):
    record = {
        "guided_decoding": request["sampling_options"].get("guided_decoding"),
        "require_reasoning": request.get("require_reasoning"),
    }
    write_down(record)
    yield {"token_ids": [1], "index": 0, "finish_reason": "stop"}


async def main():
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    serving = []
    for name in NAMES:
        model, calls, thoughts, tag = name.split(":", 3)
        endpoint = runtime.endpoint(f"guided.{model}.generate")
        config = ModelRuntimeConfig()
        if calls:
            config.tool_call_parser = calls
        if thoughts:
            config.reasoning_parser = thoughts
        if tag:
            config.set_structural_tag(json.loads(tag))
        serving.append(asyncio.ensure_future(endpoint.serve_endpoint(generate)))
        await register_model(
            ModelInput.Tokens,
            ModelType.Chat | ModelType.Completions,
            endpoint,
            MODEL,
            model,
            worker_type=WorkerType.Aggregated,
            runtime_config=config,
        )
    await asyncio.gather(*serving)


asyncio.run(main())
