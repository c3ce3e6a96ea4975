"""Resources that the server serves: the built-in ones, and those of CustomResourceDefinitions."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tests.cluster.kubernetes.errors import Object
from tests.cluster.kubernetes.schema import Schema

VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
GroupPlural = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Resource:
    """One version of one resource, as a request addresses it."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    short: tuple[str, ...] = ()
    status: bool = False
    scale: Object | None = None
    """JSON paths of the scale subresource: specReplicasPath, statusReplicasPath, labelSelectorPath."""
    storage_version: str = ""
    schema: Schema = field(default_factory=Schema)
    custom: bool = False
    categories: tuple[str, ...] = ()
    columns: tuple[Object, ...] = ()
    definition: str = ""
    """Name of the CustomResourceDefinition."""

    @property
    def key(self) -> GroupPlural:
        return self.group, self.plural

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def stored_version(self) -> str:
        version = self.storage_version or self.version
        return f"{self.group}/{version}" if self.group else version

    @property
    def has_generation(self) -> bool:
        return self.custom or self.kind in WITH_GENERATION

    @property
    def unconditional_update(self) -> bool:
        """Whether an update without resourceVersion is accepted."""
        return not self.custom and self.kind not in {"Lease", "CustomResourceDefinition", "EndpointSlice"}

    @property
    def create_on_update(self) -> bool:
        return self.kind in {"Lease", "Event", "Endpoints", "Service", "Role", "RoleBinding", "ClusterRole",
                             "ClusterRoleBinding"} and not self.custom  # fmt: skip

    def discovery(self) -> list[Object]:
        """Return the entries of the APIResourceList: the resource and its subresources."""
        base: Object = {"namespaced": self.namespaced, "kind": self.kind, "singularName": ""}
        listed = {**base, "name": self.plural, "singularName": self.kind.lower(), "verbs": VERBS}
        if self.short:
            listed["shortNames"] = list(self.short)
        if self.categories:
            listed["categories"] = list(self.categories)
        found = [listed]
        if self.status:
            found.append({**base, "name": f"{self.plural}/status", "verbs": ["get", "patch", "update"]})
        if self.scale:
            scale = {"group": "autoscaling", "version": "v1", "kind": "Scale"}
            found.append({**base, **scale, "name": f"{self.plural}/scale", "verbs": ["get", "patch", "update"]})
        return found


WITH_GENERATION = {
    "Deployment", "ReplicaSet", "StatefulSet", "DaemonSet", "Ingress", "PodDisruptionBudget", "Job", "CronJob",
    "CustomResourceDefinition", "MutatingWebhookConfiguration", "ValidatingWebhookConfiguration", "NetworkPolicy",
    "EndpointSlice", "PriorityClass",
}  # fmt: skip
SCALE = {
    "specReplicasPath": ".spec.replicas",
    "statusReplicasPath": ".status.replicas",
    "labelSelectorPath": ".spec.selector",
}
BUILTIN = """
v1 pods Pod po status
v1 services Service svc status
v1 configmaps ConfigMap cm
v1 secrets Secret
v1 serviceaccounts ServiceAccount sa
v1 persistentvolumeclaims PersistentVolumeClaim pvc status
v1 events Event ev
v1 endpoints Endpoints ep
v1 replicationcontrollers ReplicationController rc status scale
v1 namespaces Namespace ns status cluster
v1 nodes Node no status cluster
v1 persistentvolumes PersistentVolume pv status cluster
apps/v1 deployments Deployment deploy status scale
apps/v1 replicasets ReplicaSet rs status scale
apps/v1 statefulsets StatefulSet sts status scale
apps/v1 daemonsets DaemonSet ds status
batch/v1 jobs Job - status
batch/v1 cronjobs CronJob cj status
autoscaling/v2 horizontalpodautoscalers HorizontalPodAutoscaler hpa status
coordination.k8s.io/v1 leases Lease
discovery.k8s.io/v1 endpointslices EndpointSlice
events.k8s.io/v1 events Event ev
networking.k8s.io/v1 ingresses Ingress ing status
networking.k8s.io/v1 ingressclasses IngressClass - cluster
networking.k8s.io/v1 networkpolicies NetworkPolicy netpol
policy/v1 poddisruptionbudgets PodDisruptionBudget pdb status
rbac.authorization.k8s.io/v1 roles Role
rbac.authorization.k8s.io/v1 rolebindings RoleBinding
rbac.authorization.k8s.io/v1 clusterroles ClusterRole - cluster
rbac.authorization.k8s.io/v1 clusterrolebindings ClusterRoleBinding - cluster
resource.k8s.io/v1 resourceclaimtemplates ResourceClaimTemplate
scheduling.k8s.io/v1 priorityclasses PriorityClass pc cluster
storage.k8s.io/v1 storageclasses StorageClass sc cluster
admissionregistration.k8s.io/v1 mutatingwebhookconfigurations MutatingWebhookConfiguration - cluster
admissionregistration.k8s.io/v1 validatingwebhookconfigurations ValidatingWebhookConfiguration - cluster
apiextensions.k8s.io/v1 customresourcedefinitions CustomResourceDefinition crd status cluster
"""


