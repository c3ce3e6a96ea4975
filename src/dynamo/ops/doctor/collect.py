"""Collection of all facts about this machine. Only reads; each request has a deadline."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Mapping

from dynamo.core.config import load
from dynamo.core.errors import ConfigError, StartupError
from dynamo.frontend.config import FrontendConfig
from dynamo.ops.doctor.checkpoint import checkpoint_facts, hub_home
from dynamo.ops.doctor.directory import directory_facts
from dynamo.ops.doctor.facts import (
    ApiServerFacts,
    ClockFacts,
    FrontendFacts,
    MachineFacts,
    PartFacts,
    PortFacts,
    ServiceFacts,
)
from dynamo.ops.doctor.host import gpu_facts, host_facts, temporary_space
from dynamo.ops.doctor.host_checks import gpu_rows, host_rows
from dynamo.ops.doctor.network import cluster_facts, etcd_facts, frontend_facts, nats_facts, port_facts
from dynamo.ops.doctor.package_checks import checkpoint_row, package_rows, version_row
from dynamo.ops.doctor.packages import package_facts
from dynamo.ops.doctor.service_checks import service_rows
from dynamo.ops.local_graph import local_processes, version_of
from dynamo.ops.report import CheckRow
from dynamo.runtime.config import RuntimeOptions, default_discovery

SYSTEM_PORT = 9090
"""Port of the system server in pods of the operator; on one machine there is none unless DYN_SYSTEM_PORT is set."""


def collect(variables: Mapping[str, str], *, host: str, http_port: int, model: str | None) -> MachineFacts:
    """Return the facts. Settings that are wrong are part of them."""
    backend, error = _settings(variables)
    ports = [port_facts("DYN_HTTP_PORT", host, http_port, is_needed=True), *_other_ports(variables)]
    frontend, clock = frontend_facts(host, http_port, variables) if ports[0].is_in_use else (None, None)
    ports[0] = dataclasses.replace(ports[0], is_dynamo=frontend is not None)
    services, clocks, cluster = asyncio.run(_services(variables, backend))
    directories = [("models", hub_home(variables))]
    directory = None
    with contextlib.suppress(StartupError):  # No usable temporary directory, which is a row of its own.
        directory = directory_facts(variables, time.time()) if backend in {"file", ""} else None
    if directory is not None:
        directories.append(("discovery", directory.path))
    return MachineFacts(
        variables=variables,
        backend=backend,
        settings_error=error,
        packages=package_facts(),
        gpus=gpu_facts(variables),
        host=host_facts(directories, temporary_space(variables.get("TMPDIR", ""))),
        ports=tuple(ports),
        frontend=frontend,
        directory=directory,
        services=services,
        cluster=cluster,
        clocks=tuple([clock] if clock else []) + clocks,
        parts=_parts(frontend),
        checkpoint=None if model is None else checkpoint_facts(model, variables),
    )


def rows_of_machine(facts: MachineFacts) -> list[CheckRow]:
    """Return all rows: what is installed, the machine, what processes connect to, and the model."""
    version = facts.frontend.version if facts.frontend else ""
    return [
        *package_rows(facts.packages, facts.variables),
        *gpu_rows(facts.gpus),
        *host_rows(facts.host),
        *service_rows(facts),
        version_row(facts.parts, version, facts.packages.version),
        *([checkpoint_row(facts.checkpoint)] if facts.checkpoint else []),
    ]


def _settings(variables: Mapping[str, str]) -> tuple[str, str]:
    """Return the discovery backend, and the error of the first wrong variable."""
    backend = variables.get("DYN_DISCOVERY_BACKEND") or default_discovery()
    try:
        backend = load(RuntimeOptions, (), variables).discovery_backend
        load(FrontendConfig, (), variables)
    except ConfigError as error:
        return backend, str(error)
    return backend, ""


def _other_ports(variables: Mapping[str, str]) -> list[PortFacts]:
    """Return the facts about the system port and the ports of the TCP plane, if they are fixed."""
    found = []
    for setting, host_setting, default in (
        ("DYN_SYSTEM_PORT", "DYN_SYSTEM_HOST", SYSTEM_PORT),
        ("DYN_TCP_RPC_PORT", "DYN_TCP_RPC_HOST", 0),
        ("DYN_TCP_RESPONSE_STREAM_PORT", "DYN_TCP_RESPONSE_STREAM_HOST", 0),
    ):
        text = variables.get(setting, "").strip()
        port = int(text) if text.isdigit() else default
        if 0 < port <= 65535:
            host = variables.get(host_setting) or "0.0.0.0"  # noqa: S104 - the default of these servers
            found.append(port_facts(setting, host, port, is_needed=bool(text)))
    return found


async def _services(
    variables: Mapping[str, str], backend: str
) -> tuple[tuple[ServiceFacts, ...], tuple[ClockFacts, ...], ApiServerFacts | None]:
    """Return the facts about etcd, NATS and Kubernetes, collected at the same time."""
    uses_nats = "nats" in {variables.get("DYN_REQUEST_PLANE"), variables.get("DYN_EVENT_PLANE")}
    uses_etcd = backend == "etcd"

    async def etcd() -> tuple[list[ServiceFacts], list[ClockFacts]]:
        if uses_etcd or variables.get("ETCD_ENDPOINTS"):
            return await etcd_facts(variables, is_required=uses_etcd)
        return [], []

    async def nats() -> list[ServiceFacts]:
        if uses_nats or variables.get("NATS_SERVER"):
            return [await nats_facts(variables, is_required=uses_nats or bool(variables.get("NATS_SERVER")))]
        return []

    (members, clocks), servers, cluster = await asyncio.gather(
        etcd(), nats(), cluster_facts(variables, is_required=backend == "kubernetes")
    )
    return (*members, *servers), tuple(clocks), cluster


def _parts(frontend: FrontendFacts | None) -> tuple[PartFacts, ...]:
    """Return the processes of graphs on this machine with their versions."""
    found = []
    for process in local_processes():
        product, version = version_of(process.command)
        name = f"{process.module.removeprefix('dynamo.')} (pid {process.pid})"
        if process.module == "dynamo.frontend" and frontend is not None and frontend.version:
            product, version = product or "dynamo-serve", version or frontend.version
        found.append(PartFacts(name=name, pid=process.pid, version=version, product=product))
    return tuple(found)
