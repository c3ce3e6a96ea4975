"""Scripted SGLang: the part of its package that `dynamo.sglang` uses, with its signatures, without an engine.

`tests/engines/test_sglang_signatures.py` compares these signatures with the real package.
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

SAMPLING = (
    "max_new_tokens", "stop_token_ids", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
    "repetition_penalty", "min_new_tokens", "n", "json_schema", "regex", "ebnf", "structural_tag", "ignore_eos",
    "skip_special_tokens", "logit_bias", "sampling_seed",
)  # fmt: skip
"""Fields of `SamplingParams` that the adapter sets."""
FAKE_BOOTSTRAP_HOST = "2.2.2.2"


@dataclasses.dataclass
class ServerArgs:
    """Fields of SGLang's arguments that the adapter reads; each is a field of the real ones."""

    model_path: str = ""
    tokenizer_path: str | None = None
    served_model_name: str | None = None
    skip_tokenizer_init: bool = False
    incremental_streaming_output: bool = False
    page_size: int | None = 16
    dp_size: int = 1
    tp_size: int = 1
    pp_size: int = 1
    node_rank: int = 0
    max_running_requests: int | None = None
    max_prefill_tokens: int = 256
    disable_radix_cache: bool = False
    enable_priority_scheduling: bool = False
    schedule_low_priority_values_first: bool = False
    enable_lora: bool | None = None
    max_loras_per_batch: int = 8
    enable_metrics: bool = False
    kv_events_config: str | None = None
    enable_forward_pass_metrics: bool = False
    forward_pass_metrics_worker_id: str = ""
    forward_pass_metrics_ipc_name: str | None = None
    speculative_algorithm: str | None = None
    disaggregation_mode: str = "null"
    disaggregation_bootstrap_port: int = 8998
    disaggregation_transfer_backend: str = "mooncake"
    hicache_storage_backend: str | None = None
    hicache_storage_backend_extra_config: str | None = None
    hicache_mem_layout: str = "layer_first"


class _Word(SimpleNamespace):
    names: tuple[str, ...] = ()

    def __init__(self, **given: Any) -> None:
        unknown = sorted(set(given) - set(self.names))
        if unknown:
            raise TypeError(f"Unexpected keyword argument '{unknown[0]}'")
        super().__init__(**given)


WORDS = {
    "ProfileReq": ("output_dir", "num_steps", "profile_prefix"),
    "ReleaseMemoryOccupationReqInput": ("tags",),
    "ResumeMemoryOccupationReqInput": ("tags",),
    "PauseGenerationReqInput": ("mode",),
    "ContinueGenerationReqInput": ("torch_empty_cache",),
    "UpdateWeightVersionReqInput": ("new_version", "abort_all_requests"),
    "UpdateWeightFromDiskReqInput": ("model_path", "load_format", "weight_version", "flush_cache"),
    "UpdateWeightsFromTensorReqInput": ("serialized_named_tensors", "load_format", "flush_cache"),
    "UpdateWeightsFromDistributedReqInput": ("names", "dtypes", "shapes", "group_name", "flush_cache"),
    "UpdateWeightsFromIPCReqInput": ("zmq_handles", "flush_cache"),
    "InitWeightsUpdateGroupReqInput": ("master_address", "master_port", "rank_offset", "world_size", "group_name"),
    "DestroyWeightsUpdateGroupReqInput": ("group_name",),
}
"""SGLang's requests of one process to another, and fields that each has."""
io_struct = SimpleNamespace(**{name: type(name, (_Word,), {"names": names}) for name, names in WORDS.items()})

LOADS = (
    "dp_rank", "num_running_reqs", "num_waiting_reqs", "num_waiting_uncached_tokens", "num_used_tokens",
    "num_active_tokens", "max_total_num_tokens",
)  # fmt: skip
"""Fields of a `LoadSnapshot` that the adapter reads."""
EVENT_FIELDS = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_name", "medium"),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
"""Fields of cache events that the adapter reads."""


def chunk(*tokens: int, finish: Any = None, rid: str = "r", index: int | None = None, **meta: Any) -> dict[str, Any]:
    """Return a chunk of a response; `finish` is SGLang's reason."""
    run_request: dict[str, Any] = {
        "text": "",
        "output_ids": list(tokens),
        "meta_info": {"id": rid, "finish_reason": finish, "prompt_tokens": 3, "cached_tokens": 0, **meta},
    }
    if index is not None:
        run_request["index"] = index
    return run_request


LENGTH = {"type": "length", "length": 8}


