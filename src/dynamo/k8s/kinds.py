"""Kinds of Kubernetes objects that this project reads or writes, with their places in the API."""

import re
from dataclasses import dataclass

from dynamo.core.errors import InvalidArgument

SEGMENT = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.:]*[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True)
class ObjectKind:
    """One kind of one API version."""

    api_version: str
    """`v1`, or `group/version`."""
    kind: str
    plural: str
    is_namespaced: bool = True

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        """Return the URL path of the collection or of an object; without a namespace that of all namespaces.

        Raise `InvalidArgument` for a name that would leave its place in the path.
        """
        root = "/api/" if "/" not in self.api_version else "/apis/"
        parts = [root + self.api_version]
        if namespace is not None and self.is_namespaced:
            parts += ["namespaces", _segment(namespace)]
        parts.append(self.plural)
        parts.extend(_segment(part) for part in (name, subresource) if part is not None)
        return "/".join(parts)


def _segment(name: str) -> str:
    if not SEGMENT.fullmatch(name) or len(name) > 253:
        raise InvalidArgument(f"{name[:80]!r} is not a name of a Kubernetes object")
    return name


PODS = ObjectKind("v1", "Pod", "pods")
ENDPOINT_SLICES = ObjectKind("discovery.k8s.io/v1", "EndpointSlice", "endpointslices")
WORKER_METADATA = ObjectKind("nvidia.com/v1alpha1", "DynamoWorkerMetadata", "dynamoworkermetadatas")
GRAPHS = ObjectKind("nvidia.com/v1beta1", "DynamoGraphDeployment", "dynamographdeployments")
SCALING_ADAPTERS = ObjectKind(
    "nvidia.com/v1beta1", "DynamoGraphDeploymentScalingAdapter", "dynamographdeploymentscalingadapters"
)
