"""A prefill or a decode worker that writes down every request it gets.

Run by the Python of either implementation: `peer_disagg_worker.py MODEL_DIR NAME RECORDS prefill|decode [BOOTSTRAP_PORT]`.
A prefill worker returns one token and its id; `prefill_ends:REASON` among a request's annotations is how it ends
it, `prefill_fails:CLASS` is what it raises instead, and `prefill_hangs:SECONDS` has it wait until it is stopped, which it
writes down as well. A decode worker answers three tokens.
"""

import asyncio
import base64
import json
import os
import sys

from dynamo.llm import ModelInput, ModelRuntimeConfig, ModelType, WorkerType, exceptions, register_model
from dynamo.runtime import DistributedRuntime

MODEL, NAME, RECORDS, ROLE, *BOOTSTRAP = sys.argv[1:]
POLL_S = 0.01
PREFILL_TOKEN, DECODE_TOKENS = 1000, (1001, 1002, 1003)


def plain(value):
    return {"base64": base64.b64encode(value).decode()} if isinstance(value, bytes) else str(value)


def record(request, context, **more):
    with open(RECORDS, "a", encoding="utf-8") as file:
        file.write(json.dumps({"role": ROLE, "id": context.id(), "request": request, **more}, default=plain) + "\n")


def note_of(request, name):
    for note in request.get("annotations") or ():
        if note.startswith(name + ":"):
            return note.partition(":")[2]
    return None


async def prefill(request, context):
    record(request, context)
    failure = note_of(request, "prefill_fails")
    if failure is not None:
        raise getattr(exceptions, failure)("as it was told")
    hangs_s = note_of(request, "prefill_hangs")
    if hangs_s is not None:
        for _ in range(int(float(hangs_s) / POLL_S)):
            if context.is_stopped():
                record(request, context, stopped=True)
                return
            await asyncio.sleep(POLL_S)
        record(request, context, stopped=False)
    count = len(request["token_ids"])
    reason = note_of(request, "prefill_ends")
    yield {
        "token_ids": [PREFILL_TOKEN],
        "index": 0,
        "finish_reason": None if reason == "none" else reason or "length",
        "disaggregated_params": {"blocks": [1, 2], "from": "prefill"},
        "completion_usage": {
            "prompt_tokens": count,
            "completion_tokens": 1,
            "total_tokens": count + 1,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
        "engine_data": {"kv_cache_hit": 2},
    }


async def decode(request, context):
    record(request, context)
    while note_of(request, "prefill_hangs") is not None and not context.is_stopped():  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)
    count = len(request["token_ids"])
    for place, token_id in enumerate(DECODE_TOKENS):
        piece = {"token_ids": [token_id], "index": 0}
        if place == len(DECODE_TOKENS) - 1:
            piece["finish_reason"] = "length"
            piece["completion_usage"] = {
                "prompt_tokens": count,
                "completion_tokens": len(DECODE_TOKENS),
                "total_tokens": count + len(DECODE_TOKENS),
            }
        yield piece


async def main():
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", os.environ.get("DYN_REQUEST_PLANE", "tcp"))
    is_prefill = ROLE == "prefill"
    endpoint = runtime.endpoint(f"capture.{'prefill' if is_prefill else 'backend'}.generate")
    config = ModelRuntimeConfig()
    config.enable_local_indexer = False
    config.total_kv_blocks, config.max_num_batched_tokens = 1000, 8192
    if BOOTSTRAP:
        config.set_disaggregated_endpoint(bootstrap_host="127.0.0.1", bootstrap_port=int(BOOTSTRAP[0]))
    await register_model(
        ModelInput.Tokens,
        ModelType.Empty if is_prefill else ModelType.Chat | ModelType.Completions,
        endpoint,
        MODEL,
        NAME,
        worker_type=WorkerType.Prefill if is_prefill else WorkerType.Decode,
        needs=[[WorkerType.Decode]] if is_prefill else [[WorkerType.Prefill]],
        kv_cache_block_size=16,
        runtime_config=config,
    )
    print("serving", flush=True)
    await endpoint.serve_endpoint(prefill if is_prefill else decode)


asyncio.run(main())
