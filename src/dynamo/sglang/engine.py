"""SglangEngine: SGLang's `Engine` behind a worker.

    submit ──▶ convert ──▶ Engine.async_generate ──chunks──▶ convert ──▶ tokens to the reply
                              │ its own processes
    KV events over ZMQ ◀──────┤      load in shared memory ──▶ periodic poll ──▶ load
    steps over ZMQ     ◀──────┘      SIGQUIT, or a process that ended ──▶ host.fail

A request is a task here. A cancelled request is aborted in SGLang by its id; its task continues until SGLang ends it.
"""

import asyncio
import contextlib
import logging
import os
import signal
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from dynamo.backend.adapters import LoadedAdapters
from dynamo.backend.config import own_address
from dynamo.backend.disagg import DisaggregationMode, bootstrap_of, prefill_output, prefill_request
from dynamo.backend.engine import EngineConfig, EngineHost
from dynamo.backend.health import watch
from dynamo.backend.listeners import PassListener
from dynamo.backend.media import media_items
from dynamo.backend.request_fields import media_of, refusal_of
from dynamo.backend.requests import STOP_S, EngineLiveness, Requests
from dynamo.core.config import environ
from dynamo.core.errors import ConfigError, EngineShutdown, InvalidArgument
from dynamo.core.locked_directory import LockedDirectory
from dynamo.core.tasks import TaskOwner
from dynamo.kv_router.hicache import RUNTIME_KEY
from dynamo.model_card.hub import resolve_model
from dynamo.protocols.engine import EngineOutput, PreprocessedRequest
from dynamo.runtime.request_plane.base import Reply
from dynamo.sglang.config import STORE_EVENTS_VARIABLE, SglangConfig, wants_forward_passes
from dynamo.sglang.controls import SglangControls, read_engine_route
from dynamo.sglang.convert import SglangLimits, SglangOutput, has_media, refuse_media_options, to_arguments
from dynamo.sglang.events import kv_listeners, layout_of, publisher_of
from dynamo.sglang.handshake import SglangBootstrap, decode_bootstrap, prefill_bootstrap
from dynamo.sglang.library import SglangLibrary
from dynamo.sglang.metrics import SglangLoadReporter
from dynamo.text.multimodal.source import Media

logger = logging.getLogger(__name__)

WARM_UP_S = 600.0  # The first prompt compiles kernels, which takes minutes on some models.
WARM_UP_PROMPT = [10, 11, 12, 13]
"""Tokens that every vocabulary has."""
MEDIA = {"image": "image_data", "video": "video_data", "audio": "audio_data"}

GONE = "ZX"
"""States of a process that has ended and that its parent has not reaped."""


