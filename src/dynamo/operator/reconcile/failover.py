"""Failover within a pod: two engines that share the GPU memory, of which one serves and the other takes over. Pure.

The main container becomes `engine-0` and `engine-1`. They hold one lock file in turn, and have ports of their own because
they share the pod's network.
"""

import copy
import re

from dynamo.operator.reconcile.memory_service import DIRECTORY
from dynamo.operator.reconcile.multinode.commands import CommandLine
from dynamo.operator.reconcile.multinode.nodes import WorkloadError, node_count
from dynamo.operator.reconcile.multinode.vllm import MASTER_PORT, MODULE
from dynamo.operator.reconcile.names import MAIN, STEP_METRICS_PORT, SYSTEM_PORT
from dynamo.protocols.kubernetes.common import KubeObject
from dynamo.protocols.kubernetes.v1beta1 import ComponentSpec

ENGINES = 2
LOCK = f"{DIRECTORY}/failover.lock"
SIDE_CHANNEL_PORT, PORT_STRIDE = 5600, 100
MASTER_OPTION = "--master-port"
SHADOW_MODE = "DYN_VLLM_GMS_SHADOW_MODE"
HEALTH_OF_ENDPOINTS = "DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS"
STARTING_STATUS = {"name": "DYN_SYSTEM_STARTING_HEALTH_STATUS", "value": "notready"}
"""A standby engine is not ready until it takes over."""
REPLACED = frozenset({HEALTH_OF_ENDPOINTS, "DYN_HEALTH_CHECK_ENABLED"})
PROBES = ("livenessProbe", "readinessProbe", "startupProbe")


def has_engines(component: ComponentSpec) -> bool:
    """Return whether each pod of a component has a standby engine."""
    failover = component.experimental.failover if component.experimental else None
    return failover is not None and failover.mode in (None, "IntraPod")


def add_engines(component: ComponentSpec, template: KubeObject, framework: str | None) -> None:
    """Replace the main container of a complete pod template by two engines, if the component has failover in its pods.

    Raise `WorkloadError` for a framework without it.
    """
    if not has_engines(component):
        return
    if framework != "vllm":
        path = f"spec.components[{component.name}].experimental.failover"
        raise WorkloadError(f"{path}: requires vllm, not {framework or 'an unknown framework'}")
    spec = template["spec"]
    main = next(one for one in spec["containers"] if one["name"] == MAIN)
    engines = [_engine(main, index, node_count(component)) for index in range(ENGINES)]
    spec["containers"] = [*engines, *(one for one in spec["containers"] if one is not main)]


def _engine(main: KubeObject, index: int, nodes: int) -> KubeObject:
    engine = copy.deepcopy(main)
    name, port, port_name = f"engine-{index}", SYSTEM_PORT + index, f"system-{index}"
    engine["name"] = name
    engine["ports"] = [{"name": port_name, "containerPort": port, "protocol": "TCP"}]
    own = {
        "ENGINE_ID": str(index),
        "CONTAINER_NAME": name,
        "FAILOVER_LOCK_PATH": LOCK,
        STARTING_STATUS["name"]: STARTING_STATUS["value"],
        "DYN_SYSTEM_PORT": str(port),
        "DYN_SYSTEM_ENABLED": "true",
        "DYN_FORWARDPASS_METRIC_PORT": str(STEP_METRICS_PORT + index),
        SHADOW_MODE: "true",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(SIDE_CHANNEL_PORT + index),
    }
    if nodes > 1:
        own["NNODES"] = str(nodes)
    kept = [one for one in engine.get("env") or () if one["name"] not in own and one["name"] not in REPLACED]
    engine["env"] = [*kept, *({"name": variable, "value": value} for variable, value in own.items())]
    for probe in PROBES:
        if "httpGet" in engine.get(probe, {}):
            engine[probe]["httpGet"]["port"] = port_name
    if index:
        with_master_port(CommandLine.of(engine), index * PORT_STRIDE).write_to(engine)
    return engine


def with_master_port(command: CommandLine, offset: int) -> CommandLine:
    """Return a command whose processes meet at a port of their own: the given or the default one plus an offset."""
    if not command.has(MASTER_OPTION):
        return command.with_options([MASTER_OPTION, str(MASTER_PORT + offset)], MODULE)
    pattern = rf"(?<![\w-]){MASTER_OPTION}([=\s]+)(\d+)"

    def moved(text: str) -> str:
        return re.sub(pattern, lambda found: f"{MASTER_OPTION}{found[1]}{int(found[2]) + offset}", text)

    if command.script_index is not None:
        return command.with_script(moved(command.words[command.script_index]))
    words = [moved(one) for one in command.words]
    for index, word in enumerate(words[:-1]):
        if word == MASTER_OPTION and words[index + 1].isdigit():
            words[index + 1] = str(int(words[index + 1]) + offset)
    return command.with_words(words)
