"""Conversion of one component: a v1alpha1 service with flat fields, and a v1beta1 component with a pod template."""

from typing import Any

from dynamo.operator.validation.facts import part
from dynamo.operator.validation.views import GPU_RESOURCE, MAIN, MODES
from dynamo.protocols.kubernetes.common import KubeObject

SAME = (
    "replicas", "minAvailable", "multinode", "modelRef", "topologyConstraint", "eppConfig", "globalDynamoNamespace",
    "runtimeVersionOverride", "providerOverride",
)  # fmt: skip
"""Fields that are equal in both versions."""
CHECKPOINT_SAME = (
    "enabled", "checkpointRef", "startupPolicy", "deletionPolicy", "targetContainerName", "job", "mode", "identity"
)  # fmt: skip
PROMOTED = frozenset({"prefill", "decode"})
"""Sub-component types of v1alpha1 that are types of v1beta1."""
BETA_TYPES = frozenset({"frontend", "worker", "prefill", "decode", "planner", "epp"})
"""Types that v1beta1 accepts; other types of v1alpha1, such as `default`, have the defaults of no role."""
SIDECAR = "sidecar-frontend"
PROBES = ("livenessProbe", "readinessProbe")
ALPHA_ONLY = (
    "serviceName", "dynamoNamespace", "autoscaling", "ingress", "annotations", "labels", "dynamoComponent", "dynamoTag"
)  # fmt: skip
"""Fields that v1beta1 has no place for, or that it merges into the pod template."""


def to_component(service: KubeObject, name: str | None) -> KubeObject:
    """Return the v1beta1 component of a v1alpha1 service."""
    component: KubeObject = {} if name is None else {"name": name}
    kind, sub = service.get("componentType"), service.get("subComponentType")
    if kind == "worker" and sub in PROMOTED:
        component["type"] = sub
    elif kind in BETA_TYPES:
        component["type"] = kind
    component |= {field: service[field] for field in SAME if field in service}
    memory = part(service, "sharedMemory")
    if memory.get("disabled"):
        component["sharedMemorySize"] = "0"
    elif memory.get("size") not in {None, ""}:
        component["sharedMemorySize"] = memory["size"]
    for mount in service.get("volumeMounts") or ():
        if mount.get("useAsCompilationCache") and "compilationCache" not in component:
            path = {"mountPath": mount["mountPoint"]} if mount.get("mountPoint") else {}
            component["compilationCache"] = {"pvcName": mount["name"], **path}
    if part(service, "scalingAdapter").get("enabled"):
        component["scalingAdapter"] = {}
    if service.get("frontendSidecar") is not None:
        component["frontendSidecar"] = SIDECAR
    experimental = _experimental(service)
    if experimental:
        component["experimental"] = experimental
    template = _pod_template(service)
    if template:
        component["podTemplate"] = template
    return component


def _experimental(service: KubeObject) -> KubeObject:
    found: KubeObject = {}
    for name in ("gpuMemoryService", "failover"):
        switch = part(service, name)
        if switch.get("enabled"):
            found[name] = {field: one for field, one in switch.items() if field != "enabled"}
            if "mode" in switch:
                found[name]["mode"] = MODES.get(switch["mode"], switch["mode"])
    checkpoint = part(service, "checkpoint")
    if checkpoint:
        found["checkpoint"] = {name: checkpoint[name] for name in CHECKPOINT_SAME if name in checkpoint}
    return found


def _pod_template(service: KubeObject) -> KubeObject:
    template: KubeObject = {}
    extra = part(service, "extraPodMetadata")
    metadata = {
        name: {**part(service, name), **part(extra, name)}
        for name in ("annotations", "labels")
        if part(service, name) or name in extra
    }
    if metadata:
        template["metadata"] = metadata
    pod = {name: one for name, one in part(service, "extraPodSpec").items() if name != "mainContainer"}
    main = _main_container(service)
    others = pod.pop("containers", None) or []
    sidecar = [] if service.get("frontendSidecar") is None else [_sidecar(service["frontendSidecar"])]
    containers = [*([{"name": MAIN, **main}] if main else []), *others, *sidecar]
    if containers:
        pod["containers"] = containers
    claims = [mount["name"] for mount in service.get("volumeMounts") or () if not mount.get("useAsCompilationCache")]
    present = {one.get("name") for one in pod.get("volumes") or ()}
    volumes = [
        {"name": name, "persistentVolumeClaim": {"claimName": name}}
        for name in dict.fromkeys(claims)
        if name not in present
    ]
    if volumes:
        pod["volumes"] = [*(pod.get("volumes") or ()), *volumes]
    if pod:
        template["spec"] = pod
    return template


