"""Scripted vLLM: the part of its package that `dynamo.vllm` uses, with its signatures, without an engine.

`tests/engines/test_vllm_signatures.py` compares these signatures with the real package.
"""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Callable, Mapping
from types import SimpleNamespace
from typing import Any


class EngineDeadError(Exception):
    """Error of an engine that has exited."""


class ClientError(Exception):
    """The request was wrong."""


class RequestOutputKind:
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


SAMPLING = (
    "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "seed",
    "stop_token_ids", "bad_words", "thinking_token_budget", "ignore_eos", "max_tokens", "min_tokens", "logprobs",
    "prompt_logprobs", "detokenize", "output_kind", "structured_outputs", "logit_bias", "allowed_token_ids", "extra_args",
)  # fmt: skip
"""Fields of `SamplingParams` that the adapter sets."""
GUIDED = ("json", "regex", "choice", "grammar", "whitespace_pattern", "structural_tag")
POOLING = ("task", "dimensions")


class _Fields(SimpleNamespace):
    names: tuple[str, ...] = ()

    def __init__(self, **given: Any) -> None:
        unknown = set(given) - set(self.names)
        assert not unknown, f"vLLM does not know {unknown}"
        super().__init__(**given)


class SamplingParams(_Fields):
    names = SAMPLING


class StructuredOutputsParams(_Fields):
    names = GUIDED


class PoolingParams(_Fields):
    names = POOLING


@dataclasses.dataclass
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str = ""


@dataclasses.dataclass
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclasses.dataclass
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: Any
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclasses.dataclass
class RequestOutput:
    request_id: str
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: Any = None
    num_cached_tokens: int | None = None
    kv_transfer_params: dict[str, Any] | None = None


def make_output(
    *tokens: int, finish: str | None = None, stop: int | None = None, index: int = 0, **more: Any
) -> RequestOutput:
    """One output of a request."""
    logprobs = more.pop("logprobs", None)
    one = CompletionOutput(index, "", list(tokens), None, logprobs, finish, stop)
    return RequestOutput("", [one], finish is not None, **more)


@dataclasses.dataclass
class AsyncEngineArgs:
    """Fields of vLLM's arguments that the adapter reads."""

    model: str
    served_model_name: list[str] | None = None
    scheduler_cls: str | None = None
    runner: str = "auto"
    enable_log_requests: bool = False


def settings(**changes: Any) -> SimpleNamespace:
    """A `VllmConfig`, with changes by the names of its parts."""
    parts: dict[str, Any] = {
        "model_config": SimpleNamespace(max_model_len=128, get_diff_sampling_param=dict, enable_prompt_embeds=False),
        "cache_config": SimpleNamespace(block_size=16, num_gpu_blocks=64, enable_prefix_caching=True),
        "scheduler_config": SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=256, policy="fcfs"),
        "parallel_config": SimpleNamespace(
            data_parallel_size=1, data_parallel_size_local=1, data_parallel_rank=0, local_engines_only=False
        ),
        "kv_transfer_config": None,
        "kv_events_config": None,
        "lora_config": SimpleNamespace(max_loras=2),
    }
    return SimpleNamespace(**parts | changes)


class AsyncLLM:
    """Returns the outputs of its `script`, step by step."""

    def __init__(self, vllm_config: Any, stat_loggers: Any = None) -> None:
        self.vllm_config = vllm_config
        self.loggers = [make(vllm_config, 0) for make in stat_loggers or ()]
        self.script: list[Any] = []
        """Items that `generate` yields; an exception is raised, an event is awaited."""
        self.received_requests: list[SimpleNamespace] = []
        self.aborted: list[str] = []
        self.calls: list[tuple[Any, ...]] = []
        self.is_dead = False
        self.refuses: Exception | None = None
        self.is_shut = False

    @classmethod
    def from_engine_args(
        cls, engine_args: Any, start_engine_loop: bool = True, usage_context: Any = None, stat_loggers: Any = None
    ) -> "AsyncLLM":
        raise NotImplementedError

    async def generate(
        self,
        prompt: Any,
        sampling_params: Any,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        kv_hints: Any = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
    ) -> AsyncGenerator[Any, None]:
        self.received_requests.append(
            SimpleNamespace(
                prompt=prompt,
                params=sampling_params,
                request_id=request_id,
                lora=lora_request,
                priority=priority,
                rank=data_parallel_rank,
            )
        )
        try:
            for one in list(self.script):
                if isinstance(one, BaseException):
                    raise one
                if isinstance(one, asyncio.Event):
                    await one.wait()
                else:
                    yield one
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted.append(request_id)
            raise

    async def encode(
        self,
        prompt: Any,
        pooling_params: Any,
        request_id: str,
        lora_request: Any = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        tokenization_kwargs: dict[str, Any] | None = None,
        reasoning_ended: bool | None = None,
    ) -> AsyncGenerator[Any, None]:
        self.received_requests.append(SimpleNamespace(prompt=prompt, params=pooling_params, request_id=request_id))
        for one in self.script:
            if isinstance(one, BaseException):
                raise one
            yield one

    async def check_health(self) -> None:
        if self.is_dead:
            raise EngineDeadError("dead")

    def get_kv_event_sources(self) -> dict[int, Any]:
        return {}

    def shutdown(self, timeout: float | None = None) -> None:
        self.is_shut = True

    async def add_lora(self, lora_request: Any) -> bool:
        self._called("add_lora", lora_request.lora_name)
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        self._called("remove_lora", lora_id)
        return True

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self._called("sleep", level)

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        self._called("wake_up", tags)
        return not tags

    async def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        self._called("start_profile", profile_prefix)

    async def stop_profile(self) -> None:
        self._called("stop_profile")

    async def scale_elastic_ep(self, new_data_parallel_size: int, drain_timeout: int = 300) -> None:
        self._called("scale_elastic_ep", new_data_parallel_size)

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        self._called("pause_generation", mode, clear_cache)

    async def resume_generation(self) -> None:
        self._called("resume_generation")

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        self._called("reset_prefix_cache")
        return True

    async def abort(self, request_id: Any, internal: bool = False) -> None:
        self._called("abort", request_id)

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,  # noqa: ASYNC109
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
    ) -> None:
        self._called("collective_rpc", method, kwargs)

    async def get_weight_version(self) -> str:
        return "7"

    async def update_weight_version(self, new_version: str) -> None:
        self._called("update_weight_version", new_version)

    def _called(self, *call: Any) -> None:
        self.calls.append(call)
        if self.refuses is not None:
            raise self.refuses


METHODS: tuple[str, ...] = tuple(
    name for name, value in vars(AsyncLLM).items() if isinstance(value, Callable | classmethod) and name[0] != "_"
)
"""Methods whose signatures are compared with the real ones."""
