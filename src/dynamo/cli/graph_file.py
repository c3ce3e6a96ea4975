"""Graph file: the components of a DynamoGraphDeployment as processes of one machine. Pure.

The same file can be applied to Kubernetes. What one machine does not have (images, volumes, probes, pods of several nodes)
is left out, with a note for each; ports, planes and the discovery directory are those of `dynamo serve`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dynamo.cli.graph import FRONTEND, GRACE_VARIABLE, PLANES, GraphLocation, shared_variables
from dynamo.core.api_keys import ADMIN_API_KEYS, API_KEYS
from dynamo.core.errors import ConfigError
from dynamo.core.supervisor import Process
from dynamo.operator.validation.facts import part
from dynamo.operator.validation.views import MAIN, ComponentView
from dynamo.protocols.kubernetes.common import KubeObject

PYTHON = re.compile(r"python(3(\.\d+)?)?")
REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_]*)\)")
"""`$(NAME)` in a command, as the kubelet expands it; `$$` is a dollar sign."""
FRONTEND_COMMAND = ("python3", "-m", "dynamo.frontend")
LEFT_OUT = frozenset({"planner", "epp"})
"""Types that act on Kubernetes objects."""
FIXED = frozenset({*PLANES, "DYN_FILE_KV", "DYN_HTTP_PORT", "DYNAMO_PORT", "ETCD_ENDPOINTS", "NATS_SERVER"})
"""Variables of a file that name services of the cluster."""
SIDE_CHANNEL_PORT, SIDE_CHANNEL_STEP = 22080, 8
"""First port of NIXL's side channels, and the ports of each worker."""
PROCESSES_MAX = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class FileGraph:
    """The processes of a graph file."""

    name: str
    frontend: Process
    workers: tuple[Process, ...]
    gpus: Mapping[str, int]
    """Number of GPUs of each worker that needs some, by its name."""
    notes: tuple[str, ...] = ()
    """What the file has and one machine does not."""
    planner: None = None

    @property
    def processes(self) -> tuple[Process, ...]:
        """Return all processes, the ones that load longest first."""
        return (*self.workers, self.frontend)

    def with_devices(self, devices: Sequence[str]) -> "FileGraph":
        """Return the graph with GPUs assigned to its workers. Raise `ConfigError` if there are too few."""
        needed = sum(self.gpus.values())
        if needed > len(devices):
            raise ConfigError(
                f"{self.name}: its workers need {needed} GPUs, this machine has {len(devices)}; "
                "--share-gpus lets all workers use all of them"
            )
        left, workers = list(devices), []
        for worker in self.workers:
            count = self.gpus.get(worker.name, 0)
            own, left = left[:count], left[count:]
            variables = {**worker.variables, "CUDA_VISIBLE_DEVICES": ",".join(own)} if own else worker.variables
            workers.append(replace(worker, variables=variables))
        return replace(self, workers=tuple(workers))


@dataclass(slots=True)
class _Translation:
    """The translation of one file: its place, and the notes so far."""

    place: GraphLocation
    verbose: bool
    graph_env: Sequence[Any]
    notes: list[str] = field(default_factory=list)

    def processes(self, component: ComponentView) -> Iterator[Process]:
        """Yield the processes of a component."""
        container = main_container(component.raw)
        values = self.variables(component, container)
        words = [*(container.get("command") or ()), *(container.get("args") or ())]
        if not words and component.type == "frontend":
            words = list(FRONTEND_COMMAND)
        if not words:
            raise ConfigError(f"{component.path}.podTemplate.spec.containers[{MAIN}]: command or args are required")
        known = {**self.place.variables, **values}
        command = interpreted([expanded(str(word), known) for word in words], self.place.python)
        for number in range(1, component.replicas_or_default + 1):
            yield Process(name=f"{component.name.lower()}-{number}", command=command, variables=dict(values))

    def variables(self, component: ComponentView, container: KubeObject) -> dict[str, str | None]:
        """Return the variables of a component: the graph's and its own, under those of `dynamo serve`."""
        given: dict[str, str] = {}
        for one in (*self.graph_env, *(container.get("env") or ())):
            name = str(one.get("name"))
            if "valueFrom" in one:
                if name not in self.place.variables:
                    self.notes.append(f"{component.name}: {name} is not set: its value comes from the cluster")
            elif name in FIXED:
                self.notes.append(
                    f"{component.name}: {name} is left out: dynamo serve sets the services of this machine"
                )
            else:
                given[name] = expanded(str(one.get("value") or ""), {**self.place.variables, **given})
        grace = {GRACE_VARIABLE: self.place.variables.get(GRACE_VARIABLE) or "0"}
        no_system_port = {"DYN_SYSTEM_PORT": "-1"} if not self.place.variables.get("DYN_SYSTEM_PORT") else {}
        return {**grace, **no_system_port, **shared_variables(self.place, verbose=self.verbose), **given}

    def note_rest(self, component: ComponentView, container: KubeObject) -> None:
        """Note the parts of a component that are not used here."""
        pod = part(component.raw, "podTemplate", "spec")
        if mounts := [str(one.get("mountPath")) for one in container.get("volumeMounts") or ()]:
            self.notes.append(
                f"{component.name}: not mounted: {', '.join(mounts)}; the paths are those of this machine"
            )
        if others := [str(one.get("name")) for one in pod.get("containers") or () if one.get("name") != MAIN]:
            self.notes.append(f"{component.name}: containers not started: {', '.join(others)}")
        if pod.get("initContainers"):
            self.notes.append(f"{component.name}: initContainers are not run")


