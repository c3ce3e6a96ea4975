"""Unary: server and client of token endpoints that answer with a single message."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo.core.errors import InvalidArgument, Unknown
from dynamo.llm.register import register_model
from dynamo.model_card.types import ModelInput, ModelType, WorkerType
from dynamo.runtime.context import Context
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.unary import RoundRobinClient, serve_unary_endpoint


@dataclass(frozen=True)
class UnaryChatModel:
    """A chat model whose handler returns its whole answer at once, served at `<service_name>.app.generate`."""

    model_path: str
    service_name: str
    public_model_name: str | None = None
    """Name that clients use; the service's name by default."""
    chat_template: Path | None = None

    async def serve(self, runtime: DistributedRuntime, handler: Callable[..., Awaitable[Any]]) -> None:
        """Register the model and serve `async handler(request, *, context)`; return after the shutdown."""
        endpoint = runtime.endpoint(f"{self.service_name}.app.generate")
        await register_model(
            ModelInput.Tokens,
            ModelType.Chat,
            endpoint,
            self.model_path,
            self.public_model_name or self.service_name,
            worker_type=WorkerType.Aggregated,
            custom_template_path=None if self.chat_template is None else str(self.chat_template),
            ignore_weights=True,
        )
        await serve_unary_endpoint(endpoint, handler)


class LLMUnaryClient:
    """Client of a token endpoint that waits for the whole answer, a single choice."""

    def __init__(self, client: RoundRobinClient) -> None:
        self._client = client

    @classmethod
    async def connect(cls, runtime: DistributedRuntime, endpoint_name: str) -> "LLMUnaryClient":
        """Return a client of that endpoint, once an instance serves it."""
        client = await runtime.endpoint(endpoint_name).client()
        await client.wait_for_instances()
        return cls(client)

    async def complete(self, request: Mapping[str, Any], *, context: Context | None = None) -> dict[str, Any]:
        """Return the last output, with the token ids of all outputs.

        Raise `InvalidArgument` for several choices or logprobs, `Unknown` for a stream that is not a single choice.
        """
        check_request(request)
        outputs = await self._client.round_robin(request, annotated=False, context=context)
        try:
            return await joined(outputs)
        finally:
            close = getattr(outputs, "aclose", None)
            if close is not None:
                await close()


def check_request(request: Mapping[str, Any]) -> None:
    """Raise `InvalidArgument` for a request that cannot be answered in a single message."""
    sampling = _mapping(request.get("sampling_options") or {}, "sampling_options")
    output = _mapping(request.get("output_options") or {}, "output_options")
    if sampling.get("n") not in (None, 1):
        raise InvalidArgument(f"sampling_options.n {sampling['n']}: expected 1", param="n")
    for name in ("logprobs", "prompt_logprobs"):
        if output.get(name) is not None:
            raise InvalidArgument(f"output_options.{name}: logprobs are not supported in unary responses", param=name)


async def joined(outputs: AsyncIterator[Any]) -> dict[str, Any]:
    """Return the last output of a choice, with the token ids of all outputs. Raise `Unknown`."""
    token_ids: list[int] = []
    last: dict[str, Any] | None = None
    async for output in outputs:
        if last is not None:
            raise Unknown("the endpoint sent more after its finish reason")
        if not isinstance(output, Mapping) or not isinstance(output.get("token_ids"), list):
            raise Unknown(f"the endpoint sent {output!r}: expected an output with token_ids")
        if output.get("index") not in (None, 0):
            raise Unknown(f"the endpoint sent choice {output['index']}: expected 0")
        token_ids += output["token_ids"]
        if output.get("finish_reason") is not None:
            last = dict(output)
    if last is None:
        raise Unknown("the endpoint ended its stream without a finish reason")
    return {**last, "token_ids": token_ids}


def with_engine_data(completion: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of an output with `values` added to `engine_data`. Raise `InvalidArgument` for an existing key."""
    before = _mapping(completion.get("engine_data") or {}, "engine_data")
    twice = sorted(before.keys() & _mapping(values, "values").keys())
    if twice:
        raise InvalidArgument(f"engine_data already has {', '.join(twice)}")
    return {**completion, "engine_data": {**before, **values}} if values else dict(completion)


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidArgument(f"{name} {value!r}: expected an object", param=name)
    return value
