"""Objects that the graphs of a namespace share: services of base models, and accounts of planners and endpoint pickers.

They have an empty graph label, so that the operator views them, and are collected with the last graph that uses them.
"""

from collections.abc import Iterator, Sequence

from dynamo.operator.reconcile.epp import EPP_ACCOUNT, POOL_GROUP
from dynamo.operator.reconcile.names import (
    BASE_MODEL,
    BASE_MODEL_HASH,
    GRAPH,
    MANAGED_BY,
    SYSTEM_PORT,
    GraphContext,
    base_model_hash,
)
from dynamo.operator.validation.facts import OPERATOR_NAME, PLANNER_ACCOUNT
from dynamo.protocols.kubernetes.common import GROUP, KubeObject
from dynamo.protocols.kubernetes.v1beta1 import ComponentSpec

RBAC = "rbac.authorization.k8s.io"
READ = ["get", "list", "watch"]
PODS_RULE = {"apiGroups": [""], "resources": ["pods"], "verbs": READ}
ACCOUNT_RULES = {
    PLANNER_ACCOUNT: [
        {"apiGroups": [GROUP], "resources": ["dynamographdeployments"], "verbs": [*READ, "patch"]},
        {"apiGroups": [GROUP], "resources": ["dynamographdeploymentscalingadapters"], "verbs": READ},
        {"apiGroups": [GROUP], "resources": ["dynamographdeploymentscalingadapters/scale"], "verbs": ["get", "patch"]},
        {"apiGroups": [GROUP], "resources": ["dynamocomponentdeployments"], "verbs": READ},
        {"apiGroups": [GROUP], "resources": ["dynamoworkermetadatas"], "verbs": [*READ, "create", "patch"]},
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": READ},
        PODS_RULE,
    ],
    EPP_ACCOUNT: [
        {"apiGroups": [POOL_GROUP], "resources": ["inferencepools"], "verbs": READ},
        {"apiGroups": [GROUP], "resources": ["dynamoworkermetadatas"], "verbs": [*READ, "create", "patch"]},
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": READ},
        PODS_RULE,
    ],
}
"""Rights of accounts; planners scale their graph, endpoint pickers find its workers."""
ACCOUNT_OF = {"planner": PLANNER_ACCOUNT, "epp": EPP_ACCOUNT}


def joint_objects(components: Sequence[ComponentSpec], context: GraphContext) -> Iterator[KubeObject]:
    """Yield the shared objects that a graph's components require, each once."""
    models = {one.model_ref.name: None for one in components if one.model_ref is not None and one.model_ref.name}
    for name in models:
        yield model_service(name, context)
    for kind, account in ACCOUNT_OF.items():
        if any(one.type == kind for one in components):
            yield from _account(account, context)


def model_service(model: str, context: GraphContext) -> KubeObject:
    """Return the headless service of the pods that serve a base model."""
    found = base_model_hash(model)
    value = _object("v1", "Service", f"dynamo-model-{found}", context)
    value["metadata"]["labels"][BASE_MODEL_HASH] = found
    value["metadata"]["annotations"] = {BASE_MODEL: model}
    port = {"name": "system", "port": SYSTEM_PORT, "targetPort": SYSTEM_PORT, "protocol": "TCP"}
    return {**value, "spec": {"clusterIP": "None", "selector": {BASE_MODEL_HASH: found}, "ports": [port]}}


def _account(name: str, context: GraphContext) -> Iterator[KubeObject]:
    yield _object("v1", "ServiceAccount", name, context)
    yield {**_object(f"{RBAC}/v1", "Role", f"{name}-role", context), "rules": ACCOUNT_RULES[name]}
    yield {
        **_object(f"{RBAC}/v1", "RoleBinding", f"{name}-binding", context),
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": context.namespace}],
        "roleRef": {"apiGroup": RBAC, "kind": "Role", "name": f"{name}-role"},
    }


def _object(api_version: str, kind: str, name: str, context: GraphContext) -> KubeObject:
    labels = {GRAPH: "", MANAGED_BY: OPERATOR_NAME}
    metadata = {"name": name, "namespace": context.namespace, "labels": labels}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata}
