"""Collector of a local graph: logs, the frontend, processes, discovery records, and the doctor's checks of the machine."""

import contextlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dynamo.core.errors import ConfigError, StartupError
from dynamo.ops.archive import tail_of
from dynamo.ops.doctor.bundle import FRONTEND_FILES, discovery_file, log_files, redacted_record
from dynamo.ops.doctor.collect import collect, rows_of_machine
from dynamo.ops.doctor.command import is_port
from dynamo.ops.doctor.directory import records
from dynamo.ops.doctor.network import fetch
from dynamo.ops.doctor.sockets import listener_pid
from dynamo.ops.graphs import FoundGraph, find_graphs
from dynamo.ops.local_graph import (
    FAILED_PREFIX,
    LOG_BYTES_MAX,
    local_processes,
    logs_in,
    process_values,
    serve_directories,
    variables_of,
)
from dynamo.ops.redaction import redacted_json
from dynamo.ops.report import as_json
from dynamo.ops.settings_in_force import REGISTRY_SETTINGS, settings_in_force
from dynamo.ops.troubleshoot.graph_signatures import FAILED_START
from dynamo.runtime.discovery.file import EXPIRY_S, default_root

RECORDS = "v1"
"""Directory of the records below a discovery directory."""
DEFAULT_PORT = 8000
FAILED_START_S = (
    3600.0  # Maximum age of a failed start that is reported; older ones are unrelated to the present problem.
)
LOST_S = 3600.0  # Maximum age of an expired record that is reported.
SERVERS = ("ETCD_", "NATS_", "DYN_EVENT_PLANE", "DYN_REQUEST_PLANE", "DYN_DISCOVERY_BACKEND")
"""Settings of a graph's processes that name servers; the shell of the user may lack them."""


def local_files(
    url: str | None, logs: str | None, variables: Mapping[str, str], graph: FoundGraph | None = None
) -> dict[str, str]:
    """Return what can be seen of a graph on this machine, by default of the newest. Raise `ConfigError` for unreadable logs.

    Without `url`, the frontend is that of this or the newest running graph of `dynamo serve`, or the one at DYN_HTTP_PORT,
    8000 by default.
    """
    files: dict[str, str] = {}
    discovery: list[str] = []
    if logs is not None:
        files |= log_files("logs", given_logs(logs))
    with contextlib.suppress(StartupError):  # No usable temporary directory; the doctor's rows name the reason.
        running = [one for one in find_graphs() if one.is_running]
        url = url or next((one.record.url for one in ([graph] if graph else running)), None)
        discovery.append(default_root())
        if logs is None:
            chosen = [graph.directory] if graph else serve_directories()[:1]
            files |= {} if graph else failed_start(chosen, time.time())
            for directory in chosen:
                files |= log_files("run-1", logs_in(directory))
                discovery.insert(0, str(directory / "discovery"))
    url = url or default_url(variables)
    for name, path in FRONTEND_FILES:
        status, _, text = fetch(url, path, variables.get("DYN_API_KEY", "") if path == "/v1/models" else "")
        if status in {200, 503} and text:
            files[name] = redacted_record(text)
    port = urlsplit(url).port or 80
    pid = listener_pid(port)
    processes = of_frontend(process_values(local_processes()), pid)
    if processes:
        files["processes.json"] = json.dumps(processes, indent=2)
        discovery += [one["variables"]["DYN_FILE_KV"] for one in processes if "DYN_FILE_KV" in one["variables"]]
    found, expired = live_and_expired(discovery, time.time())
    if found:
        files["discovery.json"] = discovery_file(found)
    if expired:
        files["expired.json"] = json.dumps([{"key": key, "seconds": seconds} for key, seconds in expired], indent=2)
    facts = collect(
        settings_of(processes, pid, variables), host=urlsplit(url).hostname or "", http_port=port, model=None
    )
    files["report.json"] = json.dumps(redacted_json(json.loads(as_json(rows_of_machine(facts)))), indent=2)
    return files


def default_url(variables: Mapping[str, str]) -> str:
    """Return the URL of a frontend with the default settings; a port that is not one is a row of the doctor."""
    text = variables.get("DYN_HTTP_PORT", "").strip()
    return f"http://127.0.0.1:{text if is_port(text) else DEFAULT_PORT}"


def live_and_expired(
    directories: Sequence[str], now: float
) -> tuple[list[tuple[str, float, str]], list[tuple[str, float]]]:
    """Return key, modification time and text of the live records; key and age in seconds of those that expired lately."""
    live, expired = [], []
    for root in dict.fromkeys(directories):
        for key, status, data in records(root) if os.path.isdir(os.path.join(root, RECORDS)) else ():
            age_s = now - status.st_mtime
            if age_s <= EXPIRY_S:
                live.append((key, status.st_mtime, data.decode(errors="replace")))
            elif age_s <= LOST_S:
                expired.append((key, round(age_s, 1)))
    return live, expired


def failed_start(newest: Sequence[Path], now: float) -> dict[str, str]:
    """Return the log of a recent start that failed, unless a graph was started after it. Raise `StartupError`."""
    since = max([now - FAILED_START_S, *(one.stat().st_mtime for one in newest)])
    return {
        name: text
        for directory in serve_directories(prefix=FAILED_PREFIX)[:1]
        if directory.stat().st_mtime > since
        for name, text in log_files(FAILED_START, logs_in(directory)).items()
    }


def settings_of(
    processes: Sequence[Mapping[str, Any]], pid: int | None, variables: Mapping[str, str]
) -> dict[str, str]:
    """Return the user's variables with the servers of the frontend with this pid, or of the only graph of this machine."""
    own = dict(variables)
    registries = {tuple(one["variables"].get(name) for name in REGISTRY_SETTINGS) for one in processes}
    frontend = [one for one in processes if one["pid"] == pid]
    for one in frontend or (processes[:1] if len(registries) == 1 else ()):
        found = settings_in_force(variables_of(one["pid"]), str(one["command"]).split())
        own |= {name: value for name, value in found.items() if name.startswith(SERVERS)}
    return own


def of_frontend(processes: list[dict[str, Any]], pid: int | None) -> list[dict[str, Any]]:
    """Return the processes with the registry of the frontend with this pid; all if it has none there, or is not known.

    Several graphs may run on one machine. A frontend without workers may be one whose workers use another registry.
    """
    registries = {one["pid"]: tuple(one["variables"].get(name) for name in REGISTRY_SETTINGS) for one in processes}
    own = [one for one in processes if pid in registries and registries[one["pid"]] == registries[pid]]
    return own if any(one["module"] != "dynamo.frontend" for one in own) else processes


def given_logs(path: str) -> dict[str, str]:
    """Return the log file, or the `*.log` files of a directory. Raise `ConfigError`."""
    if os.path.isdir(path):
        found = logs_in(Path(path))
        if not found:
            raise ConfigError(f"--logs {path}: no *.log file in this directory")
        return found
    try:
        return {os.path.basename(path): tail_of(path, LOG_BYTES_MAX).decode(errors="replace")}
    except OSError as error:
        raise ConfigError(f"--logs {path}: {error.strerror or error}") from None
