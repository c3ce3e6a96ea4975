"""Validation of built-in kinds: the rules that an operator can break. Pure."""

import re
from typing import Any

from tests.cluster.kubernetes.errors import Object, cause, duplicate, invalid_value, not_supported, required
from tests.cluster.kubernetes.metadata import LABEL, check_key, check_label
from tests.cluster.kubernetes.selectors import object_selector

IMMUTABLE = "field is immutable"
VARIABLE = re.compile(r"[ -<>-~]+")
QUANTITY = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+|[numkMGTPE]|[KMGTPE]i)?")
POD_FIELDS_THAT_CHANGE = {"containers", "initContainers", "activeDeadlineSeconds", "tolerations", "nodeName",
                          "terminationGracePeriodSeconds", "ephemeralContainers"}  # fmt: skip


def check(item: Object, live: Object | None) -> list[Object]:
    """Return the causes for which a built-in object is refused."""
    kind, spec = item["kind"], item.get("spec") or {}
    before = (live or {}).get("spec") or {}
    causes: list[Object] = []
    if kind == "Pod":
        causes += check_pod_spec(spec, "spec")
        changed = [
            name
            for name in {*spec, *before}
            if live and name not in POD_FIELDS_THAT_CHANGE and spec.get(name) != before.get(name)
        ]
        if changed:
            text = "pod updates may not change fields other than `spec.containers[*].image`,`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing tolerations),`spec.terminationGracePeriodSeconds`"
            causes.append(cause("FieldValueForbidden", f"Forbidden: {text}", "spec"))
    elif kind in {"Deployment", "ReplicaSet", "StatefulSet", "DaemonSet"}:
        causes += _check_workload(spec, before, live)
    elif kind == "Job":
        causes += _check_job(spec, before, live)
    elif kind == "Service":
        causes += _check_service(spec, before, live)
    elif kind in {"RoleBinding", "ClusterRoleBinding"} and live and item.get("roleRef") != live.get("roleRef"):
        causes.append(invalid_value("roleRef", item.get("roleRef"), "cannot change roleRef"))
    elif kind == "Lease":
        causes += _check_lease(spec)
    elif kind == "PersistentVolumeClaim":
        causes += _check_claim(spec, before, live)
    elif kind in {"ConfigMap", "Secret"}:
        causes += _check_data(item, live)
    return causes


def check_slice(item: Object) -> list[Object]:
    """Return what is wrong with the addresses of an EndpointSlice."""
    causes = [] if item.get("addressType") else [required("addressType")]
    for index, endpoint in enumerate(item.get("endpoints") or []):
        for at, address in enumerate(endpoint.get("addresses") or []):
            if address.startswith("127."):
                text = "may not be in the loopback range (127.0.0.0/8, ::1/128)"
                causes.append(invalid_value(f"endpoints[{index}].addresses[{at}]", address, text))
    return causes


def check_pod_spec(spec: Object, path: str) -> list[Object]:
    """Return what is wrong with a pod specification."""
    causes: list[Object] = []
    if not spec.get("containers"):
        causes.append(required(f"{path}.containers"))
    volumes = [one.get("name", "") for one in spec.get("volumes") or []]
    for index, name in enumerate(volumes):
        causes += _check_dns_label(name, f"{path}.volumes[{index}].name")
        sources = [one for one in spec["volumes"][index] if one != "name"]
        if len(sources) > 1:
            causes.append(
                cause(
                    "FieldValueForbidden",
                    "Forbidden: may not specify more than 1 volume type",
                    f"{path}.volumes[{index}].{sources[1]}",
                )
            )
    seen: list[str] = []
    for field in ("containers", "initContainers"):
        for index, container in enumerate(spec.get(field) or []):
            at = f"{path}.{field}[{index}]"
            if container.get("name") in seen:
                causes.append(duplicate(f"{at}.name", container["name"]))
            seen.append(container.get("name", ""))
            causes += _check_container(container, volumes, at)
    if spec.get("restartPolicy") not in {"Always", "OnFailure", "Never"}:
        causes.append(
            not_supported(f"{path}.restartPolicy", spec.get("restartPolicy"), ["Always", "OnFailure", "Never"])
        )
    return causes


def _check_dns_label(name: str, path: str) -> list[Object]:
    if not name:
        return [required(path)]
    if len(name) > 63 or not LABEL.fullmatch(name):
        return [
            invalid_value(
                path,
                name,
                "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character",
            )
        ]
    return []


