"""Permissions of the operator's account, from which the chart's roles are written (`tools/charts.py`). Pure.

A role may only grant what its creator has, so the operator also has what it grants to the accounts of graphs, of
planners, of endpoint pickers and of profiling jobs.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dynamo.operator.reconcile.graph_objects import DISCOVERY_RULES
from dynamo.operator.reconcile.requests.job import RULES as PROFILING_RULES
from dynamo.operator.reconcile.shared import ACCOUNT_RULES
from dynamo.protocols.kubernetes.common import GROUP, KubeObject
from dynamo.protocols.kubernetes.crds import KINDS

READ = ("get", "list", "watch")
WRITE = ("create", "update", "patch", "delete")
ALL = (*READ, *WRITE)


class PermissionRule(NamedTuple):
    """Verbs on resources of one API group."""

    group: str
    resources: tuple[str, ...]
    verbs: tuple[str, ...]

    def manifest(self) -> KubeObject:
        """Return the rule as a role has it."""
        return {"apiGroups": [self.group], "resources": list(self.resources), "verbs": list(self.verbs)}


OWN = tuple(one.plural for one in KINDS)
OWN_STATUS = tuple(f"{one.plural}/status" for one in KINDS if one.has_status)

GRAPH_RULES = (
    PermissionRule(GROUP, OWN, ALL),
    PermissionRule(GROUP, OWN_STATUS, ALL),  # A profiling job is granted all verbs on the status of a graph.
    PermissionRule(GROUP, tuple(f"{one.plural}/finalizers" for one in KINDS), ("update",)),
    PermissionRule(
        GROUP, ("dynamographdeploymentscalingadapters/scale",), ("get", "update", "patch")
    ),  # Granted to planners.
    PermissionRule("", ("services", "serviceaccounts", "configmaps", "persistentvolumeclaims", "secrets"), ALL),
    PermissionRule("", ("pods",), (*READ, "patch", "delete")),
    PermissionRule("", ("pods/log",), READ),
    PermissionRule("", ("events",), (*READ, "create", "patch")),
    PermissionRule("apps", ("deployments",), ALL),
    PermissionRule("apps", ("daemonsets",), READ),  # The snapshot agent's says where checkpoints are kept.
    PermissionRule("batch", ("jobs",), ALL),
    PermissionRule("networking.k8s.io", ("ingresses",), ALL),
    PermissionRule("discovery.k8s.io", ("endpointslices",), READ),
    PermissionRule("rbac.authorization.k8s.io", ("roles", "rolebindings"), ALL),
    PermissionRule("coordination.k8s.io", ("leases",), (*READ, "create", "patch", "delete")),  # Who has a namespace.
)
"""Objects of graphs, in all namespaces or in one."""
WORKLOAD_RULES = (
    PermissionRule("leaderworkerset.x-k8s.io", ("leaderworkersets",), ALL),
    PermissionRule("grove.io", ("podcliquesets", "podcliques", "podcliquescalinggroups"), ALL),
    PermissionRule("grove.io", ("podcliques/scale", "podcliquescalinggroups/scale"), ("get", "update", "patch")),
    PermissionRule("grove.io", ("clustertopologybindings", "clustertopologies"), READ),
    PermissionRule("scheduling.volcano.sh", ("podgroups",), ALL),
    PermissionRule("inference.networking.k8s.io", ("inferencepools",), ALL),
    PermissionRule("networking.istio.io", ("virtualservices",), ALL),
    PermissionRule("resource.k8s.io", ("resourceclaimtemplates",), ALL),
    PermissionRule("resource.k8s.io", ("resourceclaims", "deviceclasses"), ("get",)),  # To count the GPUs of claims.
)
"""Kinds of other controllers, used where the cluster has them."""
CLUSTER_RULES = (
    PermissionRule("apiextensions.k8s.io", ("customresourcedefinitions",), ("get", "list", "create", "patch")),
    PermissionRule(
        "admissionregistration.k8s.io",
        ("mutatingwebhookconfigurations", "validatingwebhookconfigurations"),
        ("get", "create", "patch", "delete"),
    ),
)
"""Objects of the cluster: resource definitions and webhook configurations."""
GPU_DISCOVERY_RULES = (PermissionRule("", ("nodes",), ("get", "list")),)
ELECTION_RULES = (PermissionRule("coordination.k8s.io", ("leases",), ("get", "create", "update", "patch")),)
"""Lease in the operator's own namespace."""


def rules_of(*groups: Sequence[PermissionRule]) -> list[KubeObject]:
    """Return the rules of groups as a role has them."""
    return [rule.manifest() for group in groups for rule in group]


def granted() -> list[KubeObject]:
    """Return the rules that the operator grants to the accounts that it makes."""
    return [*DISCOVERY_RULES, *PROFILING_RULES, *(rule for rules in ACCOUNT_RULES.values() for rule in rules)]


def missing(rules: Iterable[KubeObject], wanted: Iterable[KubeObject]) -> list[tuple[str, str, str]]:
    """Return group, resource and verb of each wanted permission that the rules do not have."""
    known = {cell for rule in rules for cell in cells(rule)}
    return sorted({cell for rule in wanted for cell in cells(rule)} - known)


def cells(rule: KubeObject) -> Iterable[tuple[str, str, str]]:
    """Yield group, resource and verb of each permission of a rule."""
    return (
        (group, resource, verb)
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    )
