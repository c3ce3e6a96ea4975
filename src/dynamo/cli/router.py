"""Router modes: `dynamo router start`, `patch` and `check`."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from dynamo.cli.manifests import read_manifests
from dynamo.core.config import load, option
from dynamo.core.errors import ConfigError
from dynamo.ops.recipes.parts import SourcedObject
from dynamo.ops.router_check import check
from dynamo.ops.router_modes import MODES
from dynamo.ops.router_patch import with_mode

HELP = f"""\
dynamo router: choose a router mode and prove that it is in force

  dynamo router start MODE [ARGS]        dynamo serve with this mode and two workers; ARGS are those of dynamo serve
  dynamo router patch FILE --mode MODE   print a graph's manifests with this mode; --output writes them
  dynamo router check --mode MODE        send small requests to a running frontend; exit status 1 if they contradict the mode

  MODE is {", ".join(MODES)}.
"""
WORKERS = ("--workers", "2")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterPatchConfig:
    """Set the router mode of the frontends in a graph's manifests."""

    file: str | None = option(None, "FILE", None, "Manifest, directory, or - for the standard input")
    mode: str | None = option(None, "--mode", None, "Router mode", choices=MODES)
    kv_events: bool = option(
        True, "--kv-events", None, "With kv: use the workers' events; otherwise predict cached blocks"
    )
    output: str | None = option(None, "--output", None, "File to write; default: standard output")


def router(argv: Sequence[str]) -> int:
    """Run `dynamo router`. Raise `ConfigError` for wrong options."""
    word, rest = (argv[0], list(argv[1:])) if argv else ("--help", [])
    if word in {"--help", "-h", "help"}:
        print(HELP, end="")
        return 0
    if word == "check":
        return check(rest)
    if word == "patch":
        return patch(rest)
    if word == "start":
        return start(rest)
    raise ConfigError(f"unknown command dynamo router {word}: expected one of start, patch, check")


def start(argv: Sequence[str]) -> int:
    """Run `dynamo router start`: a serve with this mode, and two workers unless the number is given."""
    if not argv or argv[0] not in MODES:
        raise ConfigError(f"MODE {argv[0] if argv else ''}: expected one of {', '.join(MODES)}")
    from dynamo.cli.serve import serve

    mode, rest = argv[0], list(argv[1:])
    own = rest[: rest.index("--")] if "--" in rest else rest
    number = () if any(word.partition("=")[0] == "--workers" for word in own) else WORKERS
    return serve(["--router-mode", mode, *number, *rest], time.monotonic())


def patch(argv: Sequence[str]) -> int:
    """Run `dynamo router patch`."""
    config = load(RouterPatchConfig, argv, prog="dynamo router patch")
    if config.file is None or config.mode is None:
        raise ConfigError("FILE and --mode: expected both")
    found = [SourcedObject(one.file, one.value) for one in read_manifests([config.file])]
    values, notes = with_mode(found, config.mode, uses_events=config.kv_events)
    for note in notes:
        sys.stderr.write(f"note: {note}\n")
    text = yaml.safe_dump_all(values, sort_keys=False, width=120)
    if config.output is None:
        print(text, end="")
        return 0
    try:
        Path(config.output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {config.output}: {error.strerror}") from None
    return 0
