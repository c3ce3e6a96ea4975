"""Pod templates of a component whose replicas run on several nodes: one for the leader, one for the workers."""

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dynamo.operator.reconcile.multinode import sglang, trtllm, vllm
from dynamo.operator.reconcile.multinode.commands import MODULE, CommandLine
from dynamo.operator.reconcile.multinode.nodes import NodeGroup, WorkloadError
from dynamo.operator.reconcile.multinode.wait_for_leader import add_init_container
from dynamo.operator.reconcile.names import MAIN, GraphContext, is_worker, main_container, merged
from dynamo.protocols.kubernetes.common import KubeObject
from dynamo.protocols.kubernetes.v1beta1 import ComponentSpec

FRAMEWORKS = ("vllm", "sglang", "trtllm")
PROBES = ("livenessProbe", "readinessProbe", "startupProbe")
GPU_SUFFIX = "/gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleTemplates:
    """Pod templates of one group of nodes."""

    leader: KubeObject
    worker: KubeObject
    framework: str | None
    is_changed: bool
    """Whether commands were adapted; those of pods whose options fit into one node, and scripts that do not run the
    framework's module, remain as they are."""


def framework_of(component: ComponentSpec, explicit: str | None) -> str | None:
    """Return the framework that a component's command runs, or the given one; None for a component that is not a worker.

    Raise `WorkloadError` when the command runs several, or another one than the given.
    """
    if not is_worker(component):
        return None
    spec = (component.pod_template or {}).get("spec") or {}
    containers: list[KubeObject] = spec.get("containers") or []
    main = next((one for one in containers if one.get("name") == MAIN), {})
    found = framework_in(main)
    path = f"spec.components[{component.name}].podTemplate.spec.containers[{MAIN}].command"
    if len(found) > 1:
        raise WorkloadError(f"{path}: runs {' and '.join(found)}; one framework per component is allowed")
    if found and explicit and found[0] != explicit:
        raise WorkloadError(f"{path}: runs {found[0]}, but spec.backendFramework is {explicit}")
    return found[0] if found else explicit


def framework_in(container: KubeObject) -> list[str]:
    """Return the frameworks that a container's command runs."""
    text = " ".join(CommandLine.of(container).words)
    return [one for one in FRAMEWORKS if re.search(MODULE.format(name=rf"dynamo\.{one}\b"), text)]


def role_templates(
    component: ComponentSpec,
    context: GraphContext,
    template: KubeObject,
    group: NodeGroup,
    *,
    framework: str | None,
    annotations: Mapping[str, str],
    ssh_secret: str = trtllm.SECRET,
) -> RoleTemplates:
    """Return the templates of leader and workers.

    `template` is the component's complete pod template and stays unchanged; `annotations` are the graph's own, which
    those of the template precede. Raise `WorkloadError` when the framework cannot run on the pods.
    """
    leader, worker = copy.deepcopy(template), copy.deepcopy(template)
    first, other = main_of(leader), main_of(worker)
    # A memory service replaces the GPUs of the template by a claim; the component has them.
    command, gpus = CommandLine.of(first), gpus_of(first) or gpus_of(main_container(component))
    claimed = context.settings.claimed_gpus.get(component.name or "", 0)
    if isinstance(claimed, str):
        raise WorkloadError(claimed)
    gpus = gpus or claimed
    known = merged(annotations, (template.get("metadata") or {}).get("annotations"))
    match framework:
        case "vllm":
            mode = vllm.launch_mode(command, gpus, known)
            _adapt_vllm(first, other, known)
            if command.runs(vllm.MODULE):
                vllm.leader_command(command, mode, group, gpus).write_to(first)
                vllm.worker_command(command, mode, group, gpus).write_to(other)
                if mode is vllm.LaunchMode.PROCESSES:
                    add_init_container(worker["spec"], other, context, group, vllm.MASTER_PORT)
        case "sglang":
            _drop_probes(other)
            sglang.leader_command(command, group).write_to(first)
            sglang.worker_command(command, group).write_to(other)
        case "trtllm":
            if not gpus:
                path = f"spec.components[{component.name}].podTemplate.spec.containers[{MAIN}].resources.limits"
                raise WorkloadError(f"{path}: nvidia.com/gpu is required for TensorRT-LLM on several nodes")
            _adapt_trtllm(leader["spec"], worker["spec"], ssh_secret)
            command = CommandLine.of(first)  # With the variable that was added.
            trtllm.leader_command(command, group, gpus).write_to(first)
            trtllm.worker_command(command).write_to(other)
        case _:
            pass
    changed = CommandLine.of(first).words != command.words or CommandLine.of(other).words != command.words
    return RoleTemplates(leader=leader, worker=worker, framework=framework, is_changed=changed)


def single_node_template(template: KubeObject, framework: str | None) -> KubeObject:
    """Return the template of a component of one node, which starts a Ray head when vLLM can add pods to it later."""
    result = copy.deepcopy(template)
    if framework == "vllm":
        vllm.add_single_node_head(main_of(result))
    return result


def main_of(template: KubeObject) -> KubeObject:
    """Return the main container of a complete pod template."""
    containers: list[KubeObject] = template["spec"]["containers"]
    return next(one for one in containers if one["name"] == MAIN)


def gpus_of(container: Mapping[str, Any]) -> int:
    """Return the GPUs of a container, by its limits or else its requests."""
    resources = container.get("resources") or {}
    for kind in ("limits", "requests"):
        amounts = [str(amount) for name, amount in (resources.get(kind) or {}).items() if name.endswith(GPU_SUFFIX)]
        if amounts:
            return sum(int(one) for one in amounts if one.isdigit())
    return 0


def _adapt_vllm(leader: KubeObject, worker: KubeObject, annotations: Mapping[str, str]) -> None:
    _drop_probes(worker)
    if vllm.uses_processes(CommandLine.of(leader), annotations):
        for container in (leader, worker):
            vllm.add_address(container, "VLLM_NIXL_SIDE_CHANNEL_HOST")


def _adapt_trtllm(leader: KubeObject, worker: KubeObject, secret: str) -> None:
    for spec in (leader, worker):
        main = main_of({"spec": spec})
        trtllm.add_keys(spec, main, secret)
        env = main.setdefault("env", [])
        if all(one["name"] != trtllm.FULL_NAMES["name"] for one in env):
            env.append(dict(trtllm.FULL_NAMES))
    main = main_of({"spec": worker})
    _drop_probes(main)
    main["readinessProbe"] = copy.deepcopy(trtllm.READY)


def _drop_probes(container: KubeObject) -> None:
    for name in PROBES:
        container.pop(name, None)
