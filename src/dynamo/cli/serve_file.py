"""Serving from a file: `dynamo serve -f graph.yaml` runs the components of a DynamoGraphDeployment on this machine."""

import dataclasses
import os
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dynamo import __version__
from dynamo.cli import options
from dynamo.cli.announcement import Announcement
from dynamo.cli.autoscale import visible_devices
from dynamo.cli.command_lines import as_commands, as_json
from dynamo.cli.graph import PLANES, GraphLocation
from dynamo.cli.graph_file import FileGraph, frontend_arguments, translate, with_flags
from dynamo.cli.machine import reserve_port
from dynamo.cli.manifests import Manifest, check_manifests, read_manifests
from dynamo.cli.session import LOGS_KEPT, PREFIX, ServeSession, shows_logs
from dynamo.core.config import as_flags, build_parser, from_namespace, load, option
from dynamo.core.errors import ConfigError
from dynamo.core.known_variables import warnings as unknown_variables
from dynamo.core.locked_directory import LockedDirectory
from dynamo.core.progress import ProgressLine
from dynamo.operator.conversion.convert import convert
from dynamo.operator.defaulting import with_defaults
from dynamo.operator.validation.facts import AdmissionFacts, part
from dynamo.operator.validation.views import components_of
from dynamo.protocols.kubernetes.common import V1BETA1, KubeObject

FILE_FLAGS = ("-f", "--file")
KIND = "DynamoGraphDeployment"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeFileConfig:
    """Run the components of a graph file on this machine: a DynamoGraphDeployment, or its spec with `components`."""

    file: str | None = option(
        None, "--file", None, "Graph file (YAML or JSON), - for the standard input", aliases=("-f",)
    )
    graph: str | None = option(None, "--graph", None, "Name of the graph, if the file has several")
    http_host: str | None = option(
        None, "--http-host", None, "Address of the frontend; default: the file's, or 127.0.0.1"
    )
    http_port: int | None = option(
        None, "--http-port", None, "Port of the frontend, 0 for a free one; default: the file's, or 8000"
    )
    share_gpus: bool = option(False, "--share-gpus", None, "Let all workers use all GPUs of this machine")
    dry_run: bool = option(False, "--dry-run", None, "Print the command lines of the processes without starting them")
    json: bool = option(False, "--json", None, "With --dry-run: print JSON")
    verbose: bool = option(
        False, "--verbose", None, "Show the processes' logs in this terminal; so does setting DYN_LOG"
    )

    def __post_init__(self) -> None:
        if self.json and not self.dry_run:
            raise ConfigError("--json: requires --dry-run")


def names_file(argv: Sequence[str]) -> bool:
    """Return whether a command line of `dynamo serve` names a graph file."""
    own = argv[: argv.index("--")] if "--" in argv else argv
    return any(word.partition("=")[0] in FILE_FLAGS for word in own)


def serve_file(argv: Sequence[str], variables: Mapping[str, str], started: float) -> int:
    """Run `dynamo serve -f FILE`; return the exit status. Raise `ConfigError` before any process is started."""
    config = load(ServeFileConfig, argv, variables, prog="dynamo serve")
    value = graph_of(read_manifests([config.file or ""]), config.graph)
    for warning in unknown_variables(variables):
        sys.stderr.write(f"warning: {warning}\n")
    # Programs that a shell of a container starts by name are those of this environment.
    path = os.pathsep.join((str(Path(sys.executable).parent), variables.get("PATH", os.defpath)))
    variables = {**variables, "PATH": path}
    graph = translated(value, variables, variables.get("DYN_FILE_KV") or f"{PREFIX}…/discovery", config)
    frontend, keys, session_key = frontend_of(graph, config, variables)
    for note in graph.notes:
        sys.stderr.write(f"note: {note}\n")
    if config.dry_run:
        graph = with_frontend(graph, frontend, {}, frontend.http_port)
        print(as_json(graph.name, graph, graph.gpus, graph.notes) if config.json else as_commands(graph))
        return 0
    devices = visible_devices(variables) if graph.gpus and not config.share_gpus else []
    with reserve_port(frontend.http_host, frontend.http_port) as reserved:
        if devices or (graph.gpus and not config.share_gpus):
            graph.with_devices(devices)  # Too few GPUs are an error before anything is created.
        port = reserved.getsockname()[1]
        home = LockedDirectory(PREFIX, logs_kept=LOGS_KEPT)
        if not variables.get("DYN_FILE_KV"):
            graph = translated(value, variables, str(home.path / "discovery"), config)
        graph = with_frontend(graph if not devices else graph.with_devices(devices), frontend, keys, port)
        session = ServeSession(
            graph,
            announcement_of(graph, frontend, port, needs_key=session_key is not None),
            home,
            variables,
            ProgressLine(started=started),
            name=graph.name,
            verbose=shows_logs(config.verbose, variables),
            key=session_key,
        )
        return session.run()