def translate(
    name: str,
    components: Sequence[ComponentView],
    graph_env: Sequence[Any],
    place: GraphLocation,
    *,
    verbose: bool = False,
) -> FileGraph:
    """Return the processes of a graph's components. Raise `ConfigError` for what one machine cannot run."""
    work = _Translation(place, verbose, graph_env)
    frontends: list[Process] = []
    workers: list[Process] = []
    gpus: dict[str, int] = {}
    for component in components:
        if component.type in LEFT_OUT:
            work.notes.append(f"{component.name}: type {component.type} is not started: it acts on Kubernetes objects")
            continue
        if component.is_multinode:
            raise ConfigError(f"{component.path}.multinode: a replica of several nodes cannot run on one machine")
        container = main_container(component.raw)
        work.note_rest(component, container)
        if component.type == "frontend":
            frontends += work.processes(component)
            continue
        for process in work.processes(component):
            index = len(workers)
            own = {API_KEYS: None, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(SIDE_CHANNEL_PORT + SIDE_CHANNEL_STEP * index)}
            workers.append(replace(process, variables={**own, **process.variables, **numbered_port(place, index)}))
            if component.gpus:
                gpus[process.name] = component.gpus
    check_numbers(name, frontends, workers)
    if len(frontends) > 1:
        work.notes.append(f"{len(frontends)} frontends: one is started, as one machine has one port for it")
    return FileGraph(
        name=name,
        frontend=replace(frontends[0], name=FRONTEND, variables={**frontends[0].variables, "DYN_SYSTEM_PORT": "-1"}),
        workers=tuple(workers),
        gpus=gpus,
        notes=tuple(dict.fromkeys(work.notes)),
    )


def check_numbers(name: str, frontends: Sequence[Process], workers: Sequence[Process]) -> None:
    """Raise `ConfigError` for a graph without frontend or workers, and for more processes than one machine runs."""
    if not frontends:
        raise ConfigError(f"{name}: no component of type frontend with at least one replica")
    if not workers:
        raise ConfigError(f"{name}: no component of type worker, prefill or decode with at least one replica")
    if len(workers) > PROCESSES_MAX:
        raise ConfigError(f"{name}: {len(workers)} workers: must be at most {PROCESSES_MAX} on one machine")


def main_container(raw: KubeObject) -> KubeObject:
    """Return a copy of the container `main` of a v1beta1 component; empty without one."""
    containers = part(raw, "podTemplate", "spec").get("containers") or ()
    return dict(next((one for one in containers if one.get("name") == MAIN), {}))


def numbered_port(place: GraphLocation, index: int) -> dict[str, str]:
    """Return the system port of worker `index`: the environment's names the first one's."""
    text = place.variables.get("DYN_SYSTEM_PORT", "")
    return {"DYN_SYSTEM_PORT": str(int(text) + index)} if text.isdigit() and text != "0" else {}


def expanded(text: str, variables: Mapping[str, str | None]) -> str:
    """Return a text with `$(NAME)` replaced by variables; unknown names stay, as in Kubernetes."""

    def value(found: re.Match[str]) -> str:
        if found[0] == "$$":
            return "$"
        known = variables.get(found[1])
        return found[0] if known is None else known

    return REFERENCE.sub(value, text)


def interpreted(words: Sequence[str], python: str) -> tuple[str, ...]:
    """Return a command that runs Python modules with this interpreter, also where a shell starts it by name."""
    if PYTHON.fullmatch(words[0].rpartition("/")[2]):
        return (python, "-P", *words[1:]) if "-P" not in words[1:2] else (python, *words[1:])
    return tuple(words)


def frontend_arguments(command: Sequence[str]) -> list[str] | None:
    """Return the flags of a frontend that is started directly; None for a shell."""
    words = list(command)
    if "-m" in words[:3] and "dynamo.frontend" in words[:4]:
        return words[words.index("dynamo.frontend") + 1 :]
    return None


def with_flags(process: Process, flags: Sequence[str], keys: Mapping[str, str]) -> Process:
    """Return the frontend with other flags and with the API keys, which are not part of a command line."""
    at = process.command.index("dynamo.frontend")
    variables: dict[str, str | None] = {API_KEYS: None, ADMIN_API_KEYS: None, **process.variables, **keys}
    return replace(process, command=(*process.command[: at + 1], *flags), variables=variables)
