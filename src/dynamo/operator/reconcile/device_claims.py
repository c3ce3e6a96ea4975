"""GPUs that a component's main container claims of a device driver, in place of a limit of the device plugin. Pure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dynamo.operator.reconcile.memory_service import gpu_count, is_gpu_resource
from dynamo.operator.reconcile.multinode.nodes import WorkloadError
from dynamo.operator.reconcile.names import main_container
from dynamo.protocols.kubernetes.common import KubeObject
from dynamo.protocols.kubernetes.v1beta1 import ComponentSpec

CLAIM, TEMPLATE, CLASS = "ResourceClaim", "ResourceClaimTemplate", "DeviceClass"
DRIVER = re.compile(r"device\.driver\s*==\s*[\"']([^\"']+)[\"']")


@dataclass(frozen=True, slots=True)
class ClaimUse:
    """A claim of a container."""

    kind: str
    """ResourceClaim or ResourceClaimTemplate."""
    name: str
    request: str
    """Request of the claim that the container uses; empty: all of them."""


def claims_of(component: ComponentSpec) -> list[ClaimUse]:
    """Return the claims of a main container without GPUs of the device plugin. Raise `WorkloadError` for an unknown one."""
    main = main_container(component)
    given = (main.get("resources") or {}).get("claims") or ()
    if gpu_count(main) or not given:
        return []
    spec = (component.pod_template or {}).get("spec") or {}
    known = {one["name"]: one for one in spec.get("resourceClaims") or ()}
    found = []
    for one in given:
        claim = known.get(one["name"]) or {}
        template, name = claim.get("resourceClaimTemplateName"), claim.get("resourceClaimName")
        if not template and not name:
            raise WorkloadError(f"{_path(component)}: {one['name']} is not among the resourceClaims of the pod")
        use = ClaimUse(TEMPLATE if template else CLAIM, template or name or "", one.get("request") or "")
        found += [] if use in found else [use]
    return found


def device_requests(use: ClaimUse, claim: KubeObject) -> list[KubeObject]:
    """Return the requests that a container uses of a claim or of the claims of a template."""
    spec = claim["spec"]["spec"] if use.kind == TEMPLATE else claim["spec"]
    requests = (spec.get("devices") or {}).get("requests") or ()
    return [one for one in requests if use.request in ("", one["name"])]


def class_names(requests: Sequence[KubeObject]) -> set[str]:
    """Return the names of the device classes of requests."""
    return {one["deviceClassName"] for request in requests for one in _alternatives(request)}


def requested_gpus(component: ComponentSpec, request: KubeObject, classes: Mapping[str, KubeObject]) -> int:
    """Return the GPUs of one request. Raise `WorkloadError` for a number that depends on the node, or is not known."""
    path, name = _path(component), request["name"]
    found = set()
    for one in _alternatives(request):
        if not _is_gpu(path, classes[one["deviceClassName"]], one.get("selectors") or ()):
            found.add(0)
            continue
        if one.get("allocationMode", "ExactCount") != "ExactCount":
            raise WorkloadError(
                f"{path}: allocationMode {one['allocationMode']} of request {name} states no number of GPUs"
            )
        found.add(int(one.get("count") or 1))
    if len(found) != 1:
        raise WorkloadError(f"{path}: the alternatives of request {name} differ in their number of GPUs")
    return found.pop()


def _alternatives(request: KubeObject) -> Iterator[KubeObject]:
    yield from [request["exactly"]] if request.get("exactly") else request.get("firstAvailable") or ()


def _is_gpu(path: str, device_class: KubeObject, selectors: Sequence[KubeObject]) -> bool:
    """Return whether the devices of a class are GPUs: by their driver, the extended resource, or the name of the class."""
    spec, name = device_class.get("spec") or {}, device_class["metadata"]["name"]
    expressions = [
        str((one.get("cel") or {}).get("expression") or "") for one in (*(spec.get("selectors") or ()), *selectors)
    ]
    drivers = {found for one in expressions if "||" not in one for found in DRIVER.findall(one)}
    kinds = {_is_gpu_name(one) for one in drivers}
    if not kinds and spec.get("extendedResourceName"):
        kinds = {is_gpu_resource(spec["extendedResourceName"])}
    if not kinds and not expressions and _is_gpu_name(name):
        kinds = {True}
    if len(kinds) != 1:
        raise WorkloadError(
            f"{path}: DeviceClass {name} does not say whether it has GPUs: "
            "spec.extendedResourceName or a selector with device.driver is required"
        )
    return kinds.pop()


def _is_gpu_name(name: str) -> bool:
    lower = name.lower()
    return lower == "gpu" or re.search(r"^gpu[./]|/gpu($|[.-])", lower) is not None


def _path(component: ComponentSpec) -> str:
    return f"spec.components[{component.name}].podTemplate.spec.containers[main].resources.claims"
