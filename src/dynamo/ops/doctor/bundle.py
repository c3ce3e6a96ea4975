"""Bundle: the files of a bug report: rows, environment, packages, discovery records and logs, without secrets."""

import json
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from dynamo.common.config_dump.system_info import get_package_info
from dynamo.ops.doctor.directory import records
from dynamo.ops.doctor.facts import MachineFacts
from dynamo.ops.doctor.network import fetch
from dynamo.ops.local_graph import local_processes, logs_in, process_values, serve_directories
from dynamo.ops.redaction import redacted_json, redacted_text, redacted_variables
from dynamo.ops.report import CheckRow, as_json, as_table

PREFIXES = ("DYN_", "NATS_", "ETCD_", "HF_", "CUDA_", "NVIDIA_", "NCCL_", "UCX_", "NIXL_", "VLLM_", "SGLANG_", "OTEL_",
            "TLLM_", "KUBE", "POD_", "OMP_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy", "PYTHON", "LD_", "LMCACHE_", "PROMETHEUS_")  # fmt: skip
"""Variables that processes of a graph and their engines read; the others of a user's environment are not reported."""
NOT_IN_NAMES = re.compile(r"[^\w.-]")
FRONTEND_FILES = (("health.json", "/health"), ("models.json", "/v1/models"), ("metrics.txt", "/metrics"))
RUNS_MAX = 3  # Directories of `dynamo serve` whose logs are included.
RECORD_CHARS_MAX = 4096
NOTE = """\
Bundle of dynamo doctor. Values of variables and fields whose names contain KEY, TOKEN, SECRET, PASSWORD or CREDENTIAL, credentials
in URLs, bearer tokens and private keys are replaced by [redacted]. Logs may contain parts of requests: read them before you share this file.
`dynamo troubleshoot --bundle FILE` finds known causes in it.
"""


def bundle_files(rows: Sequence[CheckRow], facts: MachineFacts) -> dict[str, str]:
    """Return the files by name. Reads the records, the logs and the running frontend."""
    files = machine_files(rows, facts.variables, get_package_info(), platform.platform())
    if facts.directory is not None and not facts.directory.problem:
        found = [
            (key, status.st_mtime, data.decode(errors="replace")) for key, status, data in records(facts.directory.path)
        ]
        files["discovery.json"] = discovery_file(found)
    for number, directory in enumerate(serve_directories()[:RUNS_MAX], start=1):
        files |= log_files(f"run-{number}", logs_in(directory))
    if facts.frontend is not None:
        for name, path in FRONTEND_FILES:
            files[name] = redacted_record(fetch(facts.frontend.url, path)[2])
    files["processes.json"] = json.dumps(process_values(local_processes()), indent=2)
    return files


def machine_files(
    rows: Sequence[CheckRow], variables: Mapping[str, str], packages: Mapping[str, str], system: str
) -> dict[str, str]:
    """Return the files about this machine. Pure."""
    own = {name: value for name, value in variables.items() if name.startswith(PREFIXES)}
    return {
        "README.txt": NOTE,
        "report.json": json.dumps(redacted_json(json.loads(as_json(rows))), indent=2),
        "report.txt": redacted_text(as_table(rows)) + "\n",
        "environment.json": json.dumps(redacted_variables(own), indent=2),
        "packages.txt": "".join(f"{name}=={version}\n" for name, version in sorted(packages.items())),
        "system.txt": f"{system}\n",
    }


def discovery_file(found: Sequence[tuple[str, float, str]]) -> str:
    """Return the records of discovery as JSON, redacted, with their modification times. Pure."""
    return json.dumps(
        [
            {"key": key, "modified": modified, "value": redacted_record(text)[:RECORD_CHARS_MAX]}
            for key, modified, text in found
        ],
        indent=2,
    )


def redacted_record(text: str) -> str:
    """Return a JSON record without the values of secret fields, at any depth."""
    try:
        value = json.loads(text)
    except ValueError:
        return redacted_text(text)
    return json.dumps(redacted_json(value))


def log_files(run: str, logs: Mapping[str, str]) -> dict[str, str]:
    """Return redacted logs as files of one run. Pure."""
    names = {name: NOT_IN_NAMES.sub("_", Path(name).name) for name in logs}
    return {f"logs/{run}/{names[name]}": redacted_text(text) for name, text in logs.items()}