def _check_container(container: Object, volumes: list[str], at: str) -> list[Object]:
    causes = _check_dns_label(container.get("name") or "", f"{at}.name")
    if not container.get("image"):
        causes.append(required(f"{at}.image"))
    for index, variable in enumerate(container.get("env") or []):
        name = variable.get("name") or ""
        if not VARIABLE.fullmatch(name):
            causes.append(
                invalid_value(
                    f"{at}.env[{index}].name",
                    name,
                    "a valid environment variable name must consist only of printable ASCII characters other than '='",
                )
                if name
                else required(f"{at}.env[{index}].name")
            )
        if variable.get("value") and variable.get("valueFrom"):
            causes.append(
                invalid_value(f"{at}.env[{index}].valueFrom", "", "may not be specified when `value` is not empty")
            )
    paths: list[str] = []
    for index, mount in enumerate(container.get("volumeMounts") or []):
        if mount.get("name") not in volumes:
            causes.append(
                cause("FieldValueNotFound", f'Not found: "{mount.get("name")}"', f"{at}.volumeMounts[{index}].name")
            )
        if mount.get("mountPath") in paths:
            causes.append(invalid_value(f"{at}.volumeMounts[{index}].mountPath", mount["mountPath"], "must be unique"))
        paths.append(mount.get("mountPath", ""))
    names = [port["name"] for port in container.get("ports") or [] if port.get("name")]
    for index, port in enumerate(container.get("ports") or []):
        if not 0 < port.get("containerPort", 0) < 65536:
            causes.append(
                invalid_value(
                    f"{at}.ports[{index}].containerPort",
                    port.get("containerPort"),
                    "must be between 1 and 65535, inclusive",
                )
            )
        if port.get("name") and (len(port["name"]) > 15 or not LABEL.fullmatch(port["name"])):
            causes.append(
                invalid_value(f"{at}.ports[{index}].name", port["name"], "must be no more than 15 characters")
            )
        if names.count(port.get("name")) > 1:
            causes.append(duplicate(f"{at}.ports[{index}].name", port["name"]))
    return causes + _check_resources(container.get("resources") or {}, f"{at}.resources") + _check_probes(container, at)


def _check_probes(container: Object, at: str) -> list[Object]:
    causes = []
    for name in ("livenessProbe", "readinessProbe", "startupProbe"):
        probe = container.get(name)
        if probe is None:
            continue
        handlers = [one for one in ("exec", "httpGet", "tcpSocket", "grpc") if probe.get(one)]
        if not handlers:
            causes.append(required(f"{at}.{name}", "must specify a handler type"))
        if name != "readinessProbe" and probe.get("successThreshold", 1) != 1:
            causes.append(invalid_value(f"{at}.{name}.successThreshold", probe["successThreshold"], "must be 1"))
    return causes


def _check_resources(resources: Object, at: str) -> list[Object]:
    causes: list[Object] = []
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    for field, values in (("limits", limits), ("requests", requests)):
        for name, value in values.items():
            if not QUANTITY.fullmatch(str(value)):
                causes.append(
                    invalid_value(
                        f"{at}.{field}[{name}]",
                        value,
                        "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'",
                    )
                )
    for name, value in requests.items():
        if "/" in name and name not in limits:
            causes.append(required(f"{at}.limits[{name}]", "Limit must be set for non overcommitable resources"))
        elif "/" in name and str(limits[name]) != str(value):
            causes.append(
                invalid_value(f"{at}.requests", str(value), f"must be equal to {name} limit of {limits[name]}")
            )
    return causes


def _check_workload(spec: Object, before: Object, live: Object | None) -> list[Object]:
    selector = spec.get("selector")
    template = spec.get("template") or {}
    causes: list[Object] = []
    if not selector:
        causes.append(required("spec.selector"))
    else:
        labels = (template.get("metadata") or {}).get("labels") or {}
        if not object_selector(selector)(labels):
            causes.append(
                invalid_value("spec.template.metadata.labels", labels, "`selector` does not match template `labels`")
            )
    if live and selector != before.get("selector"):
        causes.append(invalid_value("spec.selector", selector, IMMUTABLE))
    if (spec.get("replicas") or 0) < 0:
        causes.append(invalid_value("spec.replicas", spec["replicas"], "must be greater than or equal to 0"))
    causes += _check_template(template)
    policy = (template.get("spec") or {}).get("restartPolicy")
    if policy != "Always":
        causes.append(not_supported("spec.template.spec.restartPolicy", policy, ["Always"]))
    return causes


