"""Command `dynamo troubleshoot`: collects from this machine, a cluster or a bundle, and matches known failures."""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from dynamo import __version__
from dynamo.core.config import environ, load, option
from dynamo.core.errors import ConfigError, DynamoException, StartupError
from dynamo.core.progress import activity
from dynamo.ops.archive import read_files, write_archive
from dynamo.ops.doctor.command import print_report
from dynamo.ops.graphs import FoundGraph, find_graphs, names_of, select
from dynamo.ops.report import CheckRow, exit_status, passed, row_value, skipped, verdict, warned
from dynamo.ops.troubleshoot.case import CaseFacts, case_of
from dynamo.ops.troubleshoot.graph_signatures import GRAPH_SIGNATURES
from dynamo.ops.troubleshoot.local_signatures import LOCAL_SIGNATURES
from dynamo.ops.troubleshoot.log_signatures import LOG_SIGNATURES
from dynamo.ops.troubleshoot.pod_signatures import POD_SIGNATURES
from dynamo.ops.troubleshoot.signature import SignatureMatch, matches

SIGNATURES = (*POD_SIGNATURES, *LOG_SIGNATURES, *LOCAL_SIGNATURES, *GRAPH_SIGNATURES)


@dataclass(frozen=True, slots=True, kw_only=True)
class TroubleshootConfig:
    """Find known causes of failures, in the graph of this machine, in a cluster, or in a bundle. Nothing is changed."""

    graph: str | None = option(
        None, "NAME", None, "Graph of dynamo serve, or DynamoGraphDeployment in the cluster; default: the local graph"
    )
    namespace: str | None = option(
        None, "--namespace", None, "Namespace of the cluster to examine; without NAME all of its pods"
    )
    bundle: str | None = option(
        None, "--bundle", None, "Archive or directory of an earlier collection (dynamo doctor --bundle, --save)"
    )
    logs: str | None = option(None, "--logs", None, "Log file, or directory of *.log files, of a local graph")
    url: str | None = option(
        None, "--url", "DYN_CHAT_URL", "URL of the local frontend; default: the newest graph's, or port DYN_HTTP_PORT"
    )
    save: str | None = option(None, "--save", None, "Write what was collected as tar.gz, without secrets")
    json: bool = option(False, "--json", None, "Print the report as JSON")

    def __post_init__(self) -> None:
        if self.url is not None and not is_url(self.url):
            raise ConfigError(f"--url {self.url}: must be an http:// or https:// URL, such as http://127.0.0.1:8000")
        if self.bundle is not None and (self.graph or self.namespace or self.logs):
            raise ConfigError("--bundle: must not be combined with NAME, --namespace and --logs")
        if self.logs is not None and (self.graph or self.namespace):
            raise ConfigError("--logs: must not be combined with NAME and --namespace, which select a cluster")


def is_url(text: str) -> bool:
    """Return whether a text is an address of a frontend."""
    try:
        parts = urlsplit(text)
        return parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # The port is not a number.
        return False


def troubleshoot(argv: Sequence[str]) -> int:
    """Run `dynamo troubleshoot`; return 1 if a failure is found. Raise `ConfigError` for wrong options."""
    config = load(TroubleshootConfig, argv, prog="dynamo troubleshoot")
    logging.getLogger("dynamo").addHandler(logging.NullHandler())  # Failed connections are evidence, not log lines.
    with activity("collecting logs, states and metrics", is_quiet=config.json) as show:
        files, problems = collected(config)
        if config.save is not None:
            write_archive(config.save, files, time.time(), setting="--save")
        show(f"comparing {len(files)} files with {len(SIGNATURES)} known failures")
        case = case_of(files)
        found = matches(case, SIGNATURES)
    rows = rows_of_case(case, found, problems)
    if config.json:
        print(json_report(rows, found))
    else:
        print_report(rows, is_json=False)
    return exit_status(rows)


def collected(config: TroubleshootConfig) -> tuple[dict[str, str], list[str]]:
    """Return the files of the selected source, and what could not be read."""
    if config.bundle is not None:
        return read_files(config.bundle), []
    local = local_graph(config)
    if local is not None or (config.graph is None and config.namespace is None):
        from dynamo.ops.troubleshoot.local import local_files

        return local_files(config.url, config.logs, environ(), local), []
    from dynamo.ops.troubleshoot.cluster import cluster_files

    try:
        files, problems = asyncio.run(cluster_files(config.namespace, config.graph))
    except ConfigError:
        raise
    except DynamoException as error:
        raise StartupError(str(error)) from None
    return files, problems


def local_graph(config: TroubleshootConfig) -> FoundGraph | None:
    """Return the graph of this machine that NAME names; None if it names none, or with --namespace one of a cluster."""
    if config.graph is None or config.namespace is not None:
        return None
    with contextlib.suppress(StartupError):  # No usable temporary directory, so that no graph is recorded.
        found = find_graphs()
        if any(config.graph in names_of(one) for one in found):
            return select(found, config.graph)
    return None


def rows_of_case(case: CaseFacts, found: Sequence[SignatureMatch], problems: Sequence[str]) -> list[CheckRow]:
    """Return the rows: what was collected, what could not be, and each failure. Pure."""
    if case.is_empty:
        hint = "no logs, no frontend, no objects; name a source with NAME, --namespace, --logs, --url or --bundle"
        return [skipped("collected", hint), *_unread(problems)]
    rows = [passed("collected", case.summary), *_unread(problems), *(one.row for one in found)]
    if not found:
        rows.append(passed("signatures", f"none of {len(SIGNATURES)} known failures is seen"))
    return rows


def _unread(problems: Sequence[str]) -> list[CheckRow]:
    return [warned("collected", one, "grant get and list, or run as another user") for one in problems]


def json_report(rows: Sequence[CheckRow], found: Sequence[SignatureMatch]) -> str:
    """Return the report as JSON: rows, and each failure with its lines, cause and next command. Pure."""
    return json.dumps(
        {
            "version": __version__,
            "verdict": verdict(rows).value,
            "rows": [row_value(row) for row in rows],
            "signatures": [
                {
                    "signature": one.signature.name,
                    "status": one.signature.status.value,
                    "is_symptom": one.signature.is_symptom,
                    "evidence": [{"source": line.source, "text": line.text} for line in one.lines],
                    "count": one.count,
                    "cause": one.signature.cause,
                    "next": one.signature.command,
                }
                for one in found
            ],
        },
        indent=2,
    )
