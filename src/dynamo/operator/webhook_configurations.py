"""Objects that make the API server call the webhooks: the two configurations and the conversion of the definitions. Pure."""

from collections.abc import Sequence

from dynamo.protocols.kubernetes.common import GROUP, KubeObject
from dynamo.protocols.kubernetes.crds import KINDS, ResourceKind

FIELD_MANAGER = "dynamo-operator-webhooks"
TIMEOUT_S = 10
PORT = 443
UNCHECKED = frozenset({"DynamoWorkerMetadata"})
"""Kinds that pods write at every start: without rules, and never to be held up by the operator."""
DEFAULTED = frozenset({"DynamoGraphDeployment", "DynamoComponentDeployment"})
NAMESPACE_LABEL = "kubernetes.io/metadata.name"


def configurations(service: str, namespace: str, bundle: str, namespaces: Sequence[str] = ()) -> list[KubeObject]:
    """Return the mutating and the validating configuration; `bundle` is the authority's certificate in base64."""
    checked = [one for one in KINDS if one.kind not in UNCHECKED]
    return [
        _configuration(kind, verb, kinds, service, namespace, bundle, namespaces)
        for kind, verb, kinds in (
            ("MutatingWebhookConfiguration", "mutate", [one for one in checked if one.kind in DEFAULTED]),
            ("ValidatingWebhookConfiguration", "validate", checked),
        )
    ]


def _configuration(
    kind: str,
    verb: str,
    kinds: Sequence[ResourceKind],
    service: str,
    namespace: str,
    bundle: str,
    namespaces: Sequence[str],
) -> KubeObject:
    hooks = []
    for one in kinds:
        hook = {
            "name": f"{verb}-{one.kind.lower()}.{GROUP}",
            "clientConfig": _client(service, namespace, f"/{verb}-{one.kind.lower()}", bundle),
            "rules": [
                {
                    "apiGroups": [GROUP],
                    "apiVersions": list(one.versions),
                    "operations": ["CREATE", "UPDATE"],
                    "resources": [one.plural],
                    "scope": "Namespaced",
                }
            ],
            "failurePolicy": "Fail",
            "matchPolicy": "Equivalent",
            "sideEffects": "None",
            "timeoutSeconds": TIMEOUT_S,
            "admissionReviewVersions": ["v1"],
        }
        if namespaces:
            expression = {"key": NAMESPACE_LABEL, "operator": "In", "values": list(namespaces)}
            hook["namespaceSelector"] = {"matchExpressions": [expression]}
        hooks.append(hook)
    prefix = kind.removesuffix("WebhookConfiguration").lower()
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": kind,
        # Operators that are restricted to a namespace have configurations of their own.
        "metadata": {"name": f"dynamo-operator-{prefix}" + (f"-{namespace}" if namespaces else "")},
        "webhooks": hooks,
    }


def _client(service: str, namespace: str, path: str, bundle: str) -> KubeObject:
    return {
        "service": {"name": service, "namespace": namespace, "path": path, "port": PORT},
        "caBundle": bundle,
    }


def conversion_patch(service: str, namespace: str, bundle: str) -> KubeObject:
    """Return the merge patch that gives a resource definition the conversion webhook."""
    webhook = {"clientConfig": _client(service, namespace, "/convert", bundle), "conversionReviewVersions": ["v1"]}
    return {"spec": {"conversion": {"strategy": "Webhook", "webhook": webhook}}}


def converted_definitions() -> list[str]:
    """Return the names of the resource definitions with more than one version."""
    return [f"{one.plural}.{GROUP}" for one in KINDS if len(one.versions) > 1]