def graph_of(manifests: Sequence[Manifest], name: str | None) -> KubeObject:
    """Return the graph of a file as v1beta1, checked by the admission rules. Raise `ConfigError`."""
    found = [as_graph(one) for one in manifests]
    graphs = [one for one in found if one is not None and name in {None, one.name}]
    if len(graphs) != 1:
        names = ", ".join(one.name for one in found if one is not None) or "none"
        raise ConfigError(f"{manifests[0].file}: expected one {KIND}; found: {names}; select one with --graph")
    problems, warnings, _ = check_manifests(graphs, AdmissionFacts(may_exist=True))
    for text in warnings:
        sys.stderr.write(f"warning: {text}\n")
    if problems:
        raise ConfigError("; ".join(problems))
    return with_defaults(convert(graphs[0].value, V1BETA1), None, operator_version=__version__)


def as_graph(manifest: Manifest) -> Manifest | None:
    """Return a manifest as that of a graph: a file with only `components` is the spec of one. None for other kinds."""
    value = manifest.value
    if manifest.kind == KIND:
        return manifest
    if not manifest.kind and isinstance(value.get("components"), list):
        stem = re.sub(r"[^a-z0-9-]+", "-", Path(manifest.file).stem.lower()).strip("-") or "graph"
        name = str(value.get("name") or stem)
        spec = {key: one for key, one in value.items() if key != "name"}
        made = {"apiVersion": V1BETA1, "kind": KIND, "metadata": {"name": name}, "spec": spec}
        return Manifest(manifest.file, made)
    return None


def translated(value: KubeObject, variables: Mapping[str, str], discovery: str, config: ServeFileConfig) -> FileGraph:
    """Return the processes of a graph with this discovery directory."""
    spec = part(value, "spec")
    return translate(
        str(value["metadata"]["name"]),
        components_of(spec, is_alpha=False),
        spec.get("env") or (),
        GraphLocation(discovery=discovery, is_private=not variables.get("DYN_FILE_KV"), variables=variables),
        verbose=config.verbose,
    )


def frontend_of(
    graph: FileGraph, config: ServeFileConfig, variables: Mapping[str, str]
) -> tuple[Any, dict[str, str], str | None]:
    """Return the frontend's settings, the variables of its API keys, and the key of this session if it needs one."""
    from dynamo.frontend.config import FrontendConfig, api_keys

    own = {name: value for name, value in graph.frontend.variables.items() if value is not None and name not in PLANES}
    known = {name: value for name, value in variables.items() if name not in PLANES} | own
    known["DYN_HTTP_HOST"] = known.get("DYN_HTTP_HOST") or options.DEFAULT_HOST
    flags = frontend_arguments(graph.frontend.command) or []
    frontend = from_namespace(
        FrontendConfig, build_parser(FrontendConfig, variables=known, prog="dynamo.frontend").parse_args(flags)
    )
    frontend = dataclasses.replace(
        frontend,
        http_host=frontend.http_host if config.http_host is None else config.http_host,
        http_port=frontend.http_port if config.http_port is None else config.http_port,
    )
    options.refuse_unsupported(frontend)
    keys = api_keys(frontend, known)
    if not (keys.keys or keys.admin_keys or frontend.api_keys_file):
        return frontend, keys.variables, None
    session_key = secrets.token_urlsafe(32)
    return frontend, msgspec.structs.replace(keys, keys=(*keys.keys, session_key)).variables, session_key


def with_frontend(graph: FileGraph, frontend: Any, keys: Mapping[str, str], port: int) -> FileGraph:
    """Return the graph with the frontend's flags, port and keys; a frontend that a shell starts receives variables."""
    process = graph.frontend
    if frontend_arguments(process.command) is not None:
        process = with_flags(process, as_flags(dataclasses.replace(frontend, http_port=port)), keys)
    else:
        address = {"DYN_HTTP_HOST": frontend.http_host, "DYN_HTTP_PORT": str(port)}
        process = dataclasses.replace(process, variables={**process.variables, **address, **keys})
    return dataclasses.replace(graph, frontend=process)


def announcement_of(graph: FileGraph, frontend: Any, port: int, *, needs_key: bool) -> Announcement:
    """Return the facts of the text for the user."""
    return Announcement(
        engine=graph.name,
        workers=len(graph.workers),
        is_demo=False,
        host=frontend.http_host,
        port=port,
        command=options.own_command(sys.argv[0]),
        is_tls=frontend.tls_cert_path is not None,
        needs_key=needs_key,
    )
