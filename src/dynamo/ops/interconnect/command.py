"""Command `dynamo check interconnect env | node | nixl | all`, and `check_interconnect.py` of the skill."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dynamo.core.config import load, option
from dynamo.core.errors import ConfigError
from dynamo.core.progress import activity
from dynamo.ops.doctor.command import print_report
from dynamo.ops.interconnect import collect
from dynamo.ops.interconnect.node_checks import ToolOutput, nixl_rows, node_rows, script_values
from dynamo.ops.interconnect.recipe_env import rows_of_graph
from dynamo.ops.recipes.parts import GRAPH_KIND, SourcedObject
from dynamo.ops.report import CheckRow, exit_status, verdict

PARTS = ("env", "node", "nixl", "all")
HELP = """\
dynamo check interconnect: whether blocks and collectives use RDMA or NVLink

  dynamo check interconnect env RECIPE    variables, capabilities and devices in deploy.yaml
  dynamo check interconnect node          links, drivers, NVLink, limits and variables of this node, or of a pod
  dynamo check interconnect nixl          import, plugins, and a measured transfer between two processes
  dynamo check interconnect all           node and nixl

  --namespace N --pod P [--container C] checks a pod by kubectl; --save FILE writes the outputs, --from FILE reads those of another node.
"""
MEGABYTES_MAX = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class InterconnectConfig:
    """Check the interconnect of this node, of a pod, or of a recipe. Nothing is changed."""

    recipe: str | None = option(None, "RECIPE", None, "With env: directory of a recipe, or its deploy.yaml")
    namespace: str = option("default", "--namespace", None, "Namespace of the pod")
    pod: str | None = option(None, "--pod", None, "Pod to check; default: this machine")
    container: str | None = option(None, "--container", None, "Container of the pod")
    size_mb: int = option(64, "--size-mb", None, "Size of the measured transfer in MiB; 0: none")
    source: str | None = option(None, "--from", None, "File of outputs that --save wrote on another node")
    save: str | None = option(None, "--save", None, "File for the outputs")
    json: bool = option(False, "--json", None, "Print JSON")

    def __post_init__(self) -> None:
        if not 0 <= self.size_mb <= MEGABYTES_MAX:
            raise ConfigError(f"--size-mb {self.size_mb}: must be from 0 to {MEGABYTES_MAX}")
        if self.source is not None and (self.pod or self.save):
            raise ConfigError("--from: must not be combined with --pod and --save")


def check(argv: Sequence[str]) -> int:
    """Run `dynamo check`, whose only subject is `interconnect`."""
    if not argv or argv[0] in {"--help", "-h", "help"}:
        print(HELP, end="")
        return 0
    if argv[0] != "interconnect":
        raise ConfigError(f"unknown command dynamo check {argv[0]}: expected interconnect")
    return interconnect(argv[1:])


def interconnect(argv: Sequence[str]) -> int:
    """Run `dynamo check interconnect`; return 1 if a check fails. Raise `ConfigError` for wrong options."""
    if argv and argv[0] in {"--help", "-h", "help"}:
        print(HELP, end="")
        return 0
    rows, config = checked(argv, "dynamo check interconnect")
    print_report(rows, is_json=config.json)
    return exit_status(rows)


def checked(argv: Sequence[str], prog: str) -> tuple[list[CheckRow], InterconnectConfig]:
    """Return the rows of a command line, whose first word is the part; `all` without one."""
    part, rest = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else ("all", argv)
    if part not in PARTS:
        raise ConfigError(f"unknown part {part}: expected one of {', '.join(PARTS)}")
    config = load(InterconnectConfig, rest, prog=f"{prog} {part}")
    if part == "env":
        return [row for graph in graphs_of(config.recipe) for row in rows_of_graph(graph)], config
    with activity("reading the tools of the node", is_quiet=config.json) as show:
        outputs = outputs_of(config, part, show)
    if config.save is not None:
        collect.save(config.save, outputs)
    rows = node_rows(outputs) if part in {"node", "all"} else []
    return [*rows, *(nixl_rows(outputs) if part in {"nixl", "all"} else [])], config


def outputs_of(config: InterconnectConfig, part: str, show: Callable[[str], None]) -> dict[str, ToolOutput]:
    """Return the outputs of the selected source, and show what is being collected."""
    if config.source is not None:
        return collect.load_outputs(config.source)
    is_pod = config.pod is not None
    run = collect.in_pod(config.namespace, config.pod or "", config.container) if is_pod else collect.run_here
    found = collect.collect_node(run)
    if part in {"nixl", "all"}:
        show(f"checking NIXL and measuring a transfer of {config.size_mb} MiB" if config.size_mb else "checking NIXL")
        found |= collect.collect_nixl(run, "python3" if is_pod else collect.own_python(), megabytes=config.size_mb)
        if config.pod is not None:
            found["logs"] = collect.pod_logs(config.namespace, config.pod, config.container)
    return found


def graphs_of(recipe: str | None) -> list[SourcedObject]:
    """Return the graphs of a recipe. Raise `ConfigError`."""
    import yaml

    path = Path(recipe or "")
    file = path / "deploy.yaml" if path.is_dir() else path
    if not recipe or not file.is_file():
        raise ConfigError(f"RECIPE {recipe or 'is missing'}: expected a directory with deploy.yaml, or the file")
    try:
        values = [one for one in yaml.safe_load_all(file.read_text(encoding="utf-8")) if isinstance(one, dict)]
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: {' '.join(str(error).split())}") from None
    graphs = [SourcedObject(str(file), one) for one in values if one.get("kind") == GRAPH_KIND]
    if not graphs:
        raise ConfigError(f"{file}: no {GRAPH_KIND}")
    return graphs


def main() -> int:
    """Run `check_interconnect.py`: the rows with the words ok, warn, fail and skipped, and the verdict."""
    rows, config = checked(sys.argv[1:], "check_interconnect.py")
    values = script_values(rows)
    if config.json:
        print(json.dumps(values, indent=2))
    else:
        for one in values:
            print(f"{one['check']:<20} {one['result']:<8} {one['detail']}")
        print(f"verdict: {verdict(rows).value}")
    return exit_status(rows)
