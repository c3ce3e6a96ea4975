"""One view of the components of both API versions: the values that rules compare, each with its path in the object."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dynamo.operator.validation.facts import part
from dynamo.protocols.kubernetes.common import KubeObject

MAIN = "main"
GPU_RESOURCE = "nvidia.com/gpu"
WORKER_TYPES = frozenset({"worker", "prefill", "decode"})
MODES = {"intraPod": "IntraPod", "interPod": "InterPod"}
DEFAULT_NODES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentView:
    """One component in either version."""

    is_alpha: bool
    path: str
    name: str
    name_path: str
    type: str
    type_path: str
    replicas: int | None
    node_count: int | None
    """Nodes of one replica; None: the component has one node."""
    has_adapter: bool
    epp_config: KubeObject | None
    pack_domain: str | None
    has_topology: bool
    memory_mode: str | None
    """Mode of the GPU memory service, as v1beta1 spells it; None: off."""
    memory_path: str
    failover_mode: str | None
    failover_path: str
    shadows: int
    """Standby engines of each engine."""
    checkpoint: KubeObject
    image: str
    """Image of the main container."""
    gpus: int
    containers: tuple[str, ...]
    command: tuple[str, ...]
    """Command and arguments of the main container."""
    annotations: KubeObject
    raw: KubeObject

    @property
    def is_worker(self) -> bool:
        """Whether the component runs an engine."""
        return self.type in WORKER_TYPES

    @property
    def is_multinode(self) -> bool:
        """Whether one replica spans nodes."""
        return self.node_count is not None and self.node_count > 1

    @property
    def replicas_or_default(self) -> int:
        """The number of replicas that the operator creates."""
        return 1 if self.replicas is None else self.replicas


def components_of(spec: KubeObject, *, is_alpha: bool) -> list[ComponentView]:
    """Return the components of a graph in the order of the object."""
    if is_alpha:
        services = part(spec, "services")
        return [alpha_component(part(services, name), f"spec.services.{name}", name) for name in services]
    found = spec.get("components")
    items = found if isinstance(found, list) else []
    return [
        beta_component(item, f"spec.components[{index}]", str(item.get("name") or ""))
        for index, item in enumerate(items)
        if isinstance(item, dict)
    ]


def beta_component(raw: KubeObject, path: str, name: str) -> ComponentView:
    """Return the view of a v1beta1 component."""
    pod = part(raw, "podTemplate", "spec")
    containers = _dicts(pod.get("containers"))
    main: KubeObject = next((one for one in containers if one.get("name") == MAIN), {})
    experimental = part(raw, "experimental")
    return ComponentView(
        is_alpha=False,
        path=path,
        name=name,
        name_path=f"{path}.name",
        type=str(raw.get("type") or ""),
        type_path=f"{path}.type",
        replicas=_count(raw.get("replicas")),
        node_count=_nodes(raw.get("multinode")),
        has_adapter=isinstance(raw.get("scalingAdapter"), dict),
        epp_config=raw.get("eppConfig"),
        pack_domain=part(raw, "topologyConstraint").get("packDomain"),
        has_topology=raw.get("topologyConstraint") is not None,
        memory_mode=_beta_mode(experimental.get("gpuMemoryService")),
        memory_path=f"{path}.experimental.gpuMemoryService",
        failover_mode=_beta_mode(experimental.get("failover")),
        failover_path=f"{path}.experimental.failover",
        shadows=_count(part(experimental, "failover").get("numShadows")) or 1,
        checkpoint=part(experimental, "checkpoint"),
        image=str(main.get("image") or ""),
        gpus=gpu_count(part(main, "resources"), GPU_RESOURCE),
        containers=tuple(str(one.get("name") or "") for one in containers),
        command=_command(main),
        annotations=part(raw, "podTemplate", "metadata", "annotations"),
        raw=raw,
    )


def alpha_component(raw: KubeObject, path: str, name: str) -> ComponentView:
    """Return the view of a v1alpha1 service."""
    main = part(raw, "extraPodSpec", "mainContainer")
    kind, sub = str(raw.get("componentType") or ""), str(raw.get("subComponentType") or "")
    others = [str(one.get("name") or "") for one in _dicts(part(raw, "extraPodSpec").get("containers"))]
    return ComponentView(
        is_alpha=True,
        path=path,
        name=name,
        name_path=path,
        type=sub if kind == "worker" and sub in WORKER_TYPES else kind,
        type_path=f"{path}.componentType",
        replicas=_count(raw.get("replicas")),
        node_count=_nodes(raw.get("multinode")),
        has_adapter=part(raw, "scalingAdapter").get("enabled") is True,
        epp_config=raw.get("eppConfig"),
        pack_domain=part(raw, "topologyConstraint").get("packDomain"),
        has_topology=raw.get("topologyConstraint") is not None,
        memory_mode=_alpha_mode(part(raw, "gpuMemoryService")),
        memory_path=f"{path}.gpuMemoryService",
        failover_mode=_alpha_mode(part(raw, "failover")),
        failover_path=f"{path}.failover",
        shadows=_count(part(raw, "failover").get("numShadows")) or 1,
        checkpoint=part(raw, "checkpoint"),
        image=str(main.get("image") or ""),
        gpus=gpu_count(part(raw, "resources"), "gpu") or gpu_count(part(main, "resources"), GPU_RESOURCE),
        containers=(MAIN, *others),
        command=_command(main),
        annotations={**part(raw, "annotations"), **part(raw, "extraPodMetadata", "annotations")},
        raw=raw,
    )


def gpu_count(resources: KubeObject, name: str) -> int:
    """Return the GPUs of a container's limits, else of its requests; 0 where none are given."""
    for side in ("limits", "requests"):
        value = part(resources, side).get(name)
        if isinstance(value, int) or (isinstance(value, str) and value.isdigit()):
            return int(value)
    return 0


def _nodes(multinode: Any) -> int | None:
    if not isinstance(multinode, dict):
        return None
    count = multinode.get("nodeCount")
    return count if isinstance(count, int) else DEFAULT_NODES


def _beta_mode(value: Any) -> str | None:
    return str(value.get("mode") or "IntraPod") if isinstance(value, dict) else None


def _alpha_mode(value: KubeObject) -> str | None:
    return MODES.get(str(value.get("mode") or ""), "IntraPod") if value.get("enabled") is True else None


def _command(container: KubeObject) -> tuple[str, ...]:
    words: list[Any] = [*(container.get("command") or ()), *(container.get("args") or ())]
    return tuple(str(word) for word in words)


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _dicts(value: Any) -> list[KubeObject]:
    items: Iterable[Any] = value if isinstance(value, list) else ()
    return [one for one in items if isinstance(one, dict)]
