"""Options of `dynamo serve`: its own few, and those of the frontend and of the engine, each judged by its owner."""

import dataclasses
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from dynamo.backend.config import DisaggregatedOptions
from dynamo.backend.disagg import DisaggregationMode
from dynamo.cli.announcement import Api
from dynamo.cli.graph import PLANES
from dynamo.core.config import as_flags, build_parser, from_namespace, option
from dynamo.core.errors import ConfigError
from dynamo.core.waiting import Waiting, declared_flags, without_waiting

ENGINES = ("cpu", "mocker")
DEFAULT_HOST = "127.0.0.1"  # A model that is tried out on a laptop is not to be served to its network.
WORKERS_MAX = 64  # Processes on one machine; more is a mistyped number.


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Serve a model on this machine: one frontend and its workers, as processes that start and end together."""

    COMMON: ClassVar = (
        "--engine",
        "--workers",
        "--prefill-workers",
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
        None, "MODEL", None, "Directory in Hugging Face layout, or a hub id; the bundled demo model without it"
    )
    engine: str = option("cpu", "--engine", "DYN_SERVE_ENGINE", "What computes the tokens", choices=ENGINES)
    workers: int = option(1, "--workers", "DYN_SERVE_WORKERS", "Engine processes behind the frontend")
    prefill_workers: int = option(
        0,
        "--prefill-workers",
        "DYN_SERVE_PREFILL_WORKERS",
        "Further engine processes, which compute the prompts; the others go on from what they computed",
    )
    verbose: bool = option(
        False, "--verbose", None, "Show the processes' own logs here; naming a level in DYN_LOG does too"
    )

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= WORKERS_MAX:
            raise ConfigError(f"--workers {self.workers}: expected 1 to {WORKERS_MAX}")
        if not 0 <= self.prefill_workers <= WORKERS_MAX:
            raise ConfigError(f"--prefill-workers {self.prefill_workers}: expected 0 to {WORKERS_MAX}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """A whole command line, read and judged."""

    serve: ServeConfig
    frontend: Any
    """`FrontendConfig`."""
    engine: Any
    """The engine's own configuration."""
    is_demo: bool
    """No model was named, so the bundled one is served."""
    keys: Any
    """`GivenKeys` of the frontend."""

    @property
    def needs_key(self) -> bool:
        """Whether the frontend refuses requests without an API key."""
        return bool(self.keys.keys or self.keys.admin_keys or self.frontend.api_keys_file)

    def frontend_flags(self, port: int) -> list[str]:
        """What the frontend's command line says, as far as it differs from the defaults; the port it is to take."""
        return as_flags(dataclasses.replace(self.frontend, http_port=port))

    def engine_flags(self, cores: int) -> list[str]:
        """What each engine's command line says, as far as it differs from the defaults; engines share the cores."""
        flags = as_flags(self.engine)
        processes = self.serve.workers + self.serve.prefill_workers
        if self.serve.engine == "cpu" and self.engine.threads is None and processes > 1:
            from dynamo.cpu.blas import suitable_threads

            flags.append(f"--threads={suitable_threads(self.engine.directory, processes, cores)}")
        return flags


