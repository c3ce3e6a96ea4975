"""TrtllmEngine: TensorRT-LLM's `LLM` behind a worker.

    submit ──▶ convert ──▶ LLM.generate_async ──RequestOutput──▶ convert ──▶ tokens to the reply
                              │ its own processes
    get_kv_cache_events_async ┤ polled ──▶ events
    get_stats_async ──────────┘ polled ──▶ load and steps      health check every two seconds ──▶ host.fail

A request is a task here. A cancelled request is aborted, and its task continues until TensorRT-LLM ends it.
"""

import asyncio
import dataclasses
import logging
import os
import time
from typing import Any

from dynamo.backend.adapters import LoadedAdapters
from dynamo.backend.disagg import DisaggregationMode, prefill_output, prefill_request, prefill_result_of
from dynamo.backend.engine import EngineConfig, EngineHost
from dynamo.backend.health import watch
from dynamo.backend.request_fields import refusal_of
from dynamo.backend.requests import STOP_S, EngineLiveness, Requests
from dynamo.core.errors import ConfigError, EngineShutdown
from dynamo.core.tasks import TaskOwner
from dynamo.model_card.card import architectural_context_length, read_json
from dynamo.model_card.hub import resolve_model
from dynamo.protocols.engine import PreprocessedRequest
from dynamo.runtime.request_plane.base import Reply
from dynamo.trtllm.config import TrtllmConfig, engine_args
from dynamo.trtllm.controls import TrtllmControls
from dynamo.trtllm.convert import NO_END, TrtllmArguments, TrtllmLimits, TrtllmOutput, to_trtllm
from dynamo.trtllm.events import TrtllmCacheEvents, follow, publisher_of
from dynamo.trtllm.handshake import RequestIds, from_wire, to_wire
from dynamo.trtllm.library import TrtllmLibrary
from dynamo.trtllm.metrics import TrtllmStepReporter

logger = logging.getLogger(__name__)

FIRST_STEP_S = 600.0  # The first prompt may compile kernels.


