"""Library: the names of SGLang's package that are used here, imported when a worker starts. For SGLang 0.5.23."""

import contextlib
import importlib.util
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from dynamo.core.errors import ConfigError
from dynamo.core.extras import install_command


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangLibrary:
    """SGLang's classes. Tests replace them with others of the same signatures."""

    Engine: Any
    io_struct: ModuleType | Any
    """The module with the messages between SGLang's processes."""
    read_server_args: Callable[[Sequence[str]], Any]
    """Function that returns the `ServerArgs` of a command line. Raises `ConfigError`."""
    fake_bootstrap_host: str
    """A host without a prefill worker: blocks are neither sent nor awaited."""
    is_eagle: Callable[[str | None], bool]
    """Function that returns whether a speculative algorithm hashes blocks over pairs of tokens."""
    is_mla: Callable[[Any], bool]
    """Function that returns whether a `TokenizerManager`'s model caches one latent instead of keys and values."""
    render_metrics: Callable[[], str]
    """Function that returns the metrics of the engine's processes as text."""


def check_installed() -> None:
    """Raise `ConfigError` with the install command if SGLang is not installed."""
    if importlib.util.find_spec("sglang") is None:
        raise ConfigError(f"SGLang is not installed: {install_command('sglang')} (requires a GPU, see docs/sglang.md)")


def load_library() -> SglangLibrary:
    """Import SGLang, which takes some seconds. Raise `ConfigError` if it is missing, too old or cannot run here."""
    check_installed()
    try:
        from sglang.srt.configs.model_config import AttentionArch
        from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
        from sglang.srt.entrypoints.engine import Engine
        from sglang.srt.managers import io_struct
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    except ImportError as error:
        raise ConfigError(f"unsupported SGLang: 0.5.23 or newer is required: {error}") from None

    def is_eagle(algorithm: str | None) -> bool:
        return algorithm is not None and bool(SpeculativeAlgorithm.from_string(algorithm).is_eagle())

    def is_mla(manager: Any) -> bool:
        return bool(manager.model_config.attention_arch == AttentionArch.MLA)

    return SglangLibrary(
        Engine=Engine,
        io_struct=io_struct,
        read_server_args=_read_server_args,
        fake_bootstrap_host=FAKE_BOOTSTRAP_HOST,
        is_eagle=is_eagle,
        is_mla=is_mla,
        render_metrics=_render_metrics,
    )


def _read_server_args(argv: Sequence[str]) -> Any:
    from sglang.srt.server_args import prepare_server_args

    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            return prepare_server_args(list(argv))
    except SystemExit:
        lines = stderr.getvalue().strip().splitlines() or ["cannot parse the server arguments"]
        raise ConfigError(
            f"{lines[-1]} (SGLang server argument; other flags: python -m dynamo.sglang --help)"
        ) from None
    except (ValueError, AssertionError) as error:  # Arguments that contradict each other, the model or the machine.
        raise ConfigError(f"SGLang: {' '.join(str(error).split())}") from error


def _render_metrics() -> str:
    """Return the metrics that SGLang's processes write into files for aggregation."""
    from prometheus_client import CollectorRegistry, generate_latest, multiprocess

    registry = CollectorRegistry()
    collector: Any = multiprocess.MultiProcessCollector  # Typed in some releases only.
    collector(registry)
    text: str = generate_latest(registry).decode()
    return text
