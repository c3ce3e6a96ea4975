"""SampleLLMEngine: an engine without a model that returns consecutive token ids, for tests and as an example.

It covers what an engine can do: streaming, cancellation, log probabilities, KV events, load, prefill, decode and encode
workers. Run it with `python -m dynamo.common.backend.sample_main`.
"""

import argparse
import asyncio
import logging
import queue
import threading
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from dynamo.common.backend import telemetry
from dynamo.common.backend.disagg import enforce_prefill_max_tokens, require_prefill_result
from dynamo.common.backend.engine import EngineConfig, GenerateChunk, GenerateRequest, LLMEngine, LlmRegistration
from dynamo.common.backend.health_check import build_health_check_payload, is_probe
from dynamo.common.backend.logprobs import parse_logprob_options
from dynamo.common.backend.multimodal import encoder_terminal_chunk, extract_multimodal_kwargs, require_encoder_result
from dynamo.common.backend.publisher import ComponentSnapshot, KvEventSource, PushSource
from dynamo.common.backend.worker import WorkerConfig
from dynamo.common.constants import DisaggregationMode
from dynamo.common.utils.token_ids import normalize_request_token_ids
from dynamo.kv_events.publisher import KvEventPublisher
from dynamo.runtime.context import Context

logger = logging.getLogger(__name__)

BLOCK_TOKENS = 16
BLOCKS = 1000
CONTEXT_LENGTH = 2048
CAPACITY = LlmRegistration(
    context_length=CONTEXT_LENGTH,
    kv_cache_block_size=BLOCK_TOKENS,
    total_kv_blocks=BLOCKS,
    max_num_seqs=64,
    max_num_batched_tokens=CONTEXT_LENGTH,
)
TOP_LOGPROBS_MAX = 20  # The maximum of the OpenAI API.
TOKEN_IDS = 1000  # Output token ids are 1 to this number, repeated.
PUBLISH_S = 0.5  # Interval in which the load is published without KV events.
QUEUE_MAX = 1024  # KV events that wait for the publishing thread.
HANDLE_PREFIX = "sample-encoder:"
PREFILL, DECODE, ENCODE = DisaggregationMode.PREFILL, DisaggregationMode.DECODE, DisaggregationMode.ENCODE


