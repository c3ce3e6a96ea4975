"""Options of `dynamo serve`: its own, and those of the frontend and the engine, each validated by its own class."""

import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dynamo.backend.config import UNSUPPORTED_WORKER_FLAGS, DisaggregatedOptions
from dynamo.backend.disagg import DisaggregationMode
from dynamo.cli.announcement import Api
from dynamo.cli.external import CHAT, KINDS, ExternalEngine, value_of
from dynamo.cli.graph import PLANES
from dynamo.core.config import as_flags, build_parser, from_namespace, option, split_arguments
from dynamo.core.errors import ConfigError
from dynamo.core.unsupported_flags import UnsupportedFlag, declared_flags, drop_unsupported

if TYPE_CHECKING:
    from dynamo.planner.config.planner_config import PlannerConfig

ENGINES = ("cpu", "mocker", *KINDS)
DEFAULT_HOST = "127.0.0.1"  # A model served on a laptop must not be exposed to the network by default.
PLANNED_MIGRATIONS = 3  # A long request may lose several workers while their number falls.
WORKERS_MAX = 64  # Processes on one machine; a larger number is probably a typing error.


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Serve a model on this machine: one frontend and its workers, as processes that start and end together."""

    COMMON: ClassVar = (
        "--file",
        "--engine",
        "--workers",
        "--prefill-workers",
        "--planner",
        "--max-workers",
        "--dry-run",
        "--verbose",
        "--model-name",
        "--max-model-len",
        "--max-num-seqs",
        "--kv-cache-memory-mb",
        "--threads",
        "--speedup-ratio",
        "--dyn-tool-call-parser",
        "--dyn-reasoning-parser",
        "--http-host",
        "--http-port",
        "--router-mode",
        "--migration-limit",
        "--api-keys-file",
        "--tls-cert-path",
        "--tls-key-path",
    )
    model: str | None = option(
        None,
        "MODEL",
        None,
        "Directory in Hugging Face layout, or a Hugging Face model id; default: the bundled demo model",
    )
    file: str | None = option(
        None,
        "--file",
        None,
        "Graph file to run instead of MODEL; -f FILE --help",
        aliases=("-f",),
    )
    engine: str = option("cpu", "--engine", "DYN_SERVE_ENGINE", "Engine that generates the tokens", choices=ENGINES)
    workers: int = option(1, "--workers", "DYN_SERVE_WORKERS", "Number of engine processes")
    prefill_workers: int = option(
        0,
        "--prefill-workers",
        "DYN_SERVE_PREFILL_WORKERS",
        "Number of further engine processes for prefill only; those of --workers then only decode",
    )
    planner: str | None = option(
        None,
        "--planner",
        None,
        "Let the planner choose the number of workers, from --workers to --max-workers; CONFIG: its settings as a file "
        "or inline JSON",
        metavar="CONFIG",
        extra={"const": "{}"},
    )
    max_workers: int | None = option(
        None, "--max-workers", "DYN_SERVE_MAX_WORKERS", "Most engine processes with --planner, prefill included"
    )
    gpus_per_worker: int | None = option(
        None,
        "--gpus-per-worker",
        "DYN_SERVE_GPUS_PER_WORKER",
        "GPUs of each engine process (CUDA_VISIBLE_DEVICES); 0: all share all; default: as its parallel sizes require",
    )
    dry_run: bool = option(False, "--dry-run", None, "Print the command lines of the processes without starting them")
    name: str | None = option(None, "--name", None, "Name of the graph in dynamo status; default: serve-PORT")
    verbose: bool = option(
        False, "--verbose", None, "Show the processes' logs in this terminal; so does setting DYN_LOG"
    )

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= WORKERS_MAX:
            raise ConfigError(f"--workers {self.workers}: must be from 1 to {WORKERS_MAX}")
        if not 0 <= self.prefill_workers <= WORKERS_MAX:
            raise ConfigError(f"--prefill-workers {self.prefill_workers}: must be from 0 to {WORKERS_MAX}")
        if self.gpus_per_worker is not None and not 0 <= self.gpus_per_worker <= WORKERS_MAX:
            raise ConfigError(f"--gpus-per-worker {self.gpus_per_worker}: must be from 0 to {WORKERS_MAX}")
        if self.planner is None:
            if self.max_workers is not None:
                raise ConfigError(f"--max-workers {self.max_workers}: requires --planner")
            return
        least = self.workers + self.prefill_workers
        if self.max_workers is None:
            raise ConfigError("--max-workers: missing; required with --planner")
        if not least <= self.max_workers <= WORKERS_MAX:
            raise ConfigError(
                f"--max-workers {self.max_workers}: must be from {least}, the workers of the start, to {WORKERS_MAX}"
            )

    @property
    def most_workers(self) -> int:
        """Return the most engine processes at a time."""
        return self.max_workers or self.workers + self.prefill_workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """A complete, validated command line."""

    serve: ServeConfig
    frontend: Any
    """`FrontendConfig`."""
    engine: Any
    """The engine's own configuration."""
    is_demo: bool
    """Whether no model was named, so that the bundled one is served."""
    keys: Any
    """`GivenKeys` of the frontend."""

    @property
    def needs_key(self) -> bool:
        """Whether the frontend refuses requests without an API key."""
        return bool(self.keys.keys or self.keys.admin_keys or self.frontend.api_keys_file)

    def frontend_flags(self, port: int) -> list[str]:
        """Return the frontend's flags that differ from the defaults, with its port."""
        return as_flags(dataclasses.replace(self.frontend, http_port=port))

    def engine_flags(self, cores: int) -> list[str]:
        """Return each engine's flags that differ from the defaults; the engines share the cores."""
        if isinstance(self.engine, ExternalEngine):
            return self.engine.flags()
        flags = as_flags(self.engine)
        processes = self.serve.most_workers
        if self.serve.engine == "cpu" and self.engine.threads is None and processes > 1:
            from dynamo.cpu.blas import suitable_threads

            flags.append(f"--threads={suitable_threads(self.engine.directory, processes, cores)}")
        return flags


