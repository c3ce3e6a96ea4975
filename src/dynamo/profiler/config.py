"""Settings of the profiler."""

from dataclasses import dataclass

from dynamo.core.config import option
from dynamo.core.errors import ConfigError

OUTPUT_DIR = "profiling_results"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilerConfig:
    """Finds a deployment of a model that meets latency targets, and writes it as `final_config.yaml`."""

    config: str | None = option(
        None, "--config", None, "Spec of a DynamoGraphDeploymentRequest: inline JSON, or a JSON or YAML file (required)"
    )
    output_dir: str = option(OUTPUT_DIR, "--output-dir", None, "Folder of results")
    deployment_timeout: int = option(
        3600, "--deployment-timeout", None, "Thorough: maximum seconds until a deployment is ready"
    )
    prefill_interpolation_granularity: int = option(
        16, "--prefill-interpolation-granularity", None, "Prompt lengths of the prefill curve"
    )
    decode_interpolation_granularity: int = option(
        6, "--decode-interpolation-granularity", None, "Context lengths, and loads of each, of the decode curve"
    )
    local_worker: str | None = option(
        None,
        "--local-worker",
        None,
        "Thorough: command of a worker that is measured on this machine; {model} and {engine_args} are replaced",
        metavar="COMMAND",
    )
    load_generator: str = option(
        "replay",
        "--load-generator",
        None,
        "Thorough: load generator, that of dynamo replay or aiperf",
        choices=("replay", "aiperf"),
    )
    aiperf: str = option(
        "aiperf",
        "--aiperf",
        None,
        "Thorough: program of aiperf, such as one in an environment of its own",
        metavar="PATH",
    )
    dry_run: bool = option(False, "--dry-run", None, "Check the spec and stop: no search, an empty result")

    def __post_init__(self) -> None:
        if self.config is None:
            raise ConfigError("--config: missing; must be inline JSON, or a JSON or YAML file")
        for flag, value in (
            ("--deployment-timeout", self.deployment_timeout),
            ("--prefill-interpolation-granularity", self.prefill_interpolation_granularity),
            ("--decode-interpolation-granularity", self.decode_interpolation_granularity),
        ):
            if value < 1:
                raise ConfigError(f"{flag} {value}: must be 1 or more")