class SampleLLMEngine(LLMEngine):
    """An engine that takes `delay` seconds per token and returns `max_tokens` of them unless the request limits them."""

    def __init__(
        self,
        model_name: str = "sample-model",
        max_tokens: int = 16,
        delay: float = 0.01,
        disaggregation_mode: DisaggregationMode = DisaggregationMode.AGGREGATED,
        route_to_encoder: bool = False,
    ) -> None:
        self.model_name = model_name
        self.max_tokens = max_tokens
        self.delay = delay
        self.disaggregation_mode = disaggregation_mode
        self.route_to_encoder = route_to_encoder
        self._kv_used_blocks = 0
        self._next_block = 0
        self._publish_queue: queue.Queue[tuple[str, list[int]]] = queue.Queue(QUEUE_MAX)
        self._publish_stop = threading.Event()
        self._publish_thread: threading.Thread | None = None
        self._snapshot_publisher: Any = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> "tuple[SampleLLMEngine, WorkerConfig]":
        """Parse the command line."""
        parser = sample_parser("Sample engine for tokens", "sample-model", "chat,completions")
        parser.add_argument("--max-tokens", type=int, default=16, help="Output tokens of a request that sets no limit")
        parser.add_argument("--delay", type=float, default=0.01, help="Seconds per token")
        parser.add_argument(
            "--disaggregation-mode",
            choices=[mode.value for mode in DisaggregationMode],
            default=DisaggregationMode.AGGREGATED.value,
            help="Phase of requests that this worker computes; default: agg, both phases",
        )
        parser.add_argument(
            "--route-to-encoder", action="store_true", help="Require an encode worker (agg and prefill)"
        )
        parser.add_argument("--disable-kv-routing", action="store_true", help="Publish neither KV events nor load")
        args = parser.parse_args(argv)
        mode = DisaggregationMode(args.disaggregation_mode)
        engine = cls(args.model_name, args.max_tokens, args.delay, mode, args.route_to_encoder)
        return engine, sample_config(
            args,
            disaggregation_mode=mode,
            route_to_encoder=args.route_to_encoder,
            enable_kv_routing=not args.disable_kv_routing,
        )

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(
            model=self.model_name,
            served_model_name=self.model_name,
            llm=CAPACITY,
        )

    async def cleanup(self) -> None:
        self._publish_stop.set()
        if self._publish_thread is not None:
            await asyncio.to_thread(self._publish_thread.join)

    async def health_check_payload(self) -> dict[str, Any] | None:
        return build_health_check_payload(bos_token_id=1)

    # KV events and load --------------------------------------------------------------------------------------------

    async def kv_event_sources(self) -> list[KvEventSource]:
        return [] if self.disaggregation_mode is ENCODE else [PushSource(on_ready=self._connect)]

    def component_metrics_dp_ranks(self) -> list[int]:
        return [] if self.disaggregation_mode is ENCODE else [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        self._snapshot_publisher = publisher

    def _connect(self, publisher: KvEventPublisher) -> None:
        """Start the thread that publishes KV events and load."""
        thread = threading.Thread(target=lambda: self._publish_loop(publisher), daemon=True)
        thread.start()
        self._publish_thread = thread

    def _publish_loop(self, publisher: KvEventPublisher) -> None:
        """Publish KV events as they come, and the load after each of them or after `PUBLISH_S`."""
        while not self._publish_stop.is_set():
            try:
                kind, blocks = self._publish_queue.get(timeout=PUBLISH_S)
            except queue.Empty:
                pass
            else:
                if kind == "stored":
                    tokens = [1 + block % TOKEN_IDS for block in blocks for _ in range(BLOCK_TOKENS)]
                    publisher.publish_stored(tokens, [BLOCK_TOKENS] * len(blocks), blocks)
                else:
                    publisher.publish_removed(blocks)
            self._publish_load()

    def _publish_load(self) -> None:
        if self._snapshot_publisher is not None:
            used = self._kv_used_blocks
            self._snapshot_publisher.publish(0, ComponentSnapshot(used, BLOCKS, used / BLOCKS, dp_rank=0))

    def _store_blocks(self, prompt_len: int) -> list[int]:
        """Return the blocks of a prompt, reported as stored."""
        blocks = [self._next_block + number for number in range(prompt_len // BLOCK_TOKENS)]
        self._next_block += len(blocks)
        self._report("stored", blocks)
        self._kv_used_blocks += len(blocks)
        return blocks

    def _remove_blocks(self, blocks: list[int]) -> None:
        self._report("removed", blocks)
        self._kv_used_blocks -= len(blocks)

    def _report(self, kind: str, blocks: list[int]) -> None:
        if blocks and self._publish_thread is not None:
            try:
                self._publish_queue.put_nowait((kind, blocks))
            except queue.Full:
                logger.warning("KV event of %d blocks dropped: %d events are waiting", len(blocks), QUEUE_MAX)

    # Requests ------------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        mode = self.disaggregation_mode
        normalize_request_token_ids(request)
        if mode is ENCODE:
            yield await self._encode(request, context)
            return
        if mode is DECODE:
            if extract_multimodal_kwargs(request) is not None:
                raise ValueError("decode worker should not receive raw media: the prefill worker has consumed them")
            if not is_probe(request):
                require_prefill_result(request, mode)
        elif mode is PREFILL:
            enforce_prefill_max_tokens(request)
        media = await self._media(request)
        limit = request.get("stop_conditions", {}).get("max_tokens") or self.max_tokens
        logprobs, _ = parse_logprob_options(request.get("output_options") or {})
        generated: list[int] = []
        async for chunk in self._generate_tokens(len(request["token_ids"]), limit, context, logprobs):
            generated += chunk["token_ids"]
            if chunk.get("finish_reason") == "length":
                if media is not None:
                    chunk["engine_data"] = {"sample_multimodal": media}
                if mode is PREFILL:
                    chunk["disaggregated_params"] = {"sample_handle": uuid.uuid4().hex, "completed_tokens": generated}
            yield chunk

    async def _media(self, request: GenerateRequest) -> dict[str, Any] | None:
        """Return the encoded media of a request: from the encode worker if there is one, else encoded here."""
        if extract_multimodal_kwargs(request) is None:
            return None
        if not self.route_to_encoder:
            return await self._encode_multimodal(request)
        result = require_encoder_result(request, self.disaggregation_mode)
        if not str(result.get("handle", "")).startswith(HANDLE_PREFIX):
            raise ValueError(f"encoder_result.handle {result.get('handle')!r}: must start with {HANDLE_PREFIX!r}")
        return result

    async def _encode_multimodal(self, request: GenerateRequest) -> dict[str, Any]:
        """Return the output of an encoder for the request's media: a handle and the media themselves."""
        await asyncio.sleep(self.delay)
        handle = f"{HANDLE_PREFIX}{uuid.uuid4().hex}"
        return {"handle": handle, "multimodal_kwargs": extract_multimodal_kwargs(request) or {}}

    async def _encode(self, request: GenerateRequest, context: Context) -> GenerateChunk:
        usage = usage_of(len(request["token_ids"]), 0)
        if not context.is_stopped():
            result = await self._encode_multimodal(request)
            if not context.is_stopped():
                return encoder_terminal_chunk(result, completion_usage=usage)
        return cancelled_chunk(usage)

    async def _generate_tokens(
        self, prompt_len: int, max_new: int, context: Context, logprobs_k: int | None
    ) -> AsyncGenerator[GenerateChunk, None]:
        blocks = self._store_blocks(prompt_len)
        try:
            with telemetry.start_span(context, "sample.tokens", prompt_len=prompt_len):
                for number in range(1, max_new + 1):
                    if context.is_stopped():
                        yield cancelled_chunk(usage_of(prompt_len, number - 1))
                        return
                    await asyncio.sleep(self.delay)
                    chunk: GenerateChunk = {"token_ids": [1 + (number - 1) % TOKEN_IDS], "index": 0}
                    if logprobs_k is not None:
                        add_logprobs(chunk, logprobs_k)
                    if number == max_new:
                        chunk["finish_reason"] = "length"
                        chunk["completion_usage"] = usage_of(prompt_len, number)
                    yield chunk
        finally:
            self._remove_blocks(blocks)


def usage_of(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Return the `completion_usage` of a response."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def cancelled_chunk(usage: dict[str, int]) -> GenerateChunk:
    """Return the last chunk of a cancelled request."""
    return {"token_ids": [], "index": 0, "finish_reason": "cancelled", "completion_usage": usage}


def add_logprobs(chunk: GenerateChunk, count: int) -> None:
    """Add log probabilities to a chunk: per token -0.1 times its id, and the next `count` ids as alternatives."""
    chunk["log_probs"] = [-0.1 * token_id for token_id in chunk["token_ids"]]
    if count:
        ranks = range(1, 2 + min(count, TOP_LOGPROBS_MAX))
        chunk["top_logprobs"] = [[_alternative(token_id, rank) for rank in ranks] for token_id in chunk["token_ids"]]


def _alternative(token_id: int, rank: int) -> dict[str, Any]:
    other = token_id + rank - 1
    return {"rank": rank, "token_id": other, "token": f"token_id:{other}", "logprob": -0.1 * other}


def sample_parser(description: str, model_name: str, endpoint_types: str) -> argparse.ArgumentParser:
    """Return the command line that the sample engines share."""
    parser = argparse.ArgumentParser(description=description)
    for flag, default, text in (
        ("--model-name", model_name, "Model whose tokenizer is used, and its name for clients"),
        ("--namespace", "dynamo", "Namespace to serve in"),
        ("--component", "sample", "Component to serve in"),
        ("--endpoint", "generate", "Endpoint to serve"),
        ("--endpoint-types", endpoint_types, "Request types of the model"),
        ("--discovery-backend", "etcd", "Registry of processes: file, etcd or mem"),
        ("--request-plane", "tcp", "Transport of requests: tcp or nats"),
        ("--event-plane", None, "Transport of events: zmq or nats"),
    ):
        parser.add_argument(flag, default=default, help=text)
    parser.add_argument("--response-plane", choices=("tcp", "quic"), default="tcp", help="Transport of responses")
    return parser


def sample_config(args: argparse.Namespace, **more: Any) -> WorkerConfig:
    """Return the worker's configuration in parsed arguments of `sample_parser`."""
    names: Sequence[str] = (
        "namespace",
        "component",
        "endpoint",
        "endpoint_types",
        "discovery_backend",
        "request_plane",
        "event_plane",
        "response_plane",
    )
    given = {name: getattr(args, name) for name in names}
    return WorkerConfig(**given, model_name=args.model_name, served_model_name=args.model_name, **more)