def read(argv: Sequence[str], variables: Mapping[str, str]) -> Options:
    """Parse the command line. Raises `ConfigError` for an unknown flag, with the most similar known one."""
    from dynamo.frontend.config import UNSUPPORTED_FLAGS, FrontendConfig, api_keys

    argv, arguments = split_arguments(argv)
    variables = {name: value for name, value in variables.items() if name not in PLANES}
    variables["DYN_HTTP_HOST"] = variables.get("DYN_HTTP_HOST") or DEFAULT_HOST
    serve, _ = build_parser(ServeConfig, variables=variables, prog="dynamo serve").parse_known_args(
        [word for word in argv if word not in {"-h", "--help", "--help-all"}]
    )
    types: list[type[Any]] = [FrontendConfig]
    unsupported = list(UNSUPPORTED_FLAGS)
    is_external = serve.engine in KINDS
    if not is_external:
        argv = [*argv, *arguments]
        engine_type, engine_unsupported = config_of(serve.engine)
        types.insert(0, engine_type)
        unsupported += engine_unsupported
    declared = declared_flags(ServeConfig).union(*map(declared_flags, types))
    argv = drop_unsupported(tuple(unsupported), argv, variables, declared)
    whole = build_parser(ServeConfig, *types, variables=variables, prog="dynamo serve")
    namespace, unknown = whole.parse_known_args(argv)
    if unknown:
        hint = f"; arguments of {serve.engine} follow --" if is_external else ""
        whole.error(whole.describe_unknown(unknown[0]) + hint)
    config = from_namespace(ServeConfig, namespace)
    engine = (
        external_engine(config, arguments, getattr(namespace, "namespace", None))
        if is_external
        else _unpublished(_own(types[0], _with_model(argv, config), variables))
    )
    frontend = _own(FrontendConfig, _with_migrations(argv, config, variables), variables)
    if _has_no_policy(argv, variables, frontend):
        frontend = dataclasses.replace(frontend, router_policy="balanced")
    if config.prefill_workers:
        _check_roles(config, engine)
    refuse_unsupported(frontend)
    return Options(
        serve=config,
        frontend=frontend,
        engine=engine,
        is_demo=not is_external and engine.model_path is None,
        keys=api_keys(frontend, variables),
    )


