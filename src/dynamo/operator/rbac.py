"""Rights of the operator: one declaration of kinds and verbs, and the manifest of its account and roles. Pure.

Kubernetes lets the operator give an account only rights that it has itself, so the rules of the accounts that it makes are
among its own.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dynamo.k8s.kinds import (
    CHECKPOINTS,
    COMPONENTS,
    CONFIG_MAPS,
    DEPLOYMENTS,
    ENDPOINT_SLICES,
    EVENTS,
    GRAPH_REQUESTS,
    GRAPHS,
    INGRESSES,
    JOBS,
    LEADER_WORKER_SETS,
    LEASES,
    MODELS,
    NODES,
    POD_CLIQUE_SCALING_GROUPS,
    POD_CLIQUE_SETS,
    POD_CLIQUES,
    PODS,
    RESOURCE_DEFINITIONS,
    ROLE_BINDINGS,
    ROLES,
    SCALING_ADAPTERS,
    SECRETS,
    SERVICE_ACCOUNTS,
    SERVICES,
    VOLUME_CLAIMS,
    ObjectKind,
)
from dynamo.operator.reconcile.accounts import PLANNER_RULES, RBAC
from dynamo.operator.reconcile.requests.job import RULES as PROFILER_RULES
from dynamo.operator.webhook_configurations import CONFIGURATIONS
from dynamo.protocols.kubernetes.common import KubeObject
from dynamo.protocols.kubernetes.crds import CONVERSION_NAMESPACE

ACCOUNT = "dynamo-operator"
READ = ("get", "list", "watch")
OWN = (*READ, "create", "patch", "delete")
"""Verbs for objects that the operator makes, restores and removes. A patch that creates requires both rights."""
VERBS = ("get", "list", "watch", "create", "update", "patch", "delete")


@dataclass(frozen=True, slots=True)
class Access:
    """Verbs for one kind."""

    kind: ObjectKind
    verbs: tuple[str, ...]
    subresources: Mapping[str, tuple[str, ...]] | None = None

    def rules(self) -> Iterable[tuple[str, str, tuple[str, ...]]]:
        """Yield API group, resource and verbs of the kind and of each subresource."""
        group = self.kind.api_version.rpartition("/")[0]
        yield group, self.kind.plural, self.verbs
        for name, verbs in (self.subresources or {}).items():
            yield group, f"{self.kind.plural}/{name}", verbs


REPORTED = {"status": ("patch",), "finalizers": ("update",)}
"""Subresources of reconciled kinds. An owner reference that blocks deletion requires `update` of the owner's finalizers
where the admission plugin OwnerReferencesPermissionEnforcement is on."""
CLUSTER: tuple[Access, ...] = (
    Access(GRAPHS, (*READ, "create", "patch"), REPORTED),
    Access(COMPONENTS, OWN, REPORTED),
    Access(SCALING_ADAPTERS, OWN, REPORTED),
    Access(GRAPH_REQUESTS, (*READ, "patch"), REPORTED),
    Access(MODELS, (*READ, "patch"), REPORTED),
    Access(CHECKPOINTS, (*READ, "patch"), REPORTED),
    *(
        Access(kind, OWN)
        for kind in (
            DEPLOYMENTS, SERVICES, SERVICE_ACCOUNTS, ROLES, ROLE_BINDINGS, CONFIG_MAPS, INGRESSES, VOLUME_CLAIMS, JOBS,
            LEADER_WORKER_SETS, POD_CLIQUE_SETS,
        )
    ),
    Access(POD_CLIQUES, READ),
    Access(POD_CLIQUE_SCALING_GROUPS, READ),
    Access(PODS, READ),
    Access(NODES, READ),
    Access(ENDPOINT_SLICES, READ),
    Access(EVENTS, ("create", "patch")),
    Access(RESOURCE_DEFINITIONS, ("get", "patch")),
    *(Access(kind, ("get", "create", "patch")) for kind in CONFIGURATIONS.values()),
)  # fmt: skip
"""Rights in all namespaces that the operator reconciles."""
HOME: tuple[Access, ...] = (
    Access(LEASES, ("get", "create", "update")),
    Access(SECRETS, ("get", "create", "patch")),
)
"""Rights in the operator's own namespace: its Lease and the certificates of its webhooks."""


def rules(accesses: Iterable[Access], granted: Iterable[KubeObject] = ()) -> list[KubeObject]:
    """Return the rules of a role, one for each API group and set of verbs; `granted` are rules given to other accounts."""
    found: dict[tuple[str, str], set[str]] = {}
    for access in accesses:
        for group, resource, verbs in access.rules():
            found.setdefault((group, resource), set()).update(verbs)
    for rule in granted:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                found.setdefault((group, resource), set()).update(rule["verbs"])
    grouped: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (group, resource), names in sorted(found.items()):
        grouped.setdefault((group, tuple(one for one in VERBS if one in names)), []).append(resource)
    return [
        {"apiGroups": [group], "resources": resources, "verbs": list(verbs)}
        for (group, verbs), resources in grouped.items()
    ]


def cluster_rules() -> list[KubeObject]:
    """Return the rules of the operator's cluster role."""
    return rules(CLUSTER, [*PLANNER_RULES, *PROFILER_RULES])


def manifest(namespace: str = CONVERSION_NAMESPACE) -> list[KubeObject]:
    """Return the operator's account, its cluster role, its role in its own namespace, and their bindings."""
    account = {"name": ACCOUNT, "namespace": namespace}
    subjects = [{"kind": "ServiceAccount", **account}]
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account},
        *_bound("Cluster", {"name": ACCOUNT}, cluster_rules(), subjects),
        *_bound("", account, rules(HOME), subjects),
    ]


def _bound(
    prefix: str, metadata: KubeObject, granted: Sequence[KubeObject], subjects: Sequence[KubeObject]
) -> list[KubeObject]:
    version, role = f"{RBAC}/v1", f"{prefix}Role"
    reference = {"apiGroup": RBAC, "kind": role, "name": metadata["name"]}
    return [
        {"apiVersion": version, "kind": role, "metadata": metadata, "rules": list(granted)},
        {
            "apiVersion": version, "kind": f"{role}Binding", "metadata": metadata, "subjects": list(subjects),
            "roleRef": reference,
        },
    ]  # fmt: skip