class TrtllmEngine:
    """`dynamo.backend.engine.LLMEngine` over TensorRT-LLM."""

    def __init__(self, config: TrtllmConfig, patches: dict[str, Any], library: TrtllmLibrary) -> None:
        """Set `patches`, arguments of `LLM` that override all others."""
        self._config = config
        self._patches = patches
        self._library = library
        self._role = config.role
        self._liveness = EngineLiveness()
        self._tasks = TaskOwner("trtllm", on_crash=lambda _name, error: self._liveness.die(error))
        self._requests = Requests(self._tasks)
        self._results: dict[Reply, Any] = {}
        self._llm: Any = None
        self._known = frozenset(one.name for one in dataclasses.fields(library.DisaggregatedParams))
        self._limits: TrtllmLimits
        self._host: EngineHost
        self._ids: RequestIds
        self._adapters: LoadedAdapters[Any]

    async def start(self, host: EngineHost) -> EngineConfig:
        config = self._config
        self._host = host
        self._ids = RequestIds(host.worker_id)
        path = await asyncio.to_thread(resolve_model, config.model)
        args = engine_args(config, path, self._patches)
        self._llm = llm = await asyncio.to_thread(self._make, args)
        self._liveness.began(host.fail)
        ranks = args["tensor_parallel_size"] if args["enable_attention_dp"] else 1
        settings = llm.args
        self._limits = TrtllmLimits(
            context_length=int(settings.max_seq_len or await asyncio.to_thread(model_length, path)),
            ranks=ranks,
            has_grammars=args.get("guided_decoding_backend") is not None,
        )
        blocks = await self._block_count()
        block_tokens = args["kv_cache_config"]["tokens_per_block"]
        publishes = config.publish_kv_events and bool(args["kv_cache_config"].get("enable_block_reuse", True))
        if publishes and self._role.publishes_cache:
            publish = publisher_of(TrtllmCacheEvents(block_tokens), host)
            self._tasks.start(follow(llm.get_kv_cache_events_async, publish), "KV events")
        if config.publish_metrics:
            self._tasks.start(follow(llm.get_stats_async, TrtllmStepReporter(host).on_step), "statistics")
        self._tasks.start(watch(self._look, self._liveness.die), "health")
        controls = TrtllmControls(llm, host, args)
        self._adapters = self._lora(args)
        return EngineConfig(
            model_path=path,
            served_model_name=config.served_model_name or model_name(config.model, path),
            context_length=self._limits.context_length,
            kv_cache_block_size=block_tokens,
            total_kv_blocks=blocks,
            max_num_seqs=settings.max_batch_size or 0,
            max_num_batched_tokens=settings.max_num_tokens or 0,
            data_parallel_size=ranks,
            publishes_kv_events=publishes,
            routes=controls.routes(),
            endpoints=controls.endpoints(),
            adapters=self._adapters if self._adapters.slots is not None else None,
        )

    def submit(self, request: PreprocessedRequest, reply: Reply) -> None:
        self._liveness.check()
        is_prefill = self._role is DisaggregationMode.PREFILL
        logger.debug("%s Request ID: %s", "Prefill" if is_prefill else "Decode", reply.request_id)
        if is_prefill:
            request = prefill_request(request)
        arguments = to_trtllm(request, self._limits)
        params = self._params(request)
        lora = self._adapters.of(arguments.lora_name)
        self._requests.begin(self._answer(request, arguments, params, lora, reply), reply)

    def cancel(self, reply: Reply) -> None:
        if reply not in self._requests:
            return
        logger.debug("Aborted Request ID: %s", reply.request_id)
        self._requests.drop(reply)
        result = self._results.get(reply)
        if result is not None:
            result.abort()

    def is_quiescent(self) -> bool | None:
        """Return None: TensorRT-LLM does not report which blocks are still to be fetched."""
        return None

    async def drain(self) -> None:
        await self._requests.drain()

    async def stop(self) -> None:
        self._liveness.stopped()
        await self._tasks.cancel_and_wait(STOP_S)
        llm, self._llm = self._llm, None
        if llm is not None:
            await asyncio.to_thread(llm.shutdown)

    # Start-up.

    def _make(self, args: dict[str, Any]) -> Any:
        """Start TensorRT-LLM, which loads in its own processes. Run in a thread: the loop must keep the lease alive."""
        try:
            return self._library.LLM(**args)
        except ValueError as error:  # Arguments that contradict each other, the model or the machine.
            raise ConfigError(f"TensorRT-LLM: {' '.join(str(error).split())}") from error

    async def _block_count(self) -> int:
        """Return the KV blocks of a rank: newer releases report it at once, older ones after their first step."""
        capacity = getattr(self._llm, "get_kv_cache_capacity", None)
        if capacity is not None:
            capacities = await asyncio.to_thread(capacity)
            return int(capacities["maxNumBlocks"])
        if not self._config.publish_metrics:
            return 0
        sampling = self._library.SamplingParams(max_tokens=1, end_id=NO_END, detokenize=False)
        async with asyncio.timeout(FIRST_STEP_S):
            async for _ in self._llm.generate_async([1], sampling, streaming=True):
                pass
            async for stat in self._llm.get_stats_async(FIRST_STEP_S):
                return int(stat["kvCacheStats"]["maxNumBlocks"])
        return 0

    def _lora(self, args: dict[str, Any]) -> LoadedAdapters[Any]:
        """Return the adapter operations; TensorRT-LLM loads an adapter with the first request that uses it."""
        library = self._library

        async def take(name: str, number: int, path: str) -> Any:
            return library.LoRARequest(lora_name=name, lora_int_id=number, lora_path=path)

        settings = args.get("lora_config")
        return LoadedAdapters(take, slots=None if settings is None else int(settings.get("max_loras") or 4))

    async def _look(self) -> None:
        """Raise an error if the engine has died."""
        if not await asyncio.to_thread(self._llm._check_health):
            raise RuntimeError("TensorRT-LLM reported a fatal error")

    # Requests.

    def _params(self, request: PreprocessedRequest) -> Any:
        """Return the disaggregation parameters of a request; None for a whole request. Raise `InvalidArgument`."""
        make = self._library.DisaggregatedParams
        if self._role is DisaggregationMode.PREFILL:
            return make(request_type="context_only", disagg_request_id=self._ids.next(time.time()))
        if self._role is not DisaggregationMode.DECODE:
            return None
        result = prefill_result_of(request)
        if result is None:
            return None
        fields = from_wire(result.disaggregated_params, self._library.Logprob, self._known)
        return make(request_type="generation_only", **fields)

    async def _answer(
        self, request: PreprocessedRequest, arguments: TrtllmArguments, params: Any, lora: Any, reply: Reply
    ) -> None:
        """Process one request until its end or its error."""
        if self._requests.is_dropped(reply):
            return
        answer = TrtllmOutput(request)
        try:
            result = self._begin(arguments, params, lora)
            self._results[reply] = result
            async for output in result:
                if self._requests.is_dropped(reply):
                    continue
                if self._role is DisaggregationMode.PREFILL:
                    self._write_prefill(output, answer, reply)
                else:
                    self._write(output, answer, reply)
        except self._library.request_errors as error:
            refusal = refusal_of(error, *self._library.request_errors)
            if refusal is None:
                raise
            raise refusal from error
        finally:
            self._results.pop(reply, None)
        if self._requests.is_dropped(reply):
            return
        if answer.unfinished > 0:
            raise EngineShutdown("the engine ended the response early")
        reply.finish()

    def _begin(self, arguments: TrtllmArguments, params: Any, lora: Any) -> Any:
        """Submit a request to TensorRT-LLM. Raise its errors."""
        library = self._library
        guided = None if arguments.guided is None else library.GuidedDecodingParams(**arguments.guided)
        given: dict[str, Any] = {}
        if lora is not None:
            given["lora_request"] = lora
        if params is not None:
            given["disaggregated_params"] = params
        if arguments.cache_salt is not None:
            given["cache_salt"] = arguments.cache_salt
        if arguments.rank is not None:
            given["scheduling_params"] = library.SchedulingParams(
                attention_dp_rank=arguments.rank, attention_dp_relax=False
            )
        return self._llm.generate_async(
            list(arguments.tokens),
            library.SamplingParams(**arguments.sampling, guided_decoding=guided),
            streaming=self._role is not DisaggregationMode.PREFILL,
            **given,
        )

    def _write(self, output: Any, answer: TrtllmOutput, reply: Reply) -> None:
        """Write the new output, tokens of a single choice without an item."""
        for piece in answer.take(output):
            if piece.finish_reason is None and piece.log_probs is None and piece.index == 0:
                for token in piece.token_ids:
                    reply.token(token)
            else:
                reply.item(piece)

    def _write_prefill(self, output: Any, answer: TrtllmOutput, reply: Reply) -> None:
        """Write the output of a prefill worker: one token and the parameters for decode."""
        for piece in answer.take(output):
            if piece.finish_reason is None:
                continue
            params = output.outputs[0].disaggregated_params
            if params is None:
                raise EngineShutdown("TensorRT-LLM did not return the location of the prompt's blocks")
            reason = "length" if piece.finish_reason == "length" else "stop"
            reply.item(prefill_output(piece.token_ids, to_wire(params), piece.completion_usage, finish_reason=reason))
            logger.debug("Prefill completed for request %s", reply.request_id)


def model_name(given: str, path: str) -> str:
    """Return the default name of a model: its directory's name, or its name on the hub."""
    return os.path.basename(path) if os.path.isdir(os.path.expanduser(given)) else given


def model_length(path: str) -> int:
    """Return the model's context length. Raise `ConfigError` if its configuration has none."""
    found = architectural_context_length(read_json(os.path.join(path, "config.json")))
    if found is None:
        raise ConfigError(f"{path}: config.json has no context length; set --max-seq-len")
    return found
