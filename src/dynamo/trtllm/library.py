"""Library: the names of TensorRT-LLM's package that are used here, imported when a worker starts. For 1.2 and newer."""

import importlib.util
from dataclasses import dataclass
from typing import Any

from dynamo.core.errors import ConfigError
from dynamo.core.extras import install_command


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtllmLibrary:
    """TensorRT-LLM's classes. Tests replace them with others of the same signatures."""

    LLM: Any
    SamplingParams: Any
    GuidedDecodingParams: Any
    DisaggregatedParams: Any
    SchedulingParams: Any
    LoRARequest: Any
    Logprob: Any
    request_errors: tuple[type[BaseException], ...]
    """Errors of one request: the client's fault only if the message names a parameter."""


def check_installed() -> None:
    """Raise `ConfigError` with the install command if TensorRT-LLM is not installed."""
    if importlib.util.find_spec("tensorrt_llm") is None:
        raise ConfigError(
            f"TensorRT-LLM is not installed: {install_command('trtllm')} (requires CUDA, see docs/trtllm.md)"
        )


def load_library() -> TrtllmLibrary:
    """Import TensorRT-LLM, which takes some seconds. Raise `ConfigError` if it is missing, too old or cannot run."""
    check_installed()
    try:
        from tensorrt_llm import LLM, SamplingParams
        from tensorrt_llm.executor.request import LoRARequest
        from tensorrt_llm.executor.result import Logprob
        from tensorrt_llm.executor.utils import RequestError
        from tensorrt_llm.llmapi import DisaggregatedParams, GuidedDecodingParams
        from tensorrt_llm.scheduling_params import SchedulingParams
    except (ImportError, OSError) as error:  # The import loads shared libraries, which may be missing.
        raise ConfigError(f"unsupported TensorRT-LLM: 1.2 or newer is required: {error}") from None
    return TrtllmLibrary(
        LLM=LLM,
        SamplingParams=SamplingParams,
        GuidedDecodingParams=GuidedDecodingParams,
        DisaggregatedParams=DisaggregatedParams,
        SchedulingParams=SchedulingParams,
        LoRARequest=LoRARequest,
        Logprob=Logprob,
        request_errors=(RequestError, ValueError),
    )