def read(argv: Sequence[str], variables: Mapping[str, str]) -> Options:
    """The command line. Raises `ConfigError` for a flag that none of the three knows, naming its nearest neighbour."""
    from dynamo.frontend.config import FrontendConfig, api_keys
    from dynamo.frontend.waiting import WAITING

    variables = {name: value for name, value in variables.items() if name not in PLANES}
    variables["DYN_HTTP_HOST"] = variables.get("DYN_HTTP_HOST") or DEFAULT_HOST
    serve, _ = build_parser(ServeConfig, variables=variables, prog="dynamo serve").parse_known_args(
        [word for word in argv if word not in {"-h", "--help", "--help-all"}]
    )
    engine_type, engine_waiting = config_of(serve.engine)
    declared = declared_flags(ServeConfig) | declared_flags(engine_type) | declared_flags(FrontendConfig)
    argv = without_waiting((*WAITING, *engine_waiting), argv, variables, declared)
    whole = build_parser(ServeConfig, engine_type, FrontendConfig, variables=variables, prog="dynamo serve")
    config = from_namespace(ServeConfig, whole.parse_args(list(argv)))
    engine = _own(engine_type, _with_model(argv, config), variables)
    frontend = _own(FrontendConfig, argv, variables)
    if config.prefill_workers:
        _check_roles(config, engine)
    if frontend.interactive:
        raise ConfigError("--interactive: dynamo serve has no conversation; dynamo chat talks to what it serves")
    if frontend.kserve_grpc_server:
        raise ConfigError(
            "--kserve-grpc-server: dynamo serve asks its frontend over HTTP; run python -m dynamo.frontend"
        )
    if frontend.tls_client_ca_cert_path is not None:
        raise ConfigError(
            "--tls-client-ca-cert-path: dynamo serve has no certificate with which to ask whether the frontend is "
            "ready; start python -m dynamo.frontend and its workers one by one"
        )
    return Options(
        serve=config,
        frontend=frontend,
        engine=engine,
        is_demo=engine.model_path is None,
        keys=api_keys(frontend, variables),
    )


def api_of(engine: Any) -> Api:
    """Return the API that an engine's model is first tried with: chat only where the model has a chat template."""
    if getattr(engine, "embedding_worker", False):
        return Api.EMBEDDINGS
    if getattr(engine, "classify_worker", False):
        return Api.CLASSIFY
    has_template = engine.custom_jinja_template is not None or has_chat_template(engine.model_path)
    return Api.CHAT if "chat" in engine.endpoint_types and has_template else Api.COMPLETIONS


def has_chat_template(directory: str | None) -> bool:
    """Return whether a model directory has a chat template; True for the bundled model, and where it cannot be read."""
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
    """Raises `ConfigError` where an engine's processes cannot be told which part of a request is theirs."""
    if not isinstance(engine, DisaggregatedOptions):
        raise ConfigError(f"--prefill-workers {config.prefill_workers}: --engine {config.engine} has no such workers")
    if engine.role is not DisaggregationMode.AGGREGATED:
        raise ConfigError("--prefill-workers and --disaggregation-mode: expected one of them")


def config_of(engine: str) -> tuple[type[Any], Sequence[Waiting]]:
    """The class that declares an engine's options, and what it leaves out; only the chosen engine's is imported."""
    if engine == "mocker":
        from dynamo.mocker import waiting
        from dynamo.mocker.config import MockerConfig

        return MockerConfig, waiting.WAITING
    from dynamo.backend.waiting import WAITING
    from dynamo.cpu.config import CpuConfig

    return CpuConfig, WAITING


def _own(config_type: type[Any], argv: Sequence[str], variables: Mapping[str, str]) -> Any:
    """One owner's part of a command line whose words are all known to belong to somebody."""
    namespace, _ = build_parser(config_type, variables=variables, prog="dynamo serve").parse_known_args(list(argv))
    return from_namespace(config_type, namespace)


def _with_model(argv: Sequence[str], config: ServeConfig) -> list[str]:
    """MODEL is another way to write `--model-path`; a hub id is fetched once here, and served under its own name."""
    if config.model is None:
        return list(argv)
    if _is_given(argv, "--model-path"):
        raise ConfigError(f"MODEL {config.model!r} and --model-path: give one of them")
    from dynamo.model_card.hub import resolve_model

    directory = resolve_model(config.model)
    is_hub_id = not Path(config.model).expanduser().is_dir()
    name = [f"--model-name={config.model}"] if is_hub_id and not _is_given(argv, "--model-name") else []
    return [*argv, *name, f"--model-path={directory}"]


def _is_given(argv: Sequence[str], flag: str) -> bool:
    return any(word == flag or word.startswith(f"{flag}=") for word in argv)


def own_command(argv0: str) -> str:
    """How the user can type `dynamo` again: the bare word if that finds this program, else the way it was called."""
    found = shutil.which("dynamo")
    if found is not None and Path(found).resolve() == Path(argv0).resolve():
        return "dynamo"
    if Path(argv0).name != "dynamo":
        return f"{Path(sys.executable).name} -m dynamo.cli"
    path = Path(argv0)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else argv0