class SglangEngine:
    """`dynamo.backend.engine.LLMEngine` over SGLang."""

    def __init__(self, config: SglangConfig, args: Any, library: SglangLibrary) -> None:
        """Set `args`, SGLang's `ServerArgs`."""
        self._config = config
        self._args = args
        self._library = library
        self._role = config.role
        self._liveness = EngineLiveness()
        self._tasks = TaskOwner("sglang", on_crash=lambda _name, error: self._liveness.die(error))
        self._requests = Requests(self._tasks)
        self._ids: dict[Reply, set[str]] = {}
        """SGLang's ids of the choices of each request."""
        self._closing = contextlib.ExitStack()
        self._engine: Any = None
        self._limits: SglangLimits
        self._host: EngineHost
        self._adapters: LoadedAdapters[str]

    async def start(self, host: EngineHost) -> EngineConfig:
        self._host = host
        args, library = self._args, self._library
        path = await asyncio.to_thread(self._resolve)
        publisher = publisher_of(args.kv_events_config)
        self._adjust()
        self._liveness.began(host.fail)
        died = RuntimeError("SGLang reported that one of its processes failed")
        listen = self._closing.enter_context(
            sigquit_handler(asyncio.get_running_loop(), lambda: self._liveness.die(died))
        )
        self._engine = engine = await asyncio.to_thread(self._make)
        manager = engine.tokenizer_manager
        manager.auto_create_handle_loop()
        listen()
        if self._liveness.is_dead:
            raise died
        self._limits = SglangLimits(
            context_length=manager.context_len,
            ranks=args.dp_size,
            has_grammars=not args.skip_tokenizer_init,
            has_priorities=args.enable_priority_scheduling,
            is_low_first=args.schedule_low_priority_values_first,
        )
        if self._role is not DisaggregationMode.AGGREGATED:
            await self._warm_up()
        self._listen(publisher)
        reporter = SglangLoadReporter(manager, host, args.page_size or 1, is_busy=lambda: len(self._requests) > 0)
        self._tasks.start(reporter.run(), "load")
        self._tasks.start(watch(self._look, self._liveness.die), "health")
        if args.enable_metrics:
            host.metrics.add_text(library.render_metrics)
        controls = SglangControls(
            engine,
            library.io_struct,
            host,
            has_training=self._config.enable_rl,
            own=[read_engine_route(text) for text in self._config.engine_routes],
        )
        self._adapters = adapters_of(engine, args)
        return await self._engine_config(path, controls, has_events=publisher is not None)

    async def _engine_config(self, path: str, controls: SglangControls, *, has_events: bool) -> EngineConfig:
        """Return what the worker publishes of the loaded engine."""
        args, manager = self._args, self._engine.tokenizer_manager
        (state, *_) = await manager.get_internal_state()
        tokens = self._engine._scheduler_init_result.scheduler_infos[0]["max_total_num_tokens"]
        block, is_prefill = args.page_size or 1, self._role is DisaggregationMode.PREFILL
        return EngineConfig(
            model_path=path,
            served_model_name=args.served_model_name,
            context_length=self._limits.context_length,
            kv_cache_block_size=block,
            total_kv_blocks=tokens // block,
            max_num_seqs=state.get("effective_max_running_requests_per_dp") or args.max_running_requests or 0,
            max_num_batched_tokens=args.max_prefill_tokens,
            data_parallel_size=args.dp_size,
            publishes_kv_events=has_events and not args.disable_radix_cache,
            runtime_data=self._runtime_data(manager),
            bootstrap_host=own_address() if is_prefill else None,
            bootstrap_port=args.disaggregation_bootstrap_port if is_prefill else None,
            routes=controls.routes(),
            endpoints=controls.endpoints(),
            adapters=self._adapters if args.enable_lora else None,
            health_check_payload=self._canary(args.served_model_name),
        )

    def submit(self, request: PreprocessedRequest, reply: Reply) -> None:
        self._liveness.check()
        logger.debug("New Request ID: %s", reply.request_id)
        if has_media(request) and not self._config.enable_multimodal:
            kinds = ", ".join(request.multi_modal_data or ())
            raise InvalidArgument(
                f"{kinds} parts: this worker was started without --enable-multimodal", param="messages"
            )
        if has_media(request):
            refuse_media_options(request)
        if self._role is DisaggregationMode.PREFILL:
            bootstrap = self._prefill_bootstrap(request)
            request = prefill_request(request)
            arguments = to_arguments(request, self._limits) | bootstrap.fields()
            self._adapters.of(arguments.get("lora_path"))
            self._requests.begin(self._prefill(request, arguments, bootstrap, reply), reply)
            return
        if self._role is DisaggregationMode.DECODE:
            request = one_choice(request)
        arguments = to_arguments(request, self._limits)
        if self._role is DisaggregationMode.DECODE:
            arguments |= self._decode_arguments(request)
        self._adapters.of(arguments.get("lora_path"))
        self._requests.begin(self._answer(request, arguments, reply), reply)

    def cancel(self, reply: Reply) -> None:
        if reply not in self._requests:
            return
        logger.debug("Aborted Request ID: %s", reply.request_id)
        self._requests.drop(reply)
        for name in self._ids.get(reply) or {reply.request_id}:
            self._engine.tokenizer_manager.abort_request(rid=name)

    def is_quiescent(self) -> bool:
        """Return whether all blocks were fetched: SGLang's prefill ends with the fetch."""
        return len(self._requests) == 0

    async def drain(self) -> None:
        await self._requests.drain()

    async def stop(self) -> None:
        self._liveness.stopped()
        await self._tasks.cancel_and_wait(STOP_S)
        engine, self._engine = self._engine, None
        if engine is not None:
            await asyncio.to_thread(engine.shutdown)
        self._closing.close()

    # Start-up.

    def _resolve(self) -> str:
        """Return the model's directory. Without a served name, set the hub id or the directory's name."""
        args = self._args
        given = args.model_path
        path = resolve_model(given)
        if not args.served_model_name or args.served_model_name == given:
            args.served_model_name = os.path.basename(os.path.abspath(path)) if given == path else given
        args.model_path = path
        if args.tokenizer_path in (None, given):
            args.tokenizer_path = path
        return path

    def _adjust(self) -> None:
        """Change SGLang's arguments to the values that this worker requires."""
        args = self._args
        args.incremental_streaming_output = True  # Chunks contain only new tokens.
        if wants_forward_passes(environ()):
            folder = LockedDirectory("dynamo-steps-")
            self._closing.callback(folder.close)
            args.enable_forward_pass_metrics = True
            args.forward_pass_metrics_worker_id = str(self._host.worker_id)
            args.forward_pass_metrics_ipc_name = f"ipc://{folder.path}/rank"

    def _make(self) -> Any:
        """Start SGLang, which loads in its own processes. Run in a thread: the loop must keep the lease alive."""
        try:
            return self._library.Engine(server_args=self._args)
        except ValueError as error:  # Arguments that contradict each other, the model or the machine.
            raise ConfigError(f"SGLang: {' '.join(str(error).split())}") from error

    def _listen(self, publisher: Any) -> None:
        """Subscribe to the events and steps that the engine's processes publish."""
        args = self._args
        if publisher is not None and self._role.publishes_cache:
            is_eagle = self._library.is_eagle(args.speculative_algorithm)
            block = args.page_size or 1
            for listener in kv_listeners(publisher, args.dp_size, block, self._host, is_eagle=is_eagle):
                logger.info("KV events from %s", listener.endpoint)
                self._tasks.start(listener.run(), f"KV events of {listener.endpoint}")
        if wants_forward_passes(environ()):
            for rank in range(args.dp_size):
                endpoint = f"{args.forward_pass_metrics_ipc_name}.{rank}"
                self._tasks.start(PassListener(endpoint, rank, self._host).run(), f"steps of rank {rank}")

    async def _warm_up(self) -> None:
        """Run the first step of a disaggregated engine, without a transfer of blocks."""
        arguments = {
            "input_ids": WARM_UP_PROMPT,
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True},
            "stream": True,
            **SglangBootstrap(self._library.fake_bootstrap_host, self._args.disaggregation_bootstrap_port, 0).fields(),
        }
        try:
            async with asyncio.timeout(WARM_UP_S):
                async for _ in await self._engine.async_generate(**arguments):
                    pass
        except TimeoutError:
            raise ConfigError(f"SGLang did not complete its first prompt within {WARM_UP_S:g} s") from None

    def _runtime_data(self, manager: Any) -> dict[str, Any]:
        args, library = self._args, self._library
        layout = layout_of(
            args,
            is_mla=library.is_mla(manager),
            is_eagle=library.is_eagle(args.speculative_algorithm),
            events_endpoint=environ().get(STORE_EVENTS_VARIABLE) or None,
        )
        return {} if layout is None else {RUNTIME_KEY: layout}

    def _canary(self, model: str) -> dict[str, Any] | None:
        """Return the health check's request: for a disaggregated engine with a fake bootstrap host."""
        if self._role is DisaggregationMode.AGGREGATED:
            return None
        return {
            "model": model,
            "token_ids": [1],
            "stop_conditions": {"max_tokens": 1, "ignore_eos": True},
            "sampling_options": {"temperature": 0.0},
            "bootstrap_info": SglangBootstrap(self._library.fake_bootstrap_host, 0, 0).fields(),
        }

    async def _look(self) -> None:
        """Raise an error if the engine has died."""
        if self._engine.tokenizer_manager.gracefully_exit:
            raise RuntimeError("SGLang is shutting down")
        check_alive(self._engine.get_all_child_pids())

    # Requests.

    def _prefill_bootstrap(self, request: PreprocessedRequest) -> SglangBootstrap:
        return prefill_bootstrap(request, own_address(), self._args.disaggregation_bootstrap_port)

    def _decode_arguments(self, request: PreprocessedRequest) -> dict[str, Any]:
        """Return the decode engine's additional arguments about the prefill."""
        fields = decode_bootstrap(request).fields()
        routing = request.routing
        if routing is not None and routing.prefill_dp_rank is not None:
            fields["disagg_prefill_dp_rank"] = routing.prefill_dp_rank
        return fields

    async def _chunks(self, request: PreprocessedRequest, arguments: dict[str, Any], reply: Reply) -> Any:
        """Yield SGLang's chunks, and record its id of each choice for cancellation."""
        if has_media(request):
            items = await media_items(media_of(request), as_data_url)
            arguments = arguments | {MEDIA[kind]: shown for kind, shown in items.items()}
        if self._requests.is_dropped(reply):
            return
        names = self._ids[reply] = set()
        try:
            async for chunk in await self._engine.async_generate(**arguments, rid=reply.request_id):
                name = chunk["meta_info"]["id"]
                if name not in names:
                    logger.debug("New SGLang Request ID: %s", name)
                    names.add(name)
                    if self._requests.is_dropped(reply):  # Cancelled before the ids were known.
                        self._engine.tokenizer_manager.abort_request(rid=name)
                if not self._requests.is_dropped(reply):
                    yield chunk
        except ValueError as error:  # SGLang raises a plain ValueError for a request that it rejects.
            refusal = refusal_of(error)
            if refusal is None:
                raise
            raise refusal from error
        finally:
            del self._ids[reply]

    async def _answer(self, request: PreprocessedRequest, arguments: dict[str, Any], reply: Reply) -> None:
        """Process one request; tokens of a single choice are written without an item."""
        answer = SglangOutput(request)
        async for chunk in self._chunks(request, arguments, reply):
            piece = answer.take(chunk)
            if piece.finish_reason is None and piece.log_probs is None and piece.index == 0:
                for token in piece.token_ids:
                    reply.token(token)
            else:
                reply.item(piece)
        self._finish(answer, reply)

    async def _prefill(
        self, request: PreprocessedRequest, arguments: dict[str, Any], bootstrap: SglangBootstrap, reply: Reply
    ) -> None:
        """Compute a prompt for a decode worker.

        If the router created the room, the decode request runs concurrently, or follows the room that is sent in advance. Otherwise
        it is sent after this response, which ends at once; SGLang's own response ends when the blocks were fetched.
        """
        answer = SglangOutput(request)
        if bootstrap_of(request) is None:
            reply.item(prefill_output([], bootstrap.fields(), finish_reason="length"))
            reply.finish()
            self._requests.answered(reply)
            async for chunk in await self._engine.async_generate(**arguments, rid=reply.request_id):
                answer.take(chunk)
            return
        reply.item(prefill_output([], bootstrap.fields(), finish_reason=None))
        last: EngineOutput | None = None
        async for chunk in self._chunks(request, arguments, reply):
            last = answer.take(chunk)
        if last is not None and last.finish_reason is not None:
            reply.item(
                prefill_output(last.token_ids, bootstrap.fields(), last.completion_usage, finish_reason="length")
            )
        self._finish(answer, reply)

    def _finish(self, answer: SglangOutput, reply: Reply) -> None:
        if self._requests.is_dropped(reply):
            return
        if answer.unfinished > 0:
            raise EngineShutdown("the engine ended the response early")
        reply.finish()


