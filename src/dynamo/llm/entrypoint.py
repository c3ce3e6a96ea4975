"""Entrypoint: upstream's `make_engine` and `run_input`, which connect an input to an engine and run until stopped.

Inputs: `http`, a frontend; `grpc`, a KServe frontend; `text`, a conversation in the terminal; `dyn://ns.comp.ep` (or
the bare path), a worker at that endpoint. Engines: `Dynamic`, the discovered models, for all inputs but the last;
`Echo`, which answers with the prompt, and `Mocker`, a simulated engine, for all inputs.
"""

import asyncio
import contextlib
import dataclasses
import enum
import importlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from dynamo.core.boundaries import AsyncRollback
from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.http.embedded import FrontendOptions, ServedFrontend, run_frontend
from dynamo.http.extensions import FrontendRoute
from dynamo.http.routes.groups import metrics_group
from dynamo.http.server.service import tls_context
from dynamo.http.terminal_chat import converse, wait_for_model
from dynamo.llm.register import register_model, unregister_model
from dynamo.model_card.runtime_config import ModelRuntimeConfig
from dynamo.model_card.types import ModelInput, ModelType
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.streams import GeneratorHandler
from dynamo.serving.migration import MigrationPolicy

HTTP_PORT = 8080
GRPC_PORT = 8787
OWN_ENDPOINT = "dynamo.backend.generate"  # Endpoint of a frontend's own engine.


class EngineType(enum.Enum):
    """Kind of engine."""

    Echo = "echo"
    Dynamic = "dynamic"
    Mocker = "mocker"


@dataclass
class EntrypointArgs:
    """Upstream's settings of an input and an engine. Unsupported settings must keep their default."""

    engine_type: EngineType
    model_path: str | None = None
    model_name: str | None = None
    endpoint_id: str | None = None
    template_file: str | None = None
    router_config: Any = None
    kv_cache_block_size: int | None = None
    http_host: str | None = None
    http_port: int | None = None
    http_metrics_port: int | None = None
    tls_cert_path: str | None = None
    tls_key_path: str | None = None
    extra_engine_args: str | None = None
    mocker_engine_args: Mapping[str, Any] | None = None
    runtime_config: ModelRuntimeConfig | None = None
    namespace: str | None = None
    namespace_prefix: str | None = None
    is_prefill: bool = False
    is_decode: bool = False
    migration_limit: int = 0
    migration_max_seq_len: int | None = None
    chat_engine_factory: Callable[..., Any] | None = None
    ais_perf_config: Any = None
    _: KW_ONLY
    tls_client_ca_cert_path: str | None = None
    metrics_prefix: str | None = None
    enable_anthropic_api: bool | None = None
    strip_anthropic_preamble: bool | None = None
    enable_streaming_tool_dispatch: bool | None = None
    enable_streaming_reasoning_dispatch: bool | None = None
    reasoning_field_name: str | None = None
    tokenizer_backend: str | None = None
    tokenizer_fallback: bool | None = None

    def __post_init__(self) -> None:
        """Raise `InvalidArgument` for unsupported settings."""
        if not isinstance(self.engine_type, EngineType):
            raise InvalidArgument(
                f"engine_type {self.engine_type!r}: expected a member of EngineType", param="engine_type"
            )
        others = () if self.engine_type is EngineType.Mocker else MOCKER_ONLY
        for name in (*NOT_HONOURED, *others):
            if getattr(self, name) not in (None, False):
                raise InvalidArgument(f"EntrypointArgs: {name} is not supported by this release", param=name)


NOT_HONOURED = (
    "router_config", "is_prefill", "is_decode", "chat_engine_factory", "ais_perf_config", "enable_anthropic_api", "strip_anthropic_preamble",
    "enable_streaming_tool_dispatch", "enable_streaming_reasoning_dispatch", "reasoning_field_name", "tokenizer_backend", "tokenizer_fallback",
)  # fmt: skip


MOCKER_ONLY = ("extra_engine_args", "mocker_engine_args")
MOCKER = "dynamo.mocker.entrypoint"
"""Imported on demand: engines are in a layer above this package."""


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """Result of `make_engine`, for `run_input`."""

    args: EntrypointArgs


async def make_engine(distributed_runtime: DistributedRuntime, args: EntrypointArgs) -> EngineSetup:
    """Check the arguments. Raise `ConfigError` for an engine without its model."""
    if args.engine_type is not EngineType.Dynamic and args.model_path is None:
        raise ConfigError(f"model_path: the {args.engine_type.value} engine needs a directory with a tokenizer")
    return EngineSetup(args)


async def run_input(
    distributed_runtime: DistributedRuntime,
    input: str,
    engine_config: EngineSetup,
    frontend_route_extensions: Sequence[FrontendRoute] | None = None,
) -> None:
    """Run until the runtime shuts down. Raise `ConfigError` for an unknown input."""
    if frontend_route_extensions and input != "http":
        raise ConfigError(f"input {input}: frontend_route_extensions are for http")
    args, is_worker = engine_config.args, "." in input
    if not is_worker and input not in {"http", "grpc", "text"}:
        raise ConfigError(f"input {input!r}: expected http, grpc, text or dyn://namespace.component.endpoint")
    if args.http_metrics_port is not None and input != "grpc":
        raise ConfigError(f"http_metrics_port: must not be set for input {input}; it is for grpc")
    if is_worker and args.engine_type is EngineType.Dynamic:
        raise ConfigError(f"input {input}: a worker needs an engine of its own; Dynamic is for http, grpc and text")
    await distributed_runtime.connect()
    async with _serving(distributed_runtime, args, input if is_worker else args.endpoint_id or OWN_ENDPOINT):
        if is_worker:
            await distributed_runtime.wait_closed()
        elif input == "text":
            await _run_text(distributed_runtime, args)
        elif input == "grpc":
            await _run_grpc(distributed_runtime, args)
        else:
            await _run_http(distributed_runtime, args, tuple(frontend_route_extensions or ()))