def _main_container(service: KubeObject) -> KubeObject:
    main = {name: one for name, one in part(service, "extraPodSpec", "mainContainer").items() if name != "name"}
    own = {one.get("name") for one in main.get("env") or ()}
    envs = [one for one in service.get("envs") or () if one.get("name") not in own]
    if envs:
        main["env"] = [*envs, *(main.get("env") or ())]
    if service.get("envFromSecret"):
        main["envFrom"] = [*(main.get("envFrom") or ()), {"secretRef": {"name": service["envFromSecret"]}}]
    resources = _resources(part(service, "resources"), part(main, "resources"))
    if resources:
        main["resources"] = resources
    mounts = [
        {"name": one["name"], "mountPath": one.get("mountPoint") or ""}
        for one in service.get("volumeMounts") or ()
        if not one.get("useAsCompilationCache")
    ]
    if mounts:
        main["volumeMounts"] = [*(main.get("volumeMounts") or ()), *mounts]
    return main | {name: service[name] for name in PROBES if name in service and name not in main}


def _resources(flat: KubeObject, container: KubeObject) -> KubeObject:
    """Return container resources: those of the container take precedence over the flat ones."""
    result = dict(container)
    for side in ("requests", "limits"):
        item = part(flat, side)
        found: dict[str, Any] = {name: item[name] for name in ("cpu", "memory") if name in item}
        if "gpu" in item:
            found[item.get("gpuType") or GPU_RESOURCE] = item["gpu"]
        found |= part(item, "custom")
        if found:
            result[side] = {**found, **part(container, side)}
    if flat.get("claims") and "claims" not in result:
        result["claims"] = flat["claims"]
    return result


def _sidecar(sidecar: KubeObject) -> KubeObject:
    container: KubeObject = {"name": SIDECAR, "image": sidecar.get("image")}
    if "args" in sidecar:
        container["args"] = sidecar["args"]
    if "envs" in sidecar:
        container["env"] = sidecar["envs"]
    if sidecar.get("envFromSecret"):
        container["envFrom"] = [{"secretRef": {"name": sidecar["envFromSecret"]}}]
    return container


def to_service(component: KubeObject) -> KubeObject:
    """Return the v1alpha1 service of a v1beta1 component; the pod template becomes `extraPodSpec`."""
    service: KubeObject = {}
    kind = component.get("type")
    if kind in PROMOTED:
        service |= {"componentType": "worker", "subComponentType": kind}
    elif kind is not None:
        service["componentType"] = kind
    service |= {field: component[field] for field in SAME if field in component}
    size = component.get("sharedMemorySize")
    if size is not None:
        service["sharedMemory"] = {"disabled": True} if str(size) == "0" else {"size": size}
    cache = part(component, "compilationCache")
    if cache:
        mount = {"mountPoint": cache["mountPath"]} if cache.get("mountPath") else {}
        service["volumeMounts"] = [{"name": cache.get("pvcName"), **mount, "useAsCompilationCache": True}]
    if component.get("scalingAdapter") is not None:
        service["scalingAdapter"] = {"enabled": True}
    service |= _switches(part(component, "experimental"))
    template = part(component, "podTemplate")
    metadata = {name: one for name, one in part(template, "metadata").items() if name in {"annotations", "labels"}}
    if metadata:
        service["extraPodMetadata"] = metadata
    extra = _extra_pod_spec(part(template, "spec"), component.get("frontendSidecar"), service)
    if extra:
        service["extraPodSpec"] = extra
    return service


def _switches(experimental: KubeObject) -> KubeObject:
    found: KubeObject = {}
    for name in ("gpuMemoryService", "failover"):
        if experimental.get(name) is not None:
            item = {"enabled": True, **experimental[name]}
            if "mode" in item:
                item["mode"] = str(item["mode"])[:1].lower() + str(item["mode"])[1:]
            found[name] = item
    checkpoint = part(experimental, "checkpoint")
    if checkpoint:
        found["checkpoint"] = {name: checkpoint[name] for name in CHECKPOINT_SAME if name in checkpoint}
    return found


def _extra_pod_spec(pod: KubeObject, sidecar: Any, service: KubeObject) -> KubeObject:
    extra = {name: one for name, one in pod.items() if name != "containers"}
    others: list[KubeObject] = []
    for container in pod.get("containers") or ():
        if container.get("name") == MAIN and "mainContainer" not in extra:
            extra["mainContainer"] = {name: one for name, one in container.items() if name != "name"}
        elif container.get("name") == SIDECAR == sidecar and _sidecar(_sidecar_fields(container)) == container:
            service["frontendSidecar"] = _sidecar_fields(container)
        else:
            others.append(container)
    if others:
        extra["containers"] = others
    return extra


def _sidecar_fields(container: KubeObject) -> KubeObject:
    fields: KubeObject = {"image": container.get("image")}
    if "args" in container:
        fields["args"] = container["args"]
    if "env" in container:
        fields["envs"] = container["env"]
    sources = container.get("envFrom") or []
    if len(sources) == 1 and part(sources[0], "secretRef").get("name"):
        fields["envFromSecret"] = sources[0]["secretRef"]["name"]
    return fields