def _check_template(template: Object) -> list[Object]:
    causes: list[Object] = []
    metadata = template.get("metadata") or {}
    for key, value in (metadata.get("labels") or {}).items():
        causes += check_key(key, "spec.template.metadata.labels") + check_label(value, "spec.template.metadata.labels")
    for key in metadata.get("annotations") or {}:
        causes += check_key(key.lower(), "spec.template.metadata.annotations")
    return causes + check_pod_spec(template.get("spec") or {}, "spec.template.spec")


def _check_job(spec: Object, before: Object, live: Object | None) -> list[Object]:
    causes = _check_template(spec.get("template") or {})
    policy = ((spec.get("template") or {}).get("spec") or {}).get("restartPolicy")
    if policy == "Always":
        causes.append(
            cause(
                "FieldValueRequired",
                'Required value: valid values: "OnFailure", "Never"',
                "spec.template.spec.restartPolicy",
            )
        )
    for name in ("completions", "selector", "completionMode", "template"):
        if live and spec.get(name) != before.get(name) and not before.get("suspend"):
            causes.append(invalid_value(f"spec.{name}", "object", IMMUTABLE))
    return causes


def _check_service(spec: Object, before: Object, live: Object | None) -> list[Object]:
    causes: list[Object] = []
    ports = spec.get("ports") or []
    if not ports and spec.get("clusterIP") != "None" and spec.get("type") != "ExternalName":
        causes.append(required("spec.ports"))
    for index, port in enumerate(ports):
        if len(ports) > 1 and not port.get("name"):
            causes.append(required(f"spec.ports[{index}].name"))
        if not 0 < port.get("port", 0) < 65536:
            causes.append(
                invalid_value(f"spec.ports[{index}].port", port.get("port"), "must be between 1 and 65535, inclusive")
            )
    if live and spec.get("clusterIP") != before.get("clusterIP") and before.get("clusterIP"):
        causes.append(invalid_value("spec.clusterIPs[0]", [spec.get("clusterIP")], "may not change once set"))
    for key, value in (spec.get("selector") or {}).items():
        causes += check_key(key, "spec.selector") + check_label(value, "spec.selector")
    return causes


def _check_lease(spec: Object) -> list[Object]:
    causes = []
    duration, transitions = spec.get("leaseDurationSeconds"), spec.get("leaseTransitions")
    if duration is not None and duration <= 0:
        causes.append(invalid_value("spec.leaseDurationSeconds", duration, "must be greater than 0"))
    if transitions is not None and transitions < 0:
        causes.append(invalid_value("spec.leaseTransitions", transitions, "must be greater than or equal to 0"))
    return causes


def _check_claim(spec: Object, before: Object, live: Object | None) -> list[Object]:
    causes = []
    if not spec.get("accessModes"):
        causes.append(required("spec.accessModes", "at least 1 access mode is required"))
    if not ((spec.get("resources") or {}).get("requests") or {}).get("storage"):
        causes.append(required("spec.resources[storage]"))
    without: Any = [{k: v for k, v in one.items() if k not in {"resources", "volumeName"}} for one in (spec, before)]
    if live and without[0] != without[1]:
        causes.append(
            cause(
                "FieldValueForbidden",
                "Forbidden: spec is immutable after creation except resources.requests and volumeAttributesClassName for bound claims",
                "spec",
            )
        )
    return causes


def _check_data(item: Object, live: Object | None) -> list[Object]:
    rule = "a valid config key must consist of alphanumeric characters, '-', '_' or '.'"
    keys = [*(item.get("data") or {}), *(item.get("binaryData") or {})]
    causes = [
        invalid_value(f"data[{key}]", key, rule)
        for key in dict.fromkeys(keys)
        if not re.fullmatch(r"[-._a-zA-Z0-9]{1,253}", key)
    ]
    if live and item["kind"] == "Secret" and item.get("type") != live.get("type"):
        causes.append(invalid_value("type", item.get("type"), IMMUTABLE))
    if live and live.get("immutable") and item.get("data") != live.get("data"):
        causes.append(cause("FieldValueForbidden", "Forbidden: field is immutable when `immutable` is set", "data"))
    return causes
