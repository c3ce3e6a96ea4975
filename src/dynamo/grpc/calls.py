"""Calls: sends a KServe request to a model's workers and streams the responses."""

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from dynamo.core.codec import msgpack_encode
from dynamo.core.errors import DynamoException, EngineShutdown, InvalidArgument, NotFound, Unknown
from dynamo.core.threads import in_few_threads
from dynamo.grpc.completions import completion_request, response_of
from dynamo.grpc.descriptions import COMPLETIONS, TENSORS, is_tensor
from dynamo.grpc.received import KSERVE_THREADS
from dynamo.grpc.statuses import RequestRefused, shown
from dynamo.grpc.tensor_responses import TensorWriter
from dynamo.grpc.tensors import ResponseForm, TensorRequest, request_of
from dynamo.grpc.turns import CallTurns
from dynamo.http.server.gate import Account
from dynamo.runtime.request_plane.base import Item
from dynamo.runtime.streams import ItemStream
from dynamo.serving.attempts import Attempts, is_retryable
from dynamo.serving.completion_calls import CompletionCall
from dynamo.serving.errors import answer_to
from dynamo.serving.model_lookup import ModelAccess
from dynamo.serving.models import Models
from dynamo.serving.pipeline import Pipeline
from dynamo.serving.request_headers import new_id
from dynamo.serving.request_state import RequestState
from dynamo.serving.served_model import ServedModel

BUILT_HERE_BYTES = 64 << 10
"""Requests of larger messages are built in a thread: a MiB takes tens of milliseconds."""
Headers = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class CallContext:
    """Caller of a request and the kind of call."""

    headers: Headers = ()
    account: Account | None = None
    streams: bool = False
    """Whether there may be several responses."""


class KserveCalls:
    """Requests of one KServe service."""

    def __init__(self, pipeline: Pipeline, models: Models) -> None:
        self._pipeline = pipeline
        self._models = models
        self._writer = TensorWriter()
        self.turns = CallTurns()
        """Turns of the calls with a single response."""

    def close(self) -> None:
        """End the processes that write large responses."""
        self._writer.close()

    def find(self, name: str, access: ModelAccess | None) -> ServedModel:
        """Return the model with that name, for tensors or for text. Raise the errors of `Models.find`."""
        try:
            return self._models.find(name, TENSORS, access)
        except NotFound:
            return self._models.find(name, COMPLETIONS, access)

    async def answers(self, message: Any, context: CallContext) -> AsyncGenerator[Any, None]:
        """Yield every `ModelInferResponse` to a `ModelInferRequest`; those of tensors serialized, and as parts of a stream for one.

        Raise the errors of the request before the first response, and failures of the worker at any time.
        """
        if self._pipeline.is_draining:
            raise EngineShutdown("the frontend is shutting down")
        model = self.find(message.model_name, context.account)
        respond = self._tensors if is_tensor(model.card) else self._text
        is_large = message.ByteSize() > BUILT_HERE_BYTES  # Computed once: it takes as long as writing the message.
        async with aclosing(respond(model, message, context, is_large)) as answers:
            async for answer in answers:
                yield answer

    async def _text(
        self, model: ServedModel, message: Any, context: CallContext, is_large: bool
    ) -> AsyncGenerator[Any, None]:
        request, is_raw = await _built(is_large, completion_request, message), bool(message.raw_input_contents)
        if request.stream and not context.streams:
            raise InvalidArgument(
                "streaming: ModelInfer has a single response; use ModelStreamInfer", param="streaming"
            )
        call = CompletionCall(self._pipeline.handle_call, request, context.headers, context.account)
        async with aclosing(call.completions()) as completions:
            async for completion in completions:
                if not context.streams:
                    await self.turns.next()
                yield response_of(completion, message.id, is_raw=is_raw)
        if call.refusal is not None:
            raise RequestRefused(call.refusal)

    async def _tensors(
        self, model: ServedModel, message: Any, context: CallContext, is_large: bool
    ) -> AsyncGenerator[Any, None]:
        request = await _built(is_large, request_of, message)
        form = ResponseForm(request.id, bool(message.raw_input_contents), context.streams)
        model.admit()
        record = RequestState(
            self._pipeline.metrics,
            "tensor",
            model.name,
            stream=context.streams,
            started_s=time.perf_counter(),
            request_id=new_id(),
        )
        label = "cancelled"
        try:
            async with aclosing(self._send(model, request, record, context, is_large)) as responses:
                async for response in responses:
                    if not context.streams:
                        await self.turns.next()
                    yield await self._writer.write(response, form)
            label = ""
        except DynamoException as error:
            label = answer_to(error).label
            raise shown(error) from error
        except Exception as error:  # The metrics count every kind of error.
            label = answer_to(error).label
            raise
        finally:
            record.close(label, None, time.perf_counter())

    async def _send(
        self, model: ServedModel, request: TensorRequest, record: RequestState, context: CallContext, is_large: bool
    ) -> AsyncGenerator[Item, None]:
        """Yield a worker's responses; before the first one, retry retryable errors on other workers."""
        body, attempts, count = await _built(is_large, msgpack_encode, request), Attempts(), 0
        while True:
            stream = ItemStream()
            try:
                call = await model.send(
                    body,
                    stream,
                    request_id=record.request_id,
                    instance_id=None,
                    headers={},
                    exclude=frozenset(attempts.excluded),
                )
                stream.bind(call, None)
                attempts.exclude(call.instance_id, may_recover=False)
                async for item in stream:
                    if item.data is None:
                        continue  # An event, which is not sent to clients.
                    count += 1
                    if count > 1 and not context.streams:
                        raise Unknown("the worker sent several responses to a request for one")
                    record.tokens(1, time.perf_counter())
                    yield item
                if not count:
                    raise Unknown("the worker ended its stream without a response")
            except DynamoException as error:
                if count or not is_retryable(error) or not attempts.may_send_again:
                    raise
                attempts.count_send()
            else:
                return
            finally:
                await stream.aclose()


async def _built(is_large: bool, build: Callable[..., Any], *values: Any) -> Any:
    """Return the result of `build`, computed in a thread if the request is large."""
    if not is_large:
        return build(*values)
    return await in_few_threads(lambda: build(*values), "kserve", KSERVE_THREADS)
