"""VllmEngine: vLLM's `AsyncLLM` behind a worker.

    submit ──▶ convert ──▶ AsyncLLM.generate ──RequestOutput──▶ convert ──▶ tokens to the reply
                              │ its own process
    KV events over ZMQ ◀──────┘      statistics of each step ──▶ load        health check every two seconds ──▶ host.fail

A request is a task here: `generate` is a generator, and cancelling its task makes vLLM abort the request.
"""

import asyncio
import logging
import os
from collections.abc import Coroutine
from functools import partial
from typing import Any

from dynamo.backend.adapters import LoadedAdapters
from dynamo.backend.disagg import DisaggregationMode, prefill_output, prefill_request, prefill_result_of
from dynamo.backend.engine import EngineConfig, EngineHost
from dynamo.backend.health import watch
from dynamo.backend.listeners import PassListener, kv_listener
from dynamo.backend.media import media_items
from dynamo.backend.request_fields import refusal_of
from dynamo.core.boundaries import ErrorBoundary
from dynamo.core.config import environ
from dynamo.core.errors import ConfigError, DynamoException, EngineShutdown, InvalidArgument, Unknown, WorkerUnavailable
from dynamo.core.tasks import TaskOwner
from dynamo.kv_events.engine_subscriber import EngineListener
from dynamo.model_card.hub import resolve_model
from dynamo.protocols.engine import EngineOutput, PreprocessedRequest
from dynamo.runtime.request_plane.base import Reply
from dynamo.vllm import transfer
from dynamo.vllm.config import SCHEDULER, VllmConfig, forward_pass_port, wants_forward_passes
from dynamo.vllm.controls import VllmControls
from dynamo.vllm.convert import VllmArguments, VllmLimits, VllmOutput, check_embeds, to_vllm
from dynamo.vllm.library import VllmLibrary
from dynamo.vllm.metrics import VllmLoadReporter

logger = logging.getLogger(__name__)

STOP_S = 5.0  # Time for requests to be dropped before the engine's processes are stopped.


