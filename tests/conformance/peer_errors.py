"""A worker of a model `errors` that raises the requested error. Runs under our Python and under a released peer's."""

import asyncio

from dynamo.llm import (
    HttpError,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    RouterConfig,
    RouterMode,
    WorkerType,
    exceptions,
    register_model,
)
from dynamo.runtime import DistributedRuntime, dynamo_worker

BUILT_IN = (
    ValueError, TypeError, KeyError, RuntimeError, NotImplementedError, MemoryError, OSError, ConnectionError,
    ConnectionResetError, TimeoutError, asyncio.CancelledError,
)  # fmt: skip
KINDS = {kind.__name__: kind for kind in BUILT_IN}


def error_of(words):
    """Return the exception that `ValueError`, `InvalidArgument` or `HttpError 429` names."""
    name, _, code = words.partition(" ")
    if name == "HttpError":
        return HttpError(int(code), "chosen")
    return (KINDS.get(name) or getattr(exceptions, name))("secret")


async def generate(request, context):
    """Raise the error that the last message names; after a first chunk if the message begins with `late`."""
    words = request["messages"][-1]["content"]
    if words.startswith("late "):
        delta = {"role": "assistant", "content": "so far "}
        choice = {"index": 0, "delta": delta, "finish_reason": None}
        yield {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "errors", "choices": [choice]}
    raise error_of(words.removeprefix("late "))


@dynamo_worker()
async def main(runtime: DistributedRuntime):
    """Register and serve the worker."""
    endpoint = runtime.endpoint("examples.errors.generate")
    config = ModelRuntimeConfig()
    config.max_num_seqs = 8
    config.taints = {"spare"}
    config.set_engine_specific("limits", '{"combined": 5}')
    await register_model(
        ModelInput.Text,
        ModelType.Chat,
        endpoint,
        "errors",
        worker_type=WorkerType.Aggregated,
        skip_model_assets=True,
        runtime_config=config,
        router_config=RouterConfig(RouterMode.Random, active_decode_blocks_threshold=0.9),
        user_data={"made": "by a test"},
    )
    print("serving", flush=True)
    await endpoint.serve_endpoint(generate)


asyncio.run(main())