def one_choice(request: PreprocessedRequest) -> PreprocessedRequest:
    """Return the request with one choice: the blocks of a prompt are transferred once."""
    if (request.sampling_options.n or 1) == 1:
        return request
    sampling = msgspec.structs.replace(request.sampling_options, n=1, best_of=None)
    return msgspec.structs.replace(request, sampling_options=sampling)


async def as_data_url(_kind: str, media: Media) -> str:
    """Return media as a data URL, SGLang's interface for bytes: no host is contacted."""
    content_type = media.content_type or "application/octet-stream"
    return f"data:{content_type};base64,{b64encode(media.data).decode()}"


def adapters_of(engine: Any, args: Any) -> LoadedAdapters[str]:
    """Return the adapter operations. `engine` is SGLang's `Engine`, `args` its `ServerArgs`; adapters are names."""

    async def take(name: str, _number: int, path: str) -> str:
        result = await engine.async_load_lora_adapter(name, path)
        if not result.success:
            raise InvalidArgument(f"{path}: {result.error_message or 'the engine rejected the adapter'}")
        return name

    async def drop(name: str) -> None:
        result = await engine.async_unload_lora_adapter(name)
        if not result.success:
            raise InvalidArgument(f"{name}: {result.error_message or 'the engine did not unload the adapter'}")

    return LoadedAdapters(take, drop, slots=args.max_loras_per_batch if args.enable_lora else None)


def state_of(pid: int, proc: Path = Path("/proc")) -> str | None:
    """Return the state letter of a process; None if it does not exist."""
    try:
        text = (proc / str(pid) / "stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()[0]  # After the name, which may contain any character.


def check_alive(pids: Iterable[int], proc: Path = Path("/proc")) -> None:
    """Raise `RuntimeError` that names the first process that has ended."""
    for pid in pids:
        state = state_of(pid, proc)
        if state is None or state in GONE:
            raise RuntimeError(f"process {pid} of the engine has ended")


@contextlib.contextmanager
def sigquit_handler(loop: asyncio.AbstractEventLoop, on_death: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Handle SIGQUIT, by which SGLang's children report a failure and which would otherwise kill this process.

    Yields a function that installs the handler again, because SGLang's manager replaces it.
    """

    def install() -> None:
        with contextlib.suppress(
            ValueError, RuntimeError, NotImplementedError
        ):  # Only the main thread handles signals.
            loop.add_signal_handler(signal.SIGQUIT, on_death)

    install()
    try:
        yield install
    finally:
        with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
            loop.remove_signal_handler(signal.SIGQUIT)
