"""Library: the names of TensorRT-LLM's package that are used here, imported when a worker starts. Made for 1.2 and newer."""

import importlib.util
from dataclasses import dataclass
from typing import Any

from dynamo.core.errors import ConfigError
from dynamo.core.extras import install_command


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """TensorRT-LLM's classes. Another set of them with the same signatures stands in for it in tests."""

    LLM: Any
    SamplingParams: Any
    GuidedDecodingParams: Any
    DisaggregatedParams: Any
    SchedulingParams: Any
    LoRARequest: Any
    Logprob: Any
    request_errors: tuple[type[BaseException], ...]
    """Of one request that failed: the client's fault only where the message names a parameter."""


def check_installed() -> None:
    """Raises `ConfigError`, one line that says what to install."""
    if importlib.util.find_spec("tensorrt_llm") is None:
        raise ConfigError(
            f"TensorRT-LLM is not installed: {install_command('trtllm')} (it needs CUDA, see docs/trtllm.md)"
        )


def load_library() -> Library:
    """Imports TensorRT-LLM, which takes some seconds. Raises `ConfigError` where it is missing, too old or cannot run."""
    check_installed()
    try:
        from tensorrt_llm import LLM, SamplingParams
        from tensorrt_llm.executor.request import LoRARequest
        from tensorrt_llm.executor.result import Logprob
        from tensorrt_llm.executor.utils import RequestError
        from tensorrt_llm.llmapi import DisaggregatedParams, GuidedDecodingParams
        from tensorrt_llm.scheduling_params import SchedulingParams
    except (ImportError, OSError) as error:  # Its libraries are loaded by the import, and may not be there.
        raise ConfigError(f"this TensorRT-LLM cannot be used, 1.2 or newer is expected: {error}") from None
    return Library(
        LLM=LLM,
        SamplingParams=SamplingParams,
        GuidedDecodingParams=GuidedDecodingParams,
        DisaggregatedParams=DisaggregatedParams,
        SchedulingParams=SchedulingParams,
        LoRARequest=LoRARequest,
        Logprob=Logprob,
        request_errors=(RequestError, ValueError),
    )
