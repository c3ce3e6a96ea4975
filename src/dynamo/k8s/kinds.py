"""Kinds of Kubernetes objects that this project reads or writes, with their places in the API."""

import re
from dataclasses import dataclass

from dynamo.core.errors import InvalidArgument
from dynamo.protocols.kubernetes.common import V1ALPHA1, V1BETA1

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


RBAC = "rbac.authorization.k8s.io/v1"
GROVE = "grove.io/v1alpha1"

PODS = ObjectKind("v1", "Pod", "pods")
SERVICES = ObjectKind("v1", "Service", "services")
SERVICE_ACCOUNTS = ObjectKind("v1", "ServiceAccount", "serviceaccounts")
CONFIG_MAPS = ObjectKind("v1", "ConfigMap", "configmaps")
SECRETS = ObjectKind("v1", "Secret", "secrets")
VOLUME_CLAIMS = ObjectKind("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
EVENTS = ObjectKind("v1", "Event", "events")
NODES = ObjectKind("v1", "Node", "nodes", is_namespaced=False)
DEPLOYMENTS = ObjectKind("apps/v1", "Deployment", "deployments")
DAEMON_SETS = ObjectKind("apps/v1", "DaemonSet", "daemonsets")
JOBS = ObjectKind("batch/v1", "Job", "jobs")
ROLES = ObjectKind(RBAC, "Role", "roles")
ROLE_BINDINGS = ObjectKind(RBAC, "RoleBinding", "rolebindings")
INGRESSES = ObjectKind("networking.k8s.io/v1", "Ingress", "ingresses")
SELF_REVIEWS = ObjectKind("authentication.k8s.io/v1", "SelfSubjectReview", "selfsubjectreviews", is_namespaced=False)
LEASES = ObjectKind("coordination.k8s.io/v1", "Lease", "leases")
ENDPOINT_SLICES = ObjectKind("discovery.k8s.io/v1", "EndpointSlice", "endpointslices")
RESOURCE_DEFINITIONS = ObjectKind(
    "apiextensions.k8s.io/v1", "CustomResourceDefinition", "customresourcedefinitions", is_namespaced=False
)
LEADER_WORKER_SETS = ObjectKind("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", "leaderworkersets")
POD_CLIQUE_SETS = ObjectKind(GROVE, "PodCliqueSet", "podcliquesets")
POD_CLIQUES = ObjectKind(GROVE, "PodClique", "podcliques")
POD_CLIQUE_SCALING_GROUPS = ObjectKind(GROVE, "PodCliqueScalingGroup", "podcliquescalinggroups")
TOPOLOGY_BINDINGS = ObjectKind(GROVE, "ClusterTopologyBinding", "clustertopologybindings", is_namespaced=False)
CLUSTER_TOPOLOGIES = ObjectKind(GROVE, "ClusterTopology", "clustertopologies", is_namespaced=False)
"""Name of the former in earlier releases of Grove."""
QUEUES_OF_KAI = ObjectKind("scheduling.run.ai/v2", "Queue", "queues", is_namespaced=False)
POD_GROUPS = ObjectKind("scheduling.volcano.sh/v1beta1", "PodGroup", "podgroups")
VIRTUAL_SERVICES = ObjectKind("networking.istio.io/v1beta1", "VirtualService", "virtualservices")
INFERENCE_POOLS = ObjectKind("inference.networking.k8s.io/v1", "InferencePool", "inferencepools")
CLAIM_TEMPLATES = ObjectKind("resource.k8s.io/v1", "ResourceClaimTemplate", "resourceclaimtemplates")
CLAIMS = ObjectKind("resource.k8s.io/v1", "ResourceClaim", "resourceclaims")
DEVICE_CLASSES = ObjectKind("resource.k8s.io/v1", "DeviceClass", "deviceclasses")
GRAPHS = ObjectKind(V1BETA1, "DynamoGraphDeployment", "dynamographdeployments")
COMPONENTS = ObjectKind(V1BETA1, "DynamoComponentDeployment", "dynamocomponentdeployments")
GRAPH_REQUESTS = ObjectKind(V1BETA1, "DynamoGraphDeploymentRequest", "dynamographdeploymentrequests")
SCALING_ADAPTERS = ObjectKind(V1BETA1, "DynamoGraphDeploymentScalingAdapter", "dynamographdeploymentscalingadapters")
MODELS = ObjectKind(V1ALPHA1, "DynamoModel", "dynamomodels")
CHECKPOINTS = ObjectKind(V1ALPHA1, "DynamoCheckpoint", "dynamocheckpoints")
WORKER_METADATA = ObjectKind(V1ALPHA1, "DynamoWorkerMetadata", "dynamoworkermetadatas")

KINDS = (
    PODS, SERVICES, SERVICE_ACCOUNTS, CONFIG_MAPS, SECRETS, VOLUME_CLAIMS, EVENTS, NODES, DEPLOYMENTS, DAEMON_SETS, JOBS, ROLES,
    ROLE_BINDINGS, INGRESSES, LEASES, ENDPOINT_SLICES, RESOURCE_DEFINITIONS, LEADER_WORKER_SETS, POD_CLIQUE_SETS,
    POD_CLIQUES, POD_CLIQUE_SCALING_GROUPS, TOPOLOGY_BINDINGS, CLUSTER_TOPOLOGIES, QUEUES_OF_KAI, POD_GROUPS, VIRTUAL_SERVICES, INFERENCE_POOLS, CLAIM_TEMPLATES, GRAPHS, COMPONENTS, GRAPH_REQUESTS, SCALING_ADAPTERS, MODELS, CHECKPOINTS,
    WORKER_METADATA,
)  # fmt: skip
BY_NAME = {(one.api_version, one.kind): one for one in KINDS}
"""Kinds by API version and name, as an object gives them in `apiVersion` and `kind`."""