@contextlib.asynccontextmanager
async def _serving(runtime: DistributedRuntime, args: EntrypointArgs, path: str) -> AsyncIterator[None]:
    """Serve this process's engine, if it has one, within the context."""
    if args.engine_type is EngineType.Mocker:
        mocker = await importlib.import_module(MOCKER).serve(runtime, args, path)
        try:
            yield
        finally:
            await mocker.stop()
        return
    if args.engine_type is EngineType.Echo:
        await _serve_echo(runtime, args, path)
    yield


@contextlib.contextmanager
def _ending(runtime: DistributedRuntime) -> Iterator[asyncio.Event]:
    """Yield an event that is set when the runtime has shut down."""
    ending = asyncio.Event()
    closing = asyncio.ensure_future(runtime.wait_closed())
    closing.add_done_callback(lambda _: ending.set())
    try:
        yield ending
    finally:
        closing.cancel()


async def _run_text(runtime: DistributedRuntime, args: EntrypointArgs) -> None:
    """Chat in the terminal over HTTP on loopback, until the input ends or the runtime shuts down."""
    options = dataclasses.replace(_frontend_options(args), host="127.0.0.1", port=0, tls=None)
    frontend = ServedFrontend(runtime, options, runtime.metrics)
    with _ending(runtime) as ending:
        url = f"http://127.0.0.1:{await frontend.start()}"
        chat = asyncio.ensure_future(_chat(url, args.model_name))
        ended = asyncio.ensure_future(ending.wait())
        try:
            await asyncio.wait({chat, ended}, return_when=asyncio.FIRST_COMPLETED)
            if chat.done():
                chat.result()
        finally:
            chat.cancel()
            ended.cancel()
            await asyncio.wait({chat, ended})
            await frontend.stop()


async def _chat(url: str, wanted: str | None) -> None:
    model = await wait_for_model(url, wanted)
    await converse(url, model, f"{model}> ")


async def _run_http(runtime: DistributedRuntime, args: EntrypointArgs, extensions: Sequence[FrontendRoute]) -> None:
    options = dataclasses.replace(_frontend_options(args), extensions=extensions)
    with _ending(runtime) as ending:
        await run_frontend(ServedFrontend(runtime, options, runtime.metrics), ending)


async def _run_grpc(runtime: DistributedRuntime, args: EntrypointArgs) -> None:
    from dynamo.grpc.service import KserveOptions, add_kserve  # Requires an optional dependency.

    options = dataclasses.replace(
        _frontend_options(args),
        port=args.http_metrics_port,
        port_option="http_metrics_port",
        groups=(metrics_group,),
    )
    grpc_options = KserveOptions(
        host=options.host,
        port=GRPC_PORT if args.http_port is None else args.http_port,
        certificate=args.tls_cert_path,
        key=args.tls_key_path,
        client_ca=args.tls_client_ca_cert_path,
    )
    frontend = ServedFrontend(runtime, options, runtime.metrics)
    add_kserve(frontend, grpc_options)
    with _ending(runtime) as ending:
        await run_frontend(frontend, ending)


def _frontend_options(args: EntrypointArgs) -> FrontendOptions:
    return FrontendOptions(
        host=args.http_host or "0.0.0.0",  # noqa: S104 - upstream's default
        port=HTTP_PORT if args.http_port is None else args.http_port,
        tls=tls_context(args.tls_cert_path, args.tls_key_path, args.tls_client_ca_cert_path),
        namespace=args.namespace,
        namespace_prefix=args.namespace_prefix,
        metrics_prefix=args.metrics_prefix or "dynamo_frontend",
        migration=MigrationPolicy(args.migration_limit, args.migration_max_seq_len),
    )


async def _serve_echo(runtime: DistributedRuntime, args: EntrypointArgs, path: str) -> None:
    """Serve a registered worker that answers with the prompt."""
    assert args.model_path is not None, "make_engine checks model_path"
    endpoint = runtime.endpoint(path)
    await endpoint.serve(GeneratorHandler(echo, runtime.tasks))
    async with AsyncRollback(lambda: unregister_model(endpoint)):
        await register_model(
            ModelInput.Tokens,
            ModelType.Chat | ModelType.Completions,
            endpoint,
            args.model_path,
            args.model_name,
            kv_cache_block_size=args.kv_cache_block_size,
            runtime_config=args.runtime_config,
            custom_template_path=args.template_file,
            ignore_weights=True,
        )


async def echo(request: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Yield the prompt's tokens, one by one, within the request's budget."""
    tokens = request["token_ids"][: (request.get("stop_conditions") or {}).get("max_tokens")]
    for token in tokens:
        yield {"token_ids": [token], "index": 0}
    yield {"token_ids": [], "index": 0, "finish_reason": "length" if tokens else "stop"}
