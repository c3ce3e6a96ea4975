"""Command lines of a graph: what `dynamo serve --dry-run` prints, without secrets. Pure."""

import json
import shlex
from collections.abc import Mapping, Sequence

from dynamo.cli.graph import ProcessGraph
from dynamo.core.api_keys import ADMIN_API_KEYS, API_KEYS
from dynamo.core.supervisor import Process
from dynamo.ops.redaction import redacted_text, redacted_value, redacted_variables


def as_commands(graph: ProcessGraph) -> str:
    """Return the processes as lines for a shell, without secrets and without variables that are removed."""
    return "\n".join(command_line(process) for process in graph.processes)


def command_line(process: Process) -> str:
    """Return one process as a comment with its name and a line for a shell."""
    variables = [
        f"{name}={shlex.quote(redacted_value(name, value))}"
        for name, value in sorted(process.variables.items())
        if value is not None and name not in {API_KEYS, ADMIN_API_KEYS}
    ]
    return f"# {process.name}\n{' '.join([*variables, redacted_text(shlex.join(process.command))])}\n"


def as_json(name: str, graph: ProcessGraph, gpus: Mapping[str, int], notes: Sequence[str]) -> str:
    """Return the processes, the number of their GPUs, and the notes."""
    processes = [
        {
            "name": one.name,
            "command": [redacted_text(word) for word in one.command],
            "variables": redacted_variables({key: text for key, text in one.variables.items() if text is not None}),
            "gpus": gpus.get(one.name, 0),
        }
        for one in graph.processes
    ]
    return json.dumps({"graph": name, "processes": processes, "notes": list(notes)}, indent=2)
