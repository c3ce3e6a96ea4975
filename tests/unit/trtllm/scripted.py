"""Scripted TensorRT-LLM: the part of its package that `dynamo.trtllm` uses, with its signatures, without an engine.

The signatures are those of its public source (`tensorrt_llm/llmapi/llm.py`, `executor/result.py`, `sampling_params.py`,
`disaggregated_params.py`, `scheduling_params.py`); the package itself needs CUDA, so none of them was compared with a
running one.
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Mapping
from types import SimpleNamespace
from typing import Any


class RequestError(Exception):
    """The request was wrong."""


@dataclasses.dataclass(slots=True)
class Logprob:
    logprob: float
    rank: int | None = None


@dataclasses.dataclass(slots=True, kw_only=True)
class DisaggregatedParams:
    request_type: str | None = None
    first_gen_tokens: list[int] | None = None
    first_gen_log_probs: list[Any] | None = None
    first_gen_logits: list[Any] | None = None
    ctx_request_id: int | None = None
    opaque_state: bytes | None = None
    draft_tokens: list[int] | None = None
    disagg_request_id: int | None = None
    ctx_dp_rank: int | None = None
    ctx_info_endpoint: str | None = None
    schedule_style: int | None = None
    multimodal_embedding_handles: list[Any] | None = None
    multimodal_hashes: list[Any] | None = None
    mrope_position_ids_handle: Any = None
    mrope_position_deltas_handle: Any = None


@dataclasses.dataclass(slots=True, kw_only=True)
class SchedulingParams:
    attention_dp_rank: int | None = None
    attention_dp_relax: bool = True
    agent_hierarchy: Any = None


@dataclasses.dataclass(slots=True)
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str = ""


@dataclasses.dataclass(slots=True, kw_only=True)
class GuidedDecodingParams:
    json: Any = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | None = None


@dataclasses.dataclass(slots=True, kw_only=True)
class SamplingParams:
    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    length_penalty: float | None = None
    min_p: float | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    guided_decoding: GuidedDecodingParams | None = None
    ignore_eos: bool = False
    detokenize: bool = True


@dataclasses.dataclass(slots=True)
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: Any = dataclasses.field(default_factory=list)
    prompt_logprobs: Any = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    disaggregated_params: DisaggregatedParams | None = None


def make_output(*tokens: int, finish: str | None = None, index: int = 0, **more: Any) -> SimpleNamespace:
    """All tokens of a choice so far."""
    cached = more.pop("cached_tokens", 0)
    one = CompletionOutput(index, "", list(tokens), finish_reason=finish, **more)
    return SimpleNamespace(outputs=[one], finished=finish is not None, cached_tokens=cached)


class RequestOutput:
    """A response, step by step."""

    def __init__(self, script: list[Any]) -> None:
        self._script = iter(script)
        self.is_aborted = False
        self.on_abort = asyncio.Event()

    def abort(self) -> None:
        self.is_aborted = True
        self.on_abort.set()

    def __aiter__(self) -> "RequestOutput":
        return self

    async def __anext__(self) -> Any:
        for one in self._script:
            if isinstance(one, BaseException):
                raise one
            if not isinstance(one, asyncio.Event):
                return one
            waiting = [asyncio.ensure_future(one.wait()), asyncio.ensure_future(self.on_abort.wait())]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in waiting:
                task.cancel()
        raise StopAsyncIteration


class LLM:
    """Returns the outputs of its `script`."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.given = {"model": model, "skip_tokenizer_init": skip_tokenizer_init} | kwargs
        self.args = SimpleNamespace(
            max_seq_len=kwargs.get("max_seq_len"),
            max_batch_size=kwargs.get("max_batch_size", 8),
            max_num_tokens=kwargs.get("max_num_tokens", 256),
        )
        self.script: list[Any] = []
        self.received_requests: list[SimpleNamespace] = []
        self.results: list[RequestOutput] = []
        self.calls: list[tuple[Any, ...]] = []
        self.events: list[Any] = []
        self.stats: list[Any] = []
        self.is_healthy = True
        self.is_shut = False
        self.refuses: Exception | None = None

    def generate_async(
        self,
        inputs: Any,
        sampling_params: Any = None,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
        kv_cache_retention_config: Any = None,
        disaggregated_params: Any = None,
        trace_headers: Mapping[str, str] | None = None,
        _postproc_params: Any = None,
        scheduling_params: Any = None,
        conversation_params: Any = None,
        cache_salt: str | None = None,
        priority: float = 0.5,
    ) -> RequestOutput:
        requested = SimpleNamespace(
            inputs=inputs,
            params=sampling_params,
            lora=lora_request,
            streaming=streaming,
            disaggregated=disaggregated_params,
            scheduling=scheduling_params,
            cache_salt=cache_salt,
        )
        self.received_requests.append(requested)
        if self.refuses is not None:
            raise self.refuses
        self.results.append(self.answer(requested))
        return self.results[-1]

    def answer(self, requested: SimpleNamespace) -> RequestOutput:
        return RequestOutput(self.script)

    async def get_kv_cache_events_async(self, timeout: float | None = 2) -> AsyncIterator[Any]:  # noqa: ASYNC109
        while self.events:
            yield self.events.pop(0)

    async def get_stats_async(self, timeout: float | None = 2) -> AsyncIterator[Any]:  # noqa: ASYNC109
        while self.stats:
            yield self.stats.pop(0)

    def get_kv_cache_capacity(self) -> dict[str, int]:
        return {"maxNumBlocks": 64, "tokensPerBlock": 32, "maxNumTokens": 2048}

    def _check_health(self) -> bool:
        return self.is_healthy

    def _collective_rpc(
        self,
        method: str,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        unique_reply_rank: int | None = None,
        target_ranks: int | list[int] | None = None,
    ) -> list[Any]:
        self.calls.append((method, *args))
        if self.refuses is not None:
            raise self.refuses
        return []

    def shutdown(self) -> None:
        self.is_shut = True
