"""The scale subresource."""

from typing import Any

from tests.cluster.kubernetes import errors
from tests.cluster.kubernetes.api import APPLY_PATCH, JSON_PATCH, Api, Options
from tests.cluster.kubernetes.errors import ApiError, Object
from tests.cluster.kubernetes.metadata import path_value, with_path
from tests.cluster.kubernetes.patches import json_patch, merge_patch
from tests.cluster.kubernetes.resources import Resource
from tests.cluster.kubernetes.storage import Name


def read_scale(resource: Resource, item: Object) -> Object:
    """Return the Scale object of an object."""
    paths = resource.scale or {}
    metadata = {
        name: item["metadata"][name] for name in ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
        if name in item["metadata"]
    }  # fmt: skip
    replicas = path_value(item, paths["specReplicasPath"])
    if replicas is None and resource.custom:
        raise ApiError(
            500, f"Internal error occurred: the spec replicas field {paths['specReplicasPath']!r} does not exist"
        )
    status: Object = {"replicas": path_value(item, paths["statusReplicasPath"]) or 0}
    selector = path_value(item, paths.get("labelSelectorPath") or ".none")
    if selector:
        labels = selector.get("matchLabels") or {} if isinstance(selector, dict) else {}
        status["selector"] = selector if isinstance(selector, str) else ",".join(f"{k}={v}" for k, v in labels.items())
    spec = {"replicas": replicas} if replicas else {}
    return {"kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": metadata, "spec": spec, "status": status}


async def write_scale(
    api: Api, resource: Resource, name: Name, method: str, content_type: str, body: Any, options: Options
) -> Object:
    """Set the replicas by PUT or PATCH. Raises 409 and 422."""
    path = (resource.scale or {})["specReplicasPath"]

    def scaled(live: Object) -> Object:
        current = read_scale(resource, live)
        if method == "PUT":
            wanted = body
        elif content_type == JSON_PATCH:
            wanted = json_patch(current, body)
        elif content_type == APPLY_PATCH or isinstance(body, dict):
            wanted = merge_patch(current, body)
        else:
            raise ApiError(400, "error decoding patch")
        replicas = (wanted.get("spec") or {}).get("replicas", 0)
        if not isinstance(replicas, int) or replicas < 0:
            problem = errors.invalid_value("spec.replicas", replicas, "must be greater than or equal to 0")
            raise errors.invalid("autoscaling", "Scale", name[1], [problem])
        version = (wanted.get("metadata") or {}).get("resourceVersion")
        changed = with_path(live, path, replicas)
        metadata = {**changed["metadata"], "resourceVersion": version or changed["metadata"]["resourceVersion"]}
        if not version:
            del metadata["resourceVersion"]
        return {**changed, "metadata": metadata}

    return read_scale(resource, await api.change(resource, name, scaled, options))
