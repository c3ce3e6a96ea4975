"""Serving: `dynamo serve` builds a graph from the command line or from a file, and runs it or prints it."""

import dataclasses
import json
import secrets
import shlex
import sys
from collections.abc import Mapping, Sequence

import msgspec

from dynamo.cli import options
from dynamo.cli.announcement import Announcement
from dynamo.cli.autoscale import planner_variables
from dynamo.cli.command_lines import as_commands
from dynamo.cli.external import PORT_BASE, RANKS, WORKERS, ExternalEngine, WorkerPorts
from dynamo.cli.graph import PREFILL, WORKER, GraphLocation, PerWorker, plan
from dynamo.cli.machine import cores, devices_of, free_port_base, reserve_port
from dynamo.cli.replicas import DevicePool
from dynamo.cli.session import LOGS_KEPT, PREFIX, ServeSession, shows_logs
from dynamo.core.config import environ
from dynamo.core.errors import ConfigError
from dynamo.core.known_variables import warnings as unknown_variables
from dynamo.core.locked_directory import LockedDirectory
from dynamo.core.parent import die_with_parent
from dynamo.core.progress import ProgressLine
from dynamo.ops.graphs import record_failed_start

PURPOSES = 5
"""Kinds of ports for each worker of an external engine."""


def serve(argv: list[str], started: float) -> int:
    """Run `dynamo serve`, started at the given time; return the exit status.

    Raises `ConfigError` before any process is started, and keeps it for `dynamo troubleshoot`.
    """
    from dynamo.cli.serve_file import names_file, serve_file

    die_with_parent()  # `dynamo-run` starts this command.
    variables = environ()
    try:
        return serve_file(argv, variables, started) if names_file(argv) else serve_model(argv, variables, started)
    except ConfigError as error:
        if "--dry-run" not in argv:  # That starts nothing.
            record_failed_start(shlex.join(["dynamo", "serve", *argv]), str(error))
        raise


def serve_model(argv: list[str], variables: Mapping[str, str], started: float) -> int:
    """Serve the model of a command line; return the exit status. Raise `ConfigError` before any process is started."""
    chosen = options.read(argv, variables)
    for warning in unknown_variables(variables):
        sys.stderr.write(f"warning: {warning}\n")
    host = chosen.frontend.http_host
    reserved = reserve_port(host, chosen.frontend.http_port)  # Until the end, also between two runs of the frontend.
    port = reserved.getsockname()[1]
    keys, session_key = chosen.keys, None
    if chosen.needs_key:  # This process lists the models to see whether they are served, so it needs a key too.
        session_key = secrets.token_urlsafe(32)
        keys = msgspec.structs.replace(keys, keys=(*keys.keys, session_key))
    planner = options.planner_config(chosen)
    is_external = isinstance(chosen.engine, ExternalEngine)
    devices = devices_of(chosen.serve, chosen.engine.gpus if is_external else 0, variables)
    with reserved:
        home = None if chosen.serve.dry_run else LockedDirectory(PREFIX, logs_kept=LOGS_KEPT)
        discovery = variables.get("DYN_FILE_KV") or (
            f"{PREFIX}…/discovery" if home is None else str(home.path / "discovery")
        )
        graph = plan(
            GraphLocation(discovery=discovery, is_private=not variables.get("DYN_FILE_KV"), variables=variables),
            engine=chosen.serve.engine,
            workers=chosen.serve.workers,
            prefill_workers=chosen.serve.prefill_workers,
            max_workers=chosen.serve.max_workers,
            planner_config=None if planner is None else json.dumps(planner.as_json()),
            planner_variables=None if planner is None else planner_variables(planner),
            frontend_flags=chosen.frontend_flags(port),
            engine_flags=chosen.engine_flags(cores()),
            key_variables=keys.variables,
            per_worker=per_worker(chosen, has_gpus=devices is not None),
            devices={} if devices is None or planner is not None else assigned(chosen.serve, devices),
            verbose=chosen.serve.verbose,
        )
        if home is None:
            print(as_commands(graph))
            return 0
        announcement = announcement_of(chosen, host, port)
        session = ServeSession(
            graph,
            announcement,
            home,
            variables,
            ProgressLine(started=started),
            name=chosen.serve.name or "",
            verbose=shows_logs(chosen.serve.verbose, variables),
            key=session_key,
        )
        if planner is not None:
            session.autoscale(discovery, planner.namespace, chosen.serve.max_workers or 1, devices)
        return session.run()


def announcement_of(chosen: options.Options, host: str, port: int) -> Announcement:
    """Return the text's facts."""
    return Announcement(
        engine=chosen.serve.engine,
        workers=chosen.serve.workers,
        prefill_workers=chosen.serve.prefill_workers,
        is_demo=chosen.is_demo,
        host=host,
        port=port,
        command=options.own_command(sys.argv[0]),
        is_tls=chosen.frontend.tls_cert_path is not None,
        needs_key=chosen.needs_key,
        api=options.api_of(chosen.engine),
    )


def per_worker(chosen: options.Options, *, has_gpus: bool) -> PerWorker | None:
    """Return the flags and ports by which workers of an external engine differ; None for the others."""
    if not isinstance(chosen.engine, ExternalEngine):
        return None
    made: WorkerPorts = chosen.engine.per_worker(
        has_events=chosen.frontend.mode == "kv",
        has_roles=bool(chosen.serve.prefill_workers),
        has_gpus=has_gpus,
        has_planner=chosen.serve.planner is not None,
        port_base=PORT_BASE,
    )
    indexes = range(chosen.serve.most_workers)
    offsets = [made.port(purpose, index) - PORT_BASE for purpose in range(PURPOSES) for index in indexes]
    return dataclasses.replace(made, base=free_port_base(PORT_BASE, offsets, PURPOSES * WORKERS * RANKS))


def assigned(serve: options.ServeConfig, devices: DevicePool) -> dict[str, Sequence[str]]:
    """Return the GPUs of each worker, by its name."""
    found: dict[str, Sequence[str]] = {}
    for role, count in ((WORKER, serve.workers), (PREFILL, serve.prefill_workers)):
        for number in range(1, count + 1):
            name = f"{role}-{number}"
            found[name] = devices.take(name) or ()
    return found
