"""Environment of a restored process: written where it is restored, applied after the restoration."""

import argparse
import logging
import os
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from pathlib import Path
from typing import TypeVar

import msgspec

from dynamo.common.configuration.groups.runtime_args import DynamoRuntimeArgGroup, DynamoRuntimeConfig
from dynamo.common.configuration.utils import set_env
from dynamo.common.snapshot.constants import (
    KUBERNETES_OPTIONAL_ENV_NAMES,
    KUBERNETES_REQUIRED_ENV_NAMES,
    RESTORE_RUNTIME_ENV_NAMES,
    SNAPSHOT_CONTROL_DIR,
    SNAPSHOT_CONTROL_DIR_ENV,
    SNAPSHOT_RESTORE_CONTEXT_FILE,
    SNAPSHOT_RESTORE_STANDBY_ENV,
)
from dynamo.core.config import environ

logger = logging.getLogger(__name__)

ConfigT = TypeVar("ConfigT")

COPIED = ("namespace", "discovery_backend", "request_plane", "event_plane")
RESTORED = KUBERNETES_REQUIRED_ENV_NAMES | KUBERNETES_OPTIONAL_ENV_NAMES | RESTORE_RUNTIME_ENV_NAMES


async def refresh_snapshot_restore_config(
    config: ConfigT,
    parse_config: Callable[[], object | Awaitable[object]],
    runtime_config: Callable[[object], object] | None = None,
) -> ConfigT:
    """Apply the environment, parse the configuration again, and copy the settings of the runtime to `config`."""
    apply_snapshot_restore_env()
    found = parse_config()
    parsed = await found if isawaitable(found) else found
    target = runtime_config(config) if runtime_config else config
    source = runtime_config(parsed) if runtime_config else parsed
    for name in COPIED:
        if hasattr(source, name):
            setattr(target, name, getattr(source, name))
    if getattr(target, "discovery_backend", None) == "kubernetes":
        missing = sorted(name for name in KUBERNETES_REQUIRED_ENV_NAMES if not environ().get(name))
        if missing:
            raise RuntimeError(f"snapshot restore context requires {', '.join(missing)} for Kubernetes discovery")
    return config


def parse_snapshot_restore_runtime_config(argv: list[str] | None) -> object:
    """Return the runtime's settings in a command line of any engine."""
    flags = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    DynamoRuntimeArgGroup().add_arguments(flags)
    settings = DynamoRuntimeConfig.from_cli_args(flags.parse_known_args(argv)[0])
    settings.validate()
    return settings


def _file(control_dir: str | None = None) -> Path:
    directory = control_dir or environ().get(SNAPSHOT_CONTROL_DIR_ENV, SNAPSHOT_CONTROL_DIR)
    return Path(directory) / SNAPSHOT_RESTORE_CONTEXT_FILE


def apply_snapshot_restore_env() -> dict[str, str | None]:
    """Set and remove the variables of the context file and return them. Raise `RuntimeError` if it is invalid."""
    path = _file()
    try:
        variables = msgspec.json.decode(path.read_bytes(), type=RestoreContext).env
    except (OSError, msgspec.DecodeError) as error:
        raise RuntimeError(f"cannot use the snapshot restore context {path}: {error}") from error
    for name in sorted(set(variables) - RESTORED):
        logger.warning("ignored %s in %s: not a variable of the runtime", name, path)
    restored = {name: value for name, value in variables.items() if name in RESTORED}
    for name, value in restored.items():
        set_env(name, value)
    return restored


class RestoreContext(msgspec.Struct):
    """Content of the context file: variables to set, and with null those to remove."""

    env: dict[str, str | None]


def write_snapshot_restore_context(control_dir: str | None = None) -> None:
    """Write the context file with this process's variables, in one step."""
    path = _file(control_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_bytes(
        msgspec.json.encode(RestoreContext({name: environ().get(name) for name in sorted(RESTORED)}))
    )
    unfinished.replace(path)


def maybe_run_restore_standby_mode() -> None:
    """With `SNAPSHOT_RESTORE_STANDBY=1`, write the context file and become a process that waits forever."""
    if environ().get(SNAPSHOT_RESTORE_STANDBY_ENV) == "1":
        write_snapshot_restore_context()
        os.execvp("sleep", ["sleep", "infinity"])  # noqa: S606, S607 -- the agent replaces the process