def _has_no_policy(argv: Sequence[str], variables: Mapping[str, str], frontend: Any) -> bool:
    """Return whether the frontend routes by cached blocks, and neither a policy nor a setting of upstream's cost is given."""
    from dynamo.routing.settings import COST_SETTINGS, KvRouterOptions

    if frontend.mode != "kv" or frontend.load_aware or frontend.router_policy_config is not None:
        return False
    if _is_given(argv, "--router-policy") or variables.get("DYN_ROUTER_POLICY"):
        return False
    costs = [one for one in dataclasses.fields(KvRouterOptions) if one.name in COST_SETTINGS]
    return all(getattr(frontend, one.name) == one.default for one in costs)


def refuse_unsupported(frontend: Any) -> None:
    """Raise `ConfigError` for settings of the frontend that need a terminal, another protocol or certificates of clients."""
    if frontend.interactive:
        raise ConfigError("--interactive: not supported by dynamo serve; run dynamo chat in another terminal")
    if frontend.kserve_grpc_server:
        raise ConfigError(
            "--kserve-grpc-server: not supported by dynamo serve, which needs HTTP; run python -m dynamo.frontend"
        )
    if frontend.tls_client_ca_cert_path is not None:
        raise ConfigError(
            "--tls-client-ca-cert-path: not supported by dynamo serve, which has no client certificate for its health "
            "checks; start python -m dynamo.frontend and its workers one by one"
        )


def external_engine(config: ServeConfig, arguments: Sequence[str], namespace: str | None) -> ExternalEngine:
    """Return the settings of an external engine. A model id is downloaded once here. Raise `ConfigError`."""
    own = list(arguments)
    if namespace and namespace != "dynamo" and not _is_given(own, "--namespace"):
        own.insert(0, f"--namespace={namespace}")
    directory = None
    if config.model is not None:
        from dynamo.model_card.hub import resolve_model

        directory = resolve_model(config.model, weights=config.engine != "openai_proxy")
    name = None
    if directory is not None and config.model is not None and config.engine != "openai_proxy":
        name = Path(directory).name if Path(config.model).expanduser().is_dir() else config.model
    made = ExternalEngine(
        engine=config.engine,
        model_name=name,
        directory=directory,
        arguments=tuple(own),
        namespace=namespace or "dynamo",
    )
    template = value_of(own, ("--custom-jinja-template", "--chat-template"))
    return made if template is None else dataclasses.replace(made, custom_jinja_template=template)


def planner_config(chosen: Options) -> "PlannerConfig | None":
    """Return the settings of `--planner`; None without it. Raises `ConfigError` in one line."""
    serve = chosen.serve
    if serve.planner is None:
        return None
    from dynamo.cli.autoscale import planner_settings
    from dynamo.planner.config.source import from_mapping, read_argument

    if os.path.isdir(serve.planner):  # `Path.is_dir` raises for inline JSON that is longer than a file name.
        raise ConfigError(f"--planner {serve.planner}: must be a file or inline JSON; put MODEL before --planner")
    try:
        given = read_argument(serve.planner)
        if not isinstance(given, Mapping):
            raise ConfigError("must be an object with named fields")  # noqa: TRY301 - one place that names the flag
        return from_mapping(
            planner_settings(
                given,
                workers=serve.workers,
                prefill_workers=serve.prefill_workers,
                max_workers=serve.max_workers or serve.workers,
                namespace=chosen.engine.endpoint_id().namespace,
            )
        )
    except ConfigError as error:
        raise ConfigError(f"--planner: {error}") from None


def api_of(engine: Any) -> Api:
    """Return the API of the example request for an engine's model: chat only if the model has a chat template."""
    if getattr(engine, "embedding_worker", False):
        return Api.EMBEDDINGS
    if getattr(engine, "classify_worker", False):
        return Api.CLASSIFY
    has_template = engine.custom_jinja_template is not None or has_chat_template(engine.model_path)
    return Api.CHAT if CHAT in engine.endpoint_types and has_template else Api.COMPLETIONS