class VllmEngine:
    """`dynamo.backend.engine.LLMEngine` over vLLM."""

    def __init__(self, config: VllmConfig, args: Any, library: VllmLibrary) -> None:
        """Set `args`, vLLM's `AsyncEngineArgs`."""
        self._config = config
        self._args = args
        self._library = library
        self._role = config.role
        self._tasks: TaskOwner | None = None
        self._running: dict[Reply, asyncio.Task[None]] = {}
        self._is_quiet = asyncio.Event()
        self._is_quiet.set()
        self._reporters: list[VllmLoadReporter] = []
        self._llm: Any = None
        self._is_dead = False
        self._handshake: transfer.NixlHandshake | None = None
        self._limits: VllmLimits
        self._host: EngineHost
        self._adapters: LoadedAdapters[Any]

    async def start(self, host: EngineHost) -> EngineConfig:
        self._host = host
        self._tasks = TaskOwner("vllm", on_crash=lambda _name, error: self.die(error))
        path = await asyncio.to_thread(self._resolve)
        loop = asyncio.get_running_loop()
        self._llm = await asyncio.to_thread(self._make, loop)
        settings = self._llm.vllm_config
        self._handshake = transfer.handshake_of(settings.kv_transfer_config, self._role, environ().get)
        self._limits = limits_of(settings)
        blocks = (settings.cache_config.num_gpu_blocks or 0) // self._limits.ranks
        for reporter in self._reporters:
            reporter.blocks = blocks
        self._adapters = adapters_of(self._llm, self._library.LoRARequest, settings.lora_config)
        self._listen(settings)
        self._tasks.start(watch(self._llm.check_health, self.die), "health")
        host.metrics.add_text(self._library.render_metrics)
        names = list(self._args.served_model_name)
        controls = VllmControls(self._llm, host, has_training=self._config.enable_rl)
        config = EngineConfig(
            model_path=path,
            served_model_name=names[0],
            model_aliases=names[1:],
            context_length=self._limits.context_length,
            kv_cache_block_size=settings.cache_config.block_size,
            total_kv_blocks=blocks,
            max_num_seqs=settings.scheduler_config.max_num_seqs,
            max_num_batched_tokens=settings.scheduler_config.max_num_batched_tokens,
            data_parallel_size=self._limits.ranks,
            data_parallel_start_rank=self._limits.first_rank,
            publishes_kv_events=publishes(settings),
            routes=controls.routes(),
            endpoints=controls.endpoints(),
            takes_prompt_embeds=settings.model_config.enable_prompt_embeds,
            adapters=None if settings.lora_config is None else self._adapters,
        )
        return self.describe(config)

    def adjust(self, args: Any) -> None:
        """Change vLLM's arguments to the values that this worker requires."""
        if wants_forward_passes(environ()) and not args.scheduler_cls:
            args.scheduler_cls = SCHEDULER

    def describe(self, config: EngineConfig) -> EngineConfig:
        """Adapt the configuration for an engine with an output other than tokens."""
        return config

    @property
    def is_running(self) -> bool:
        """Return whether the engine accepts requests."""
        return self._llm is not None and not self._is_dead and self._tasks is not None

    def submit(self, request: PreprocessedRequest, reply: Reply) -> None:
        if not self.is_running:
            raise EngineShutdown("the engine is not running")
        arguments, params = self._arguments(request)
        lora = self._adapters.of(arguments.lora_name)
        logger.debug("%s Request ID: %s", "Prefill" if self._is_prefill else "Decode", reply.request_id)
        self.begin(self._answer(request, arguments, params, lora, reply), reply)

    def begin(self, work: Coroutine[Any, Any, None], reply: Reply) -> None:
        """Start the task of a request."""
        assert self._tasks is not None, "the engine is running"
        task = self._tasks.start(work, f"request {reply.request_id}")
        self._running[reply] = task
        self._is_quiet.clear()
        task.add_done_callback(lambda _task: self._ended(reply))

    def cancel(self, reply: Reply) -> None:
        task = self._running.get(reply)
        if task is None:
            return
        # vLLM frees the blocks of an aborted prefill at once: it promises them to a decode worker only at its end.
        logger.debug("Aborted %sRequest ID: %s", "Prefill " if self._is_prefill else "", reply.request_id)
        task.cancel()

    async def drain(self) -> None:
        await self._is_quiet.wait()

    async def stop(self) -> None:
        tasks, self._tasks = self._tasks, None
        if tasks is not None:
            await tasks.cancel_and_wait(STOP_S)
        for reporter in self._reporters:
            reporter.close()
        llm, self._llm = self._llm, None
        if llm is not None:
            await asyncio.to_thread(llm.shutdown)

    # Start-up.

    def _resolve(self) -> str:
        """Return the model's directory. Without a served name, set the hub id or the directory's name."""
        args = self._args
        path = resolve_model(args.model)
        names = args.served_model_name or [
            os.path.basename(os.path.abspath(path)) if args.model == path else args.model
        ]
        args.served_model_name = [names] if isinstance(names, str) else list(names)
        args.model = path
        return path

    def _make(self, loop: asyncio.AbstractEventLoop) -> Any:
        """Start vLLM, which loads in its own processes. Run in a thread: the loop must keep the lease alive."""
        args = self._args
        self.adjust(args)

        def reporter(settings: Any, index: int = 0) -> VllmLoadReporter:
            made = VllmLoadReporter(self._host, limits_of(settings).first_rank + index, loop)
            self._reporters.append(made)
            return made

        try:
            return self._library.AsyncLLM.from_engine_args(args, stat_loggers=[reporter])
        except ValueError as error:  # Arguments that contradict each other, the model or the machine.
            raise ConfigError(f"vLLM: {' '.join(str(error).split())}") from error

    def _listen(self, settings: Any) -> None:
        """Subscribe to the events and steps that the engine's processes publish."""
        assert self._tasks is not None
        if publishes(settings) and self._role.publishes_cache:
            sources = self._llm.get_kv_event_sources()
            block, first = settings.cache_config.block_size, self._limits.first_rank
            for listener in kv_listeners(sources, block, first, self._host):
                logger.info("KV events from %s", listener.endpoint)
                self._tasks.start(listener.run(), f"KV events of {listener.endpoint}")
        if wants_forward_passes(environ()):
            for rank in range(self._limits.ranks):
                endpoint = f"tcp://127.0.0.1:{forward_pass_port() + rank}"
                self._tasks.start(PassListener(endpoint, rank, self._host).run(), f"steps of rank {rank}")

    # Requests.

    @property
    def _is_prefill(self) -> bool:
        return self._role is DisaggregationMode.PREFILL

    def _arguments(self, request: PreprocessedRequest) -> tuple[VllmArguments, dict[str, Any] | None]:
        """Return vLLM's request and its `kv_transfer_params`. Raise `InvalidArgument`."""
        if request.multi_modal_data and not self._config.enable_multimodal:
            kinds = ", ".join(request.multi_modal_data)
            raise InvalidArgument(
                f"{kinds} parts: this worker was started without --enable-multimodal", param="messages"
            )
        if request.prompt_embeds and self._role is not DisaggregationMode.AGGREGATED:
            raise InvalidArgument(
                f"prompt_embeds is not supported by {self._role.value} workers", param="prompt_embeds"
            )
        if self._is_prefill:
            assert self._handshake is not None
            return to_vllm(prefill_request(request), self._limits), self._handshake.prefill_params()
        arguments = to_vllm(request, self._limits)
        if self._role is not DisaggregationMode.DECODE:
            return arguments, None
        result = prefill_result_of(request)
        return arguments, None if result is None else transfer.decode_params(result.disaggregated_params)

    async def _answer(
        self,
        request: PreprocessedRequest,
        arguments: VllmArguments,
        params: dict[str, Any] | None,
        lora: Any,
        reply: Reply,
    ) -> None:
        """Process one request until its end or its error."""
        library = self._library
        with ErrorBoundary(partial(self.answer_error, reply)):
            prompt = dict(arguments.prompt)
            length: int | None = None
            if request.prompt_embeds:
                settings = self._llm.vllm_config.model_config
                embeds = await asyncio.to_thread(library.load_embeds, settings, request.prompt_embeds)
                length = int(embeds.shape[0])
                arguments = check_embeds(arguments, length, self._limits)
                prompt["prompt_embeds"] = embeds
            if arguments.media:
                prompt["multi_modal_data"] = await self._shown(arguments)
            sampling = self._sampling(arguments, params)
            outputs = self._llm.generate(
                prompt,
                sampling,
                reply.request_id,
                lora_request=lora,
                priority=arguments.priority,
                data_parallel_rank=arguments.rank,
            )
            write = self._write_prefill if self._is_prefill else self._write
            answer = VllmOutput(request, length)
            async for one in outputs:
                write(one, answer, params, reply)
            reply.finish()

    def answer_error(self, reply: Reply, error: Exception) -> None:
        """Send a request's error to its caller; if it is the engine's death, end the worker."""
        if isinstance(error, self._library.dead_errors):
            reply.fail(EngineShutdown("the engine died"))
            self.die(error)
        else:
            reply.fail(error if isinstance(error, DynamoException) else self.failure_of(error, reply))

    def failure_of(self, error: Exception, reply: Reply) -> DynamoException:
        """Return a request's error: the client's if vLLM rejected the request, else the engine's, which is logged."""
        if isinstance(error, self._library.client_errors):
            return InvalidArgument(str(error), param=getattr(error, "parameter", None))
        refusal = refusal_of(error)
        if refusal is not None:
            return refusal
        logger.error("request %s failed", reply.request_id, exc_info=error)
        return Unknown(f"vLLM: {error.__cause__ or error}")

    async def _shown(self, arguments: VllmArguments) -> dict[str, list[Any]]:
        """Return the prompt's media, decoded with the worker's `--media-io-kwargs` overridden by the request's."""
        multimodal = getattr(self._llm.vllm_config.model_config, "multimodal_config", None)
        general = getattr(multimodal, "media_io_kwargs", None) or {}
        io = {
            kind: {**general.get(kind, {}), **arguments.media_io.get(kind, {})}
            for kind in {*general, *arguments.media_io}
        }
        try:
            return await media_items(arguments.media, lambda kind, media: self._library.decode_media(kind, media, io))
        except TypeError as error:  # vLLM passes the options as keyword arguments.
            if not arguments.media_io:
                raise
            raise InvalidArgument(f"media_io_kwargs: {error}", param="media_io_kwargs") from None

    def _sampling(self, arguments: VllmArguments, params: dict[str, Any] | None) -> Any:
        """Return vLLM's `SamplingParams`. Raise vLLM's errors."""
        library = self._library
        guided = None if arguments.guided is None else library.StructuredOutputsParams(**arguments.guided)
        extra = None if params is None else {transfer.KEY: params}
        return library.SamplingParams(
            **arguments.sampling,
            structured_outputs=guided,
            extra_args=extra,
            output_kind=library.RequestOutputKind.DELTA,
        )

    def _write(self, output: Any, answer: VllmOutput, params: dict[str, Any] | None, reply: Reply) -> None:
        """Write the new output; tokens of a single choice need no item. Raise an error if vLLM aborted the request."""
        for piece in answer.take(output):
            reason = piece.finish_reason
            if reason in ("abort", "error"):
                raise given_up(reason, has_transfer=params is not None)
            if reason is None and piece.log_probs is None and piece.index == 0:
                for token in piece.token_ids:
                    reply.token(token)
            else:
                reply.item(piece)

    def _write_prefill(self, output: Any, answer: VllmOutput, params: dict[str, Any] | None, reply: Reply) -> None:
        """Write the output of a prefill worker: one token and the location of the blocks."""
        for piece in answer.take(output):
            if piece.finish_reason in ("abort", "error"):
                raise given_up(piece.finish_reason, has_transfer=False)
            if piece.finish_reason is not None:
                reply.item(self._prefilled(piece, output, params))
                logger.debug("Prefill completed for request %s", reply.request_id)

    def _prefilled(self, piece: EngineOutput, output: Any, params: dict[str, Any] | None) -> EngineOutput:
        assert self._handshake is not None
        result = self._handshake.handover(output.kv_transfer_params, params)
        usage = piece.completion_usage
        return prefill_output(
            piece.token_ids,
            {} if result is None else {transfer.KEY: result},
            usage,
            finish_reason="length" if piece.finish_reason == "length" else "stop",
        )

    def _ended(self, reply: Reply) -> None:
        self._running.pop(reply, None)
        if not self._running:
            self._is_quiet.set()

    def die(self, error: BaseException) -> None:
        """Report the death of the engine to the worker, once."""
        if not self._is_dead and self._tasks is not None:
            self._is_dead = True
            self._host.fail(error)


