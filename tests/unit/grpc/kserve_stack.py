"""Frontend's KServe API, and workers of text and of tensors in the same process, without sockets."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from dynamo.core.metrics import MetricsRegistry
from dynamo.grpc.messages import CLASSES
from dynamo.grpc.service import KserveService
from dynamo.grpc.tensor_responses import Serialized
from dynamo.http.server.gate import Gate
from dynamo.llm.local_engines import LocalEngines, PythonAsyncEngine
from dynamo.model_card.types import ModelType
from dynamo.serving.metrics import FrontendMetrics
from dynamo.serving.models import Models
from dynamo.serving.pipeline import Pipeline

TENSOR_CONFIG = {"name": "echo", "inputs": [{"name": "a", "data_type": "Int32", "shape": [-1]}], "outputs": []}


class Engines:
    """The behaviour of the workers, and the requests they received."""

    def __init__(self) -> None:
        self.received_requests: list[Any] = []
        self.held = asyncio.Event()
        self.left = asyncio.Event()

    async def text(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Return the prompt word by word, in each choice."""
        self.received_requests.append(request)
        words = request["prompt"].split()
        for word in words:
            if word == "fail":
                raise RuntimeError("a secret of the engine")
            if word == "hold":
                await self.hold(context)
            yield chunk(*[(index, word, None) for index in range(request.get("n") or 1)])
        yield chunk(*[(index, "", "stop") for index in range(request.get("n") or 1)])

    async def tensors(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Echoes the tensors, as often as configured."""
        self.received_requests.append(request)
        parameters = request.get("parameters") or {}
        if "fail" in parameters:
            raise ValueError("bad tensors")
        if "hold" in parameters:
            await self.hold(context)
        for place in range((parameters.get("count") or {"int64": 1})["int64"]):
            yield {"model": "echo", "tensors": request["tensors"], "parameters": {"place": {"int64": place}}}
        if "break" in parameters:
            yield {"tensors": 1}

    async def hold(self, context: Any) -> None:
        self.held.set()
        await context.async_killed_or_stopped()
        self.left.set()


def chunk(*choices: tuple[int, str, str | None]) -> dict[str, Any]:
    shown = [{"index": index, "text": text, "finish_reason": reason} for index, text, reason in choices]
    return {"id": "c", "object": "text_completion", "created": 1, "model": "say", "choices": shown}


class KserveStack:
    """One of each."""

    def __init__(self, models: Models, pipeline: Pipeline, engines: Engines, gate: Gate | None) -> None:
        self.models = models
        self.pipeline = pipeline
        self.engines = engines
        self.service = KserveService(pipeline, models, gate=gate)

    async def infer(self, message: Any, headers: Any = ()) -> Any:
        return read(await self.service.model_infer(message, headers), "ModelInferResponse")

    async def stream(self, *messages: Any, headers: Any = ()) -> list[Any]:
        async def given() -> AsyncIterator[Any]:
            for message in messages:
                yield message

        answers = self.service.model_stream_infer(given(), headers)
        return [read(answer, "ModelStreamInferResponse") async for answer in answers]


def read(answer: Any, kind: str) -> Any:
    """Return a response as a message of the kind."""
    return CLASSES[kind].FromString(answer.data) if isinstance(answer, Serialized) else answer


@asynccontextmanager
async def open_kserve_stack(gate: Callable[[MetricsRegistry], Gate] | None = None) -> AsyncIterator[KserveStack]:
    engines = Engines()
    local = LocalEngines(ModelType.Completions, ModelType.TensorBased, ModelType.Chat)
    loop = asyncio.get_running_loop()
    local.add(ModelType.Completions, "say", PythonAsyncEngine(engines.text, loop))
    local.add(ModelType.Chat, "talk", PythonAsyncEngine(engines.text, loop))
    tensors = PythonAsyncEngine(engines.tensors, loop)
    local.add(ModelType.TensorBased, "echo", tensors, tensor_model_config=TENSOR_CONFIG)
    async with local.serving() as runtime:
        metrics = FrontendMetrics(MetricsRegistry())
        models = Models(runtime, metrics, router_mode="round-robin")
        pipeline = Pipeline(models, metrics)
        models.start()
        await models.wait_synced(30.0)
        try:
            yield KserveStack(models, pipeline, engines, None if gate is None else gate(metrics.registry))
        finally:
            await pipeline.drain(0.0)
            await models.close()


def text_request(text: str, *, streaming: bool = False, model: str = "say", id: str = "7", **numbers: int) -> Any:
    message = CLASSES["ModelInferRequest"](model_name=model, id=id)
    message.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(text.encode())
    if streaming:
        message.inputs.add(name="streaming", datatype="BOOL", shape=[1]).contents.bool_contents.append(True)
    return with_numbers(message, numbers)


def tensor_request(*values: int, raw: bool = False, model: str = "echo", id: str = "t", **numbers: int) -> Any:
    message = CLASSES["ModelInferRequest"](model_name=model, id=id)
    tensor = message.inputs.add(name="a", datatype="INT32", shape=[len(values)])
    if raw:
        message.raw_input_contents.append(b"".join(value.to_bytes(4, "little") for value in values))
    else:
        tensor.contents.int_contents.extend(values)
    return with_numbers(message, numbers)


def with_numbers(message: Any, numbers: dict[str, int]) -> Any:
    for name, value in numbers.items():
        message.parameters[name].int64_param = value
    return message


def output_texts(answer: Any) -> dict[str, list[str]]:
    """Return the texts of a response's outputs."""
    return {one.name: [text.decode() for text in one.contents.bytes_contents] for one in answer.outputs}
