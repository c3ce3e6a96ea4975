"""Worker process without a model: `double` returns whole numbers multiplied by two, `shout` a prompt in capitals."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from dynamo.llm import ModelInput, ModelType, WorkerType, register_model
from dynamo.runtime import DistributedRuntime, dynamo_worker

CONFIG = {
    "name": "double",
    "inputs": [{"name": "numbers", "data_type": "Int32", "shape": [-1]}],
    "outputs": [{"name": "numbers", "data_type": "Int32", "shape": [-1]}],
}


async def double(request: Any, context: Any) -> AsyncIterator[Any]:
    """Repeat as the parameter `times` requires; `hold` waits until the request is cancelled."""
    parameters = request.get("parameters") or {}
    if "hold" in parameters:
        print("held", flush=True)
        await context.async_killed_or_stopped()
        print("left", flush=True)
        return
    for tensor in request["tensors"]:
        tensor["data"]["values"] = [2 * value for value in tensor["data"]["values"]]
    for _ in range(parameters.get("times", {"int64": 1})["int64"]):
        yield {"model": request["model"], "tensors": request["tensors"]}


async def shout(request: Any, context: Any) -> AsyncIterator[Any]:
    """Return the prompt in capitals, word by word."""
    for word in request["prompt"].upper().split():
        yield completion(word, None)
    yield completion("", "stop")


def completion(text: str, finish_reason: str | None) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "finish_reason": finish_reason, "logprobs": None}
    return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "shout", "choices": [choice]}


@dynamo_worker()
async def main(runtime: DistributedRuntime) -> None:
    endpoint = runtime.endpoint("tensors.backend.generate")
    await register_model(
        ModelInput.Tensor,
        ModelType.TensorBased,
        endpoint,
        "double",
        worker_type=WorkerType.Aggregated,
        tensor_model_config=CONFIG,
    )
    texts = runtime.endpoint("texts.backend.generate")
    await register_model(
        ModelInput.Text,
        ModelType.Completions,
        texts,
        "shout",
        worker_type=WorkerType.Aggregated,
        skip_model_assets=True,
    )
    await asyncio.gather(endpoint.serve_endpoint(double), texts.serve_endpoint(shout))


if __name__ == "__main__":
    asyncio.run(main())
