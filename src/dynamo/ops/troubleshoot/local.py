"""Collector of a local graph: logs of `dynamo serve` or of a directory, the frontend, processes, discovery records."""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dynamo.core.errors import ConfigError
from dynamo.ops.archive import tail_of
from dynamo.ops.doctor.bundle import FRONTEND_FILES, discovery_file, log_files, redacted_record
from dynamo.ops.doctor.directory import records
from dynamo.ops.doctor.network import fetch
from dynamo.ops.doctor.sockets import listener_pid
from dynamo.ops.local_graph import LOG_BYTES_MAX, local_processes, logs_in, process_values, serve_directories
from dynamo.ops.settings_in_force import REGISTRY_SETTINGS
from dynamo.runtime.discovery.file import EXPIRY_S, default_root

RECORDS = "v1"
"""Directory of the records below a discovery directory."""


def local_files(url: str, logs: str | None, variables: Mapping[str, str]) -> dict[str, str]:
    """Return what can be seen of the graph on this machine. Raise `ConfigError` for logs that cannot be read."""
    files: dict[str, str] = {}
    discovery = [default_root()]
    if logs is not None:
        files |= log_files("logs", given_logs(logs))
    else:
        for number, directory in enumerate(serve_directories()[:1], start=1):
            files |= log_files(f"run-{number}", logs_in(directory))
            discovery.insert(0, str(directory / "discovery"))
    for name, path in FRONTEND_FILES:
        status, _, text = fetch(url, path, variables.get("DYN_API_KEY", "") if path == "/v1/models" else "")
        if status in {200, 503} and text:
            files[name] = redacted_record(text)
    processes = of_frontend(process_values(local_processes()), listener_pid(urlsplit(url).port or 80))
    if processes:
        files["processes.json"] = json.dumps(processes, indent=2)
        discovery += [one["variables"]["DYN_FILE_KV"] for one in processes if "DYN_FILE_KV" in one["variables"]]
    found = [
        (key, status.st_mtime, data.decode(errors="replace"))
        for root in dict.fromkeys(discovery)
        if os.path.isdir(os.path.join(root, RECORDS))
        for key, status, data in records(root)
        if time.time() - status.st_mtime <= EXPIRY_S
    ]
    if found:
        files["discovery.json"] = discovery_file(found)
    return files


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