def given_up(reason: str, *, has_transfer: bool) -> DynamoException:
    """Return the error of an unfinished response, which another worker may be able to complete."""
    if reason == "abort":
        return EngineShutdown("the engine dropped the request")
    if has_transfer:
        return WorkerUnavailable("the KV blocks of the prompt could not be fetched")
    return Unknown("vLLM could not compute the request")


def limits_of(settings: Any) -> VllmLimits:
    """Return the limits of an engine with this configuration (`VllmConfig`)."""
    parallel, model = settings.parallel_config, settings.model_config
    is_part = parallel.local_engines_only
    return VllmLimits(
        context_length=model.max_model_len,
        ranks=(parallel.data_parallel_size_local if is_part else parallel.data_parallel_size) or 1,
        first_rank=(parallel.data_parallel_rank or 0) if is_part else 0,
        has_priorities=settings.scheduler_config.policy == "priority",
        defaults=model.get_diff_sampling_param(),
    )


def adapters_of(llm: Any, make: Any, settings: Any) -> LoadedAdapters[Any]:
    """Return the adapter operations. `make` is vLLM's `LoRARequest`, `settings` its `LoRAConfig` or None.

    vLLM identifies adapters by number; the number is derived from the name, so that it is the same on every worker.
    """

    async def take(name: str, number: int, path: str) -> Any:
        request = make(lora_name=name, lora_int_id=number, lora_path=path)
        if await llm.add_lora(request) is False:
            raise InvalidArgument(f"{path}: the engine rejected the adapter")
        return request

    async def drop(request: Any) -> None:
        await llm.remove_lora(request.lora_int_id)

    return LoadedAdapters(take, drop, slots=None if settings is None else settings.max_loras)


def kv_listeners(sources: dict[int, Any], block_tokens: int, first_rank: int, host: EngineHost) -> list[EngineListener]:
    """Return the subscribers of all publishing ranks; `sources` are vLLM's `KVEventsConfig` by rank.

    Raise `ConfigError` for a publisher other than ZMQ.
    """
    listeners: list[EngineListener] = []
    for rank, source in sorted(sources.items()):
        if source.publisher != "zmq":
            raise ConfigError(f'--kv-events-config: publisher {source.publisher!r}: must be "zmq"')
        listeners.append(kv_listener(source.endpoint, source.replay_endpoint, first_rank + rank, block_tokens, host))
    return listeners


def publishes(engine_config: Any) -> bool:
    """Return whether an engine with this configuration publishes KV cache events."""
    events, cache = engine_config.kv_events_config, engine_config.cache_config
    return bool(events is not None and events.enable_kv_cache_events and cache.enable_prefix_caching)
