"""Collector of interconnect facts: runs commands here or in a pod, saves their outputs, and reads those of another node."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dynamo.core.errors import ConfigError
from dynamo.ops.archive import tail_of
from dynamo.ops.interconnect import transfer
from dynamo.ops.interconnect.node_checks import MISSING, NIXL_IMPORT, NODE_COMMANDS, ToolOutput, variables_of
from dynamo.ops.redaction import redacted_text

TIMEOUT_S = 120.0
TEXT_MAX = 1 << 20
BACKEND = "UCX"
CommandRunner = Callable[[Sequence[str]], ToolOutput]
"""Runs a command."""


def run_here(command: Sequence[str]) -> ToolOutput:
    """Run a command on this machine."""
    try:
        done = subprocess.run(  # noqa: S603 -- a list of arguments, no shell
            command,
            check=False,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except (FileNotFoundError, PermissionError):
        return MISSING
    except subprocess.TimeoutExpired:
        return ToolOutput(status=124, text=f"no end after {TIMEOUT_S:g} s")
    text = done.stdout if done.returncode == 0 else done.stdout + done.stderr
    return ToolOutput(status=done.returncode, text=text[-TEXT_MAX:])


def in_pod(namespace: str, pod: str, container: str | None) -> CommandRunner:
    """Return a runner of commands in a pod, by kubectl."""
    target = ["-n", namespace, pod, *(["-c", container] if container else [])]

    def run(command: Sequence[str]) -> ToolOutput:
        found = run_here(["kubectl", "exec", *target, "--", *command])
        if found is MISSING:
            raise ConfigError("kubectl: not found; install it, or read saved outputs with --from")
        if "executable file not found" in found.text or "command terminated with exit code 127" in found.text:
            return MISSING
        if found.status and "Error from server" in found.text:
            raise ConfigError(f"pod {namespace}/{pod}: {' '.join(found.text.split())}")
        return found

    return run


def collect_node(run: CommandRunner) -> dict[str, ToolOutput]:
    """Return the outputs of the node checks."""
    found = {name: run(command) for name, command in NODE_COMMANDS.items()}
    shown = variables_of(found["environment"])
    found["environment"] = ToolOutput(status=0, text="\n".join(f"{name}={value}" for name, value in shown.items()))
    return found


def collect_nixl(run: CommandRunner, python: str, *, megabytes: int) -> dict[str, ToolOutput]:
    """Return the outputs of the NIXL checks, with a transfer unless its size is 0."""
    found = {"nixl": run([python, "-c", NIXL_IMPORT])}
    if megabytes and '"backends"' in found["nixl"].text:
        text = Path(transfer.__file__).read_text(encoding="utf-8")
        arguments = [BACKEND, str(megabytes << 20), str(transfer.ROUNDS)]
        found["transfer"] = run([python, "-c", transfer.LAUNCHER, text, *arguments])
    return found


def pod_logs(namespace: str, pod: str, container: str | None) -> ToolOutput:
    """Return the last lines of a pod's log."""
    chosen = ["-c", container] if container else ["--all-containers"]
    found = run_here(["kubectl", "logs", "-n", namespace, pod, *chosen, "--tail=2000"])
    return ToolOutput(status=found.status, text=redacted_text(found.text))


def save(path: str, outputs: Mapping[str, ToolOutput]) -> None:
    """Write outputs for another machine. Raise `ConfigError`."""
    values = {name: {"status": one.status, "text": one.text} for name, one in outputs.items()}
    try:
        Path(path).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--save {path}: {error.strerror}") from None


def load_outputs(path: str) -> dict[str, ToolOutput]:
    """Return outputs that `--save` wrote on another node. Raise `ConfigError`."""
    try:
        values = json.loads(tail_of(path))
        return {str(name): ToolOutput(status=int(one["status"]), text=str(one["text"])) for name, one in values.items()}
    except OSError as error:
        raise ConfigError(f"--from {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"--from {path}: not a file of dynamo check interconnect --save") from None


def own_python() -> str:
    """Return this interpreter."""
    return sys.executable
