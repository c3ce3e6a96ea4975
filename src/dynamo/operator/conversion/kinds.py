"""Spec and status of every kind with two versions: the fields that have a counterpart in the other version."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from dynamo.operator.conversion.components import to_component, to_service
from dynamo.operator.validation.facts import part
from dynamo.protocols.kubernetes.common import KubeObject

Mapper = Callable[[KubeObject], KubeObject]
GRAPH_SAME = ("annotations", "labels", "priorityClassName", "backendFramework", "restart", "providerOverride")
SAME_IN_REQUESTS = ("backend", "runtimeVersionOverride")
PHASES = {
    "": "Pending", "Initializing": "Pending", "Pending": "Pending", "Profiling": "Profiling", "Deploying": "Deploying",
    "Ready": "Ready", "DeploymentDeleted": "Ready", "Failed": "Failed",
}  # fmt: skip
STATES = {"Deployed": "Ready"}
STATUS_SAME = ("observedGeneration", "conditions")


class KindConversion(NamedTuple):
    """Mapping of one kind in both directions; fields without a counterpart are left out."""

    spec_to_beta: Mapper
    spec_to_alpha: Mapper
    status_to_beta: Mapper
    status_to_alpha: Mapper
    short_name: str


def _graph_to_beta(spec: KubeObject) -> KubeObject:
    result = {name: spec[name] for name in GRAPH_SAME if name in spec}
    if "envs" in spec:
        result["env"] = spec["envs"]
    constraint = spec.get("topologyConstraint")
    if isinstance(constraint, dict):
        name = constraint.get("clusterTopologyName") or constraint.get("topologyProfile") or ""
        domain = {"packDomain": constraint["packDomain"]} if "packDomain" in constraint else {}
        result["topologyConstraint"] = {"clusterTopologyName": name, **domain}
    policy = part(spec, "experimental").get("kvTransferPolicy")
    if policy is not None:
        result["experimental"] = {"kvTransferPolicy": policy}
    services = spec.get("services")
    if services is not None:
        # The order of a map is not kept by an API server: sorted, the same object always becomes the same list.
        result["components"] = [to_component(services[name] or {}, name) for name in sorted(services)]
    return result


def _graph_to_alpha(spec: KubeObject) -> KubeObject:
    result = {name: spec[name] for name in GRAPH_SAME if name in spec}
    if "env" in spec:
        result["envs"] = spec["env"]
    for name in ("topologyConstraint", "experimental"):
        if name in spec:
            result[name] = spec[name]
    if spec.get("components") is not None:
        result["services"] = {one["name"]: to_service(one) for one in spec["components"]}
    return result


def _renamed(*pairs: tuple[str, str]) -> Mapper:
    """Return a mapper that keeps all fields and renames some; a dot leads into an object."""

    def mapper(value: KubeObject) -> KubeObject:
        result = dict(value)
        for old, new in pairs:
            outer, _, inner = old.rpartition(".")
            if not outer and inner in result:
                result[new] = result.pop(inner)
            elif outer and isinstance(result.get(outer), dict) and inner in result[outer]:
                result[outer] = {**result[outer], new: result[outer][inner]}
                del result[outer][inner]
        return result

    return mapper


def _component_to_beta(spec: KubeObject) -> KubeObject:
    backend = {"backendFramework": spec["backendFramework"]} if "backendFramework" in spec else {}
    return {**to_component(spec, spec.get("serviceName")), **backend}


def _component_to_alpha(spec: KubeObject) -> KubeObject:
    names = {"serviceName": spec["name"]} if "name" in spec else {}
    backend = {"backendFramework": spec["backendFramework"]} if "backendFramework" in spec else {}
    return {**to_service(spec), **names, **backend}


def _request_to_beta(spec: KubeObject) -> KubeObject:
    profiling = part(spec, "profilingConfig")
    config = part(profiling, "config")
    targets = part(config, "sla")
    # v1alpha1 does not apply by default, v1beta1 does.
    result: KubeObject = {"model": spec.get("model"), "autoApply": bool(spec.get("autoApply", False))}
    result |= {name: spec[name] for name in SAME_IN_REQUESTS if spec.get(name)}
    image = profiling.get("profilerImage") or part(spec, "deploymentOverrides").get("workersImage")
    if image:
        result["image"] = image
    for name, fields in (("sla", ("ttft", "itl")), ("workload", ("isl", "osl"))):
        found = {field: targets[field] for field in fields if _is_number(targets.get(field))}
        if found:
            result[name] = found
    cache = part(config, "deployment", "modelCache")
    if cache:
        names = (("pvcName", "pvcName"), ("modelPathInPvc", "pvcModelPath"), ("pvcMountPath", "pvcMountPath"))
        result["modelCache"] = {new: cache[old] for old, new in names if old in cache}
    features: KubeObject = {}
    if spec.get("useMocker"):
        features["mocker"] = {"enabled": True}
    if part(config, "planner"):
        features["planner"] = config["planner"]
    if features:
        result["features"] = features
    pod = _profiling_pod(profiling)
    if pod:
        result["overrides"] = {"profilingJob": {"template": {"spec": pod}}}
    return result


def _profiling_pod(profiling: KubeObject) -> KubeObject:
    pod: KubeObject = {}
    if profiling.get("resources"):
        pod["containers"] = [{"resources": profiling["resources"]}]
    for name in ("tolerations", "nodeSelector"):
        if profiling.get(name):
            pod[name] = profiling[name]
    return pod


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _request_to_alpha(spec: KubeObject) -> KubeObject:
    result: KubeObject = {"model": spec.get("model"), "autoApply": bool(spec.get("autoApply", True))}
    result |= {name: spec[name] for name in SAME_IN_REQUESTS if spec.get(name)}
    if part(spec, "features", "mocker").get("enabled"):
        result["useMocker"] = True
    config: KubeObject = {}
    targets = {
        field: part(spec, name)[field]
        for name, fields in (("workload", ("isl", "osl")), ("sla", ("ttft", "itl")))
        for field in fields
        if part(spec, name).get(field) is not None
    }
    if targets:
        config["sla"] = targets
    cache = part(spec, "modelCache")
    if cache:
        names = (("pvcName", "pvcName"), ("pvcModelPath", "modelPathInPvc"), ("pvcMountPath", "pvcMountPath"))
        config["deployment"] = {"modelCache": {new: cache[old] for old, new in names if old in cache}}
    if part(spec, "features", "planner"):
        config["planner"] = spec["features"]["planner"]
    profiling: KubeObject = {"config": config} if config else {}
    if spec.get("image"):
        profiling["profilerImage"] = spec["image"]
    pod = part(spec, "overrides", "profilingJob", "template", "spec")
    containers = pod.get("containers") or []
    if containers and containers[0].get("resources"):
        profiling["resources"] = containers[0]["resources"]
    profiling |= {name: pod[name] for name in ("tolerations", "nodeSelector") if pod.get(name)}
    if profiling:
        result["profilingConfig"] = profiling
    return result


def _request_status_to_beta(status: KubeObject) -> KubeObject:
    result = {name: status[name] for name in STATUS_SAME if name in status}
    deployment = part(status, "deployment")
    if "state" in status:
        phase = PHASES.get(status["state"], "Pending")
        result["phase"] = "Deployed" if phase == "Ready" and deployment.get("created") else phase
    if deployment.get("name"):
        result["dgdName"] = deployment["name"]
    if status.get("generatedDeployment") is not None:
        result["profilingResults"] = {"selectedConfig": status["generatedDeployment"]}
    return result


def _request_status_to_alpha(status: KubeObject) -> KubeObject:
    result = {name: status[name] for name in STATUS_SAME if name in status}
    if "phase" in status:
        result["state"] = STATES.get(status["phase"], status["phase"])
    deployment: KubeObject = {"name": status["dgdName"]} if status.get("dgdName") else {}
    if status.get("phase") == "Deployed":
        deployment["created"] = True
    if deployment:
        result["deployment"] = deployment
    selected = part(status, "profilingResults").get("selectedConfig")
    if selected is not None and selected.get("apiVersion") and selected.get("kind"):
        result["generatedDeployment"] = selected
    return result


CONVERSIONS: Mapping[str, KindConversion] = {
    "DynamoGraphDeployment": KindConversion(
        _graph_to_beta,
        _graph_to_alpha,
        _renamed(("services", "components"), ("rollingUpdate.updatedServices", "updatedComponents")),
        _renamed(("components", "services"), ("rollingUpdate.updatedComponents", "updatedServices")),
        "dgd",
    ),
    "DynamoComponentDeployment": KindConversion(
        _component_to_beta,
        _component_to_alpha,
        _renamed(("service", "component")),
        _renamed(("component", "service")),
        "dcd",
    ),
    "DynamoGraphDeploymentRequest": KindConversion(
        _request_to_beta, _request_to_alpha, _request_status_to_beta, _request_status_to_alpha, "dgdr"
    ),
    "DynamoGraphDeploymentScalingAdapter": KindConversion(
        _renamed(("dgdRef.serviceName", "componentName")),
        _renamed(("dgdRef.componentName", "serviceName")),
        _renamed(),
        _renamed(),
        "dgdsa",
    ),
}