class TokenizerManager:
    """Records every request."""

    context_len = 128

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.aborted: list[str] = []
        self.gracefully_exit = False
        self.refuses: Exception | None = None
        self.succeeds = True
        self.loads: list[Any] = []
        self.on_abort: Callable[[str], None] = lambda rid: None

    def auto_create_handle_loop(self) -> None:
        """Start the loop that receives messages of the other processes."""

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        self.aborted.append("*" if abort_all else rid)
        self.on_abort(rid)

    async def get_internal_state(self) -> list[dict[Any, Any]]:
        return [{"effective_max_running_requests_per_dp": 8}]

    async def get_loads(self, include: list[str] | None = None, dp_rank: int | None = None) -> list[Any]:
        return self.loads

    async def flush_cache(self, timeout_s: float | None = None) -> Any:
        self._called("flush_cache")
        return SimpleNamespace(success=self.succeeds, message="" if self.succeeds else "busy")

    async def start_profile(self, req: Any = None) -> None:
        self._called("start_profile", vars(req))

    async def stop_profile(self) -> None:
        self._called("stop_profile")

    async def release_memory_occupation(self, obj: Any, request: Any = None) -> None:
        self._called("release_memory_occupation", obj.tags)

    async def resume_memory_occupation(self, obj: Any, request: Any = None) -> None:
        self._called("resume_memory_occupation", obj.tags)

    async def update_weights_from_disk(self, obj: Any, request: Any = None) -> tuple[bool, str, int]:
        self._called("update_weights_from_disk", vars(obj))
        return self.succeeds, "told", 0

    async def update_weights_from_tensor(self, obj: Any, request: Any = None) -> tuple[bool, str]:
        self._called("update_weights_from_tensor", vars(obj))
        return self.succeeds, "told"

    async def update_weights_from_distributed(self, obj: Any, request: Any = None) -> tuple[bool, str]:
        self._called("update_weights_from_distributed", vars(obj))
        return self.succeeds, "told"

    async def update_weights_from_ipc(self, obj: Any, request: Any = None) -> tuple[bool, str]:
        self._called("update_weights_from_ipc", vars(obj))
        return self.succeeds, "told"

    async def init_weights_update_group(self, obj: Any, request: Any = None) -> tuple[bool, str]:
        self._called("init_weights_update_group", vars(obj))
        return self.succeeds, "told"

    async def destroy_weights_update_group(self, obj: Any, request: Any = None) -> tuple[bool, str]:
        self._called("destroy_weights_update_group", vars(obj))
        return self.succeeds, "told"

    async def update_weight_version(self, obj: Any) -> None:
        self._called("update_weight_version", vars(obj))

    async def pause_generation(self, obj: Any) -> None:
        self._called("pause_generation", obj.mode)

    async def continue_generation(self, obj: Any) -> None:
        self._called("continue_generation", vars(obj))

    def config_value(self, name: str) -> Any:
        return "default"

    def _called(self, *call: Any) -> None:
        self.calls.append(call)
        if self.refuses is not None:
            raise self.refuses


class Engine:
    """Returns the chunks of its `script`."""

    def __init__(self, **kwargs: Any) -> None:
        self.server_args = kwargs["server_args"]
        self.tokenizer_manager = TokenizerManager()
        self._scheduler_init_result = SimpleNamespace(scheduler_infos=[{"max_total_num_tokens": 1024}])
        self.script: list[Any] = []
        """Items that `async_generate` yields; an exception is raised, an event is awaited."""
        self.received_requests: list[dict[str, Any]] = []
        self.is_shut = False

    async def async_generate(
        self,
        prompt: Any = None,
        sampling_params: Any = None,
        input_ids: Any = None,
        image_data: Any = None,
        audio_data: Any = None,
        video_data: Any = None,
        mm_hashes: Any = None,
        mm_content_hashes: Any = None,
        return_logprob: Any = False,
        logprob_start_len: Any = None,
        top_logprobs_num: Any = None,
        token_ids_logprob: Any = None,
        lora_path: Any = None,
        custom_logit_processor: Any = None,
        require_reasoning: bool = False,
        return_hidden_states: Any = False,
        return_routed_experts: bool = False,
        routed_experts_start_len: int = 0,
        stream: bool = False,
        bootstrap_host: Any = None,
        bootstrap_port: Any = None,
        bootstrap_room: Any = None,
        routed_dp_rank: int | None = None,
        disagg_prefill_dp_rank: int | None = None,
        kv_hints: Any = None,
        data_parallel_rank: int | None = None,
        external_trace_header: Any = None,
        rid: Any = None,
        session_params: Any = None,
        priority: int | None = None,
        session_id: str | None = None,
        *,
        cache_salt: Any = None,
    ) -> AsyncIterator[dict[str, Any]]:
        given = {name: value for name, value in locals().items() if name != "self"}
        unknown = set(sampling_params) - set(SAMPLING)
        assert not unknown, f"SGLang does not know {unknown}"
        self.received_requests.append({name: value for name, value in given.items() if value not in (None, False)})
        return self.run_request(given)

    async def run_request(self, given: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        for one in list(self.script):
            if isinstance(one, BaseException):
                raise one
            if isinstance(one, asyncio.Event):
                await one.wait()
            else:
                yield one

    async def async_load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool = False) -> Any:
        self.tokenizer_manager._called("load_lora", lora_name, lora_path)
        return SimpleNamespace(success=self.tokenizer_manager.succeeds, error_message="rank too high")

    async def async_unload_lora_adapter(self, lora_name: str) -> Any:
        self.tokenizer_manager._called("unload_lora", lora_name)
        return SimpleNamespace(success=self.tokenizer_manager.succeeds, error_message="in use")

    def get_all_child_pids(self) -> list[int]:
        return []

    def shutdown(self) -> None:
        self.is_shut = True


METHODS = {
    "Engine": tuple(
        name for name, value in vars(Engine).items() if callable(value) and name[0] != "_" and name != "run_request"
    ),
    "TokenizerManager": tuple(
        name for name, value in vars(TokenizerManager).items() if callable(value) and name[0] != "_"
    ),
}
"""Methods whose signatures are compared with the real ones."""
