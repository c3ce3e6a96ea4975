"""Worker that records each request and answers with the text that the request's annotation scripts.

Run by the Python of either implementation: `peer_capture.py MODEL_DIR NAME RECORDS [TOOL_CALL_PARSER
[REASONING_PARSER]]`. An annotation `script:{"texts": [...], ...}` holds one text for each choice.
"""

import asyncio
import json
import os
import sys

from tokenizers import Tokenizer

from dynamo.llm import ModelInput, ModelRuntimeConfig, ModelType, WorkerType, register_model
from dynamo.runtime import DistributedRuntime

MODEL, NAME, RECORDS, *PARSERS = sys.argv[1:]
SCRIPT = "script:"
TOKENIZER = Tokenizer.from_file(os.path.join(MODEL, "tokenizer.json"))


def script_of(request):
    for note in request.get("annotations") or ():
        if note.startswith(SCRIPT):
            return json.loads(note.removeprefix(SCRIPT))
    return {"texts": ["Hello there."]}


def record(request):
    with open(RECORDS, "a", encoding="utf-8") as file:
        file.write(json.dumps(request) + "\n")


async def generate(request, context):
    record(request)
    script = script_of(request)
    prompt, spoken = len(request["token_ids"]), 0
    for index, text in enumerate(script["texts"]):
        ids = TOKENIZER.encode(text, add_special_tokens=False).ids
        for token_id in ids:
            piece = {"token_ids": [token_id], "index": index}
            wanted = (request.get("output_options") or {}).get("logprobs")
            if wanted is not None:
                piece["log_probs"] = [-0.5]
                piece["top_logprobs"] = [
                    [
                        {
                            "rank": rank + 1,
                            "token_id": token_id,
                            "token": TOKENIZER.decode([token_id]),
                            "logprob": -0.5 - rank,
                        }
                        for rank in range(max(wanted, 1))
                    ]
                ]
            yield piece
        spoken += len(ids)
        usage = {"prompt_tokens": prompt, "completion_tokens": spoken, "total_tokens": prompt + spoken}
        if "cached" in script:
            usage["prompt_tokens_details"] = {"cached_tokens": script["cached"]}
        end = {"token_ids": [], "index": index, "finish_reason": script.get("finish_reason", "stop")}
        if "stop_reason" in script:
            end["stop_reason"] = script["stop_reason"]
        yield {**end, "completion_usage": usage}


async def main():
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", os.environ.get("DYN_REQUEST_PLANE", "tcp"))
    endpoint = runtime.endpoint("capture.backend.generate")
    config = ModelRuntimeConfig()
    if PARSERS and PARSERS[0] != "-":
        config.tool_call_parser = PARSERS[0]
    if len(PARSERS) > 1:
        config.reasoning_parser = PARSERS[1]
    for item in PARSERS[2:]:
        key, _, value = item.partition("=")
        config.set_engine_specific(key, json.dumps(value))
    await register_model(
        ModelInput.Tokens,
        ModelType.Chat | ModelType.Completions,
        endpoint,
        MODEL,
        NAME,
        worker_type=WorkerType.Aggregated,
        runtime_config=config,
    )
    print("serving", flush=True)
    await endpoint.serve_endpoint(generate)


asyncio.run(main())