def builtin_resources(schema_of: Callable[[str, str], Schema]) -> Iterator[Resource]:
    """Yield the resources of the table above, with their schemas."""
    for line in BUILTIN.strip().splitlines():
        api_version, plural, kind, *words = line.split()
        group, _, version = api_version.rpartition("/")
        flags = {word for word in words if word in {"status", "scale", "cluster"}}
        yield Resource(
            group, version, plural, kind, "cluster" not in flags,
            tuple(word for word in words if word not in flags and word != "-"),
            "status" in flags, SCALE if "scale" in flags else None, version, schema_of(api_version, kind),
        )  # fmt: skip


class Registry:
    """Every version of every resource, by group, version and plural."""

    def __init__(self) -> None:
        self._served: dict[tuple[str, str, str], Resource] = {}
        self._stored: dict[GroupPlural, Resource] = {}

    def add(self, resource: Resource, *, served: bool = True) -> None:
        if served:
            self._served[resource.group, resource.version, resource.plural] = resource
        if resource.version == resource.storage_version:
            self._stored[resource.key] = resource

    def remove(self, key: GroupPlural) -> None:
        self._served = {at: one for at, one in self._served.items() if one.key != key}
        self._stored.pop(key, None)

    def find(self, group: str, version: str, plural: str) -> Resource | None:
        return self._served.get((group, version, plural))

    def version(self, key: GroupPlural, api_version: str) -> Resource | None:
        """Return the resource in the version that an object names."""
        return self._served.get((key[0], api_version.rpartition("/")[2], key[1]))

    def stored(self, key: GroupPlural) -> Resource:
        return self._stored[key]

    def of_kind(self, api_version: str, kind: str) -> Resource | None:
        group, _, version = api_version.rpartition("/")
        found = [one for one in self._served.values() if (one.group, one.kind) == (group, kind)]
        return next((one for one in found if one.version == version), None)

    def by_key(self, key: GroupPlural) -> Resource | None:
        return self._stored.get(key)

    def all_stored(self) -> list[Resource]:
        return list(self._stored.values())

    def group_versions(self) -> dict[str, list[str]]:
        """Return the served versions of each group, the preferred one first."""
        found: dict[str, list[str]] = {}
        for group, version, _ in sorted(self._served, key=lambda at: (at[0], version_rank(at[1]))):
            if version not in found.setdefault(group, []):
                found[group].append(version)
        return found

    def in_version(self, group: str, version: str) -> list[Resource]:
        return [one for (at, served, _), one in self._served.items() if (at, served) == (group, version)]


def version_rank(version: str) -> tuple[int, int, int]:
    """Order versions as Kubernetes does: v2, v1, v1beta2, v1beta1, v1alpha1."""
    head, beta, minor = version.removeprefix("v").partition("beta")
    if beta:
        return 1, -int(head), -int(minor)
    head, alpha, minor = head.partition("alpha")
    return (2, -int(head), -int(minor)) if alpha else (0, -int(head), 0)
