"""GlobalRouterOptions: the flags of `python -m dynamo.global_router`."""

from dataclasses import dataclass

from dynamo.core.config import option
from dynamo.core.errors import ConfigError
from dynamo.runtime.config import RuntimeOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalRouterOptions(RuntimeOptions):
    """Global router: routes each request to a pool of workers by its length and latency targets."""

    config: str | None = option(
        None, "--config", "DYN_GLOBAL_ROUTER_CONFIG", "JSON file with the pools and their selection"
    )
    model_name: str | None = option(
        None, "--model-name", "DYN_GLOBAL_ROUTER_MODEL_NAME", "Name of the model that all pools serve"
    )
    model_path: str | None = option(
        None, "--model-path", "DYN_GLOBAL_ROUTER_MODEL_PATH", "Directory of the model's files; default: --model-name"
    )
    namespace: str = option(
        "dynamo", "--namespace", "DYN_NAMESPACE", "Namespace of the global router, watched by frontends"
    )
    component_name: str = option(
        "global_router", "--component-name", "DYN_GLOBAL_ROUTER_COMPONENT_NAME", "Component name of the global router"
    )
    default_ttft_target_ms: float | None = option(
        None,
        "--default-ttft-target-ms",
        "DYN_GLOBAL_ROUTER_DEFAULT_TTFT_TARGET_MS",
        "Target time to first token of requests without one, in ms; default: the middle of the file's range",
        aliases=["--default-ttft-target"],
    )
    default_itl_target_ms: float | None = option(
        None,
        "--default-itl-target-ms",
        "DYN_GLOBAL_ROUTER_DEFAULT_ITL_TARGET_MS",
        "Target time between tokens of requests without one, in ms; default: the middle of the file's range",
        aliases=["--default-itl-target"],
    )

    def __post_init__(self) -> None:
        if self.config is None:
            raise ConfigError("--config is missing: expected a JSON file (DYN_GLOBAL_ROUTER_CONFIG)")
        if self.model_name is None:
            raise ConfigError("--model-name is missing (DYN_GLOBAL_ROUTER_MODEL_NAME)")