def has_chat_template(directory: str | None) -> bool:
    """Return whether a model directory has a chat template; True for the bundled model, and if it cannot be read."""
    if directory is None or not Path(directory).is_dir():
        return True
    if (Path(directory) / "chat_template.jinja").is_file():
        return True
    try:
        return bool(json.loads((Path(directory) / "tokenizer_config.json").read_bytes()).get("chat_template"))
    except FileNotFoundError:
        return False
    except (OSError, ValueError, AttributeError):  # The worker reports a file that it cannot read.
        return True


def _check_roles(config: ServeConfig, engine: Any) -> None:
    """Raise `ConfigError` if the roles of an engine's processes cannot be assigned."""
    if isinstance(engine, ExternalEngine):
        if not engine.has_roles:
            raise ConfigError(
                f"--prefill-workers {config.prefill_workers}: not supported by --engine {config.engine}; "
                "start python -m dynamo.openai_proxy once for each server, with --disaggregation-mode"
            )
        if engine.names_role:
            raise ConfigError("--prefill-workers and --disaggregation-mode are mutually exclusive")
        return
    if not isinstance(engine, DisaggregatedOptions):
        raise ConfigError(f"--prefill-workers {config.prefill_workers}: not supported by --engine {config.engine}")
    if engine.role is not DisaggregationMode.AGGREGATED:
        raise ConfigError("--prefill-workers and --disaggregation-mode are mutually exclusive")


def config_of(engine: str) -> tuple[type[Any], Sequence[UnsupportedFlag]]:
    """Return an engine's configuration class and its unsupported flags; only the chosen engine is imported."""
    if engine == "mocker":
        from dynamo.mocker.config import UNSUPPORTED_FLAGS, MockerConfig

        return MockerConfig, UNSUPPORTED_FLAGS
    from dynamo.cpu.config import CpuConfig

    return CpuConfig, UNSUPPORTED_WORKER_FLAGS


def _own(config_type: type[Any], argv: Sequence[str], variables: Mapping[str, str]) -> Any:
    """Return the configuration of one class from a command line whose flags are all known to one of the classes."""
    namespace, _ = build_parser(config_type, variables=variables, prog="dynamo serve").parse_known_args(list(argv))
    return from_namespace(config_type, namespace)


def _unpublished(engine: Any) -> Any:
    """Return an engine's configuration without router settings: those of the command line are the frontend's.

    A mocker would publish them on its card, in place of the frontend's own policy and queue.
    """
    from dynamo.mocker.config import AdvertisedOptions

    if not isinstance(engine, AdvertisedOptions):
        return engine
    defaults: dict[str, Any] = {one.name: one.default for one in dataclasses.fields(AdvertisedOptions)}
    return dataclasses.replace(engine, **defaults)


def _with_model(argv: Sequence[str], config: ServeConfig) -> list[str]:
    """Convert MODEL to `--model-path`; a model id is downloaded once here, and served under its own name."""
    if config.model is None:
        return list(argv)
    if _is_given(argv, "--model-path"):
        raise ConfigError(f"MODEL {config.model!r} and --model-path are mutually exclusive")
    from dynamo.model_card.hub import resolve_model

    directory = resolve_model(config.model)
    is_hub_id = not Path(config.model).expanduser().is_dir()
    name = [f"--model-name={config.model}"] if is_hub_id and not _is_given(argv, "--model-name") else []
    return [*argv, *name, f"--model-path={directory}"]


def _with_migrations(argv: Sequence[str], config: ServeConfig, variables: Mapping[str, str]) -> list[str]:
    """Enable migration with a planner: a worker that it stops ends a request that takes longer than its drain."""
    if config.planner is None or _is_given(argv, "--migration-limit") or variables.get("DYN_MIGRATION_LIMIT"):
        return list(argv)
    return [*argv, f"--migration-limit={PLANNED_MIGRATIONS}"]


def _is_given(argv: Sequence[str], flag: str) -> bool:
    return any(word == flag or word.startswith(f"{flag}=") for word in argv)


def own_command(argv0: str) -> str:
    """Return the command that starts `dynamo` again: the bare name if it finds this program, else as started."""
    found = shutil.which("dynamo")
    if found is not None and Path(found).resolve() == Path(argv0).resolve():
        return "dynamo"
    if Path(argv0).name != "dynamo":
        return f"{Path(sys.executable).name} -m dynamo.cli"
    path = Path(argv0)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else argv0
