"""Objects that make the API server call the webhooks: the two configurations and the conversion of the definitions. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from dynamo.k8s.kinds import ObjectKind
from dynamo.protocols.kubernetes.common import GROUP, KubeObject
from dynamo.protocols.kubernetes.crds import KINDS, ResourceKind

ADMISSION = "admissionregistration.k8s.io/v1"
CONFIGURATIONS = {
    kind: ObjectKind(ADMISSION, kind, f"{kind.lower()}s", is_namespaced=False)
    for kind in ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration")
}
FIELD_MANAGER = "dynamo-operator-webhooks"
TIMEOUT_S = 10
PORT = 443
UNCHECKED = frozenset({"DynamoWorkerMetadata"})
"""Kinds that pods write at every start: without rules, and never to be held up by the operator."""
DEFAULTED = frozenset({"DynamoGraphDeployment", "DynamoComponentDeployment"})
NAMESPACE_LABEL = "kubernetes.io/metadata.name"


@dataclass(frozen=True, slots=True)
class WebhookAddress:
    """Place at which the API server reaches the webhooks."""

    service: str
    namespace: str
    url: str = ""
    """Base URL without a trailing slash, such as `https://10.0.0.5:9443`; empty: the service."""

    def client(self, path: str, bundle: str) -> KubeObject:
        """Return the clientConfig of one path; `bundle` is the authority's certificate in base64."""
        if self.url:
            return {"url": self.url + path, "caBundle": bundle}
        service = {"name": self.service, "namespace": self.namespace, "path": path, "port": PORT}
        return {"service": service, "caBundle": bundle}


def configurations(address: WebhookAddress, bundle: str, namespaces: Sequence[str] = ()) -> list[KubeObject]:
    """Return the mutating and the validating configuration; `bundle` is the authority's certificate in base64."""
    checked = [one for one in KINDS if one.kind not in UNCHECKED]
    return [
        _configuration(kind, verb, kinds, address, bundle, namespaces)
        for kind, verb, kinds in (
            ("MutatingWebhookConfiguration", "mutate", [one for one in checked if one.kind in DEFAULTED]),
            ("ValidatingWebhookConfiguration", "validate", checked),
        )
    ]


def _configuration(
    kind: str,
    verb: str,
    kinds: Sequence[ResourceKind],
    address: WebhookAddress,
    bundle: str,
    namespaces: Sequence[str],
) -> KubeObject:
    hooks = []
    for one in kinds:
        hook = {
            "name": f"{verb}-{one.kind.lower()}.{GROUP}",
            "clientConfig": address.client(f"/{verb}-{one.kind.lower()}", bundle),
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
        "metadata": {"name": f"dynamo-operator-{prefix}" + (f"-{address.namespace}" if namespaces else "")},
        "webhooks": hooks,
    }


def conversion_patch(address: WebhookAddress, bundle: str) -> KubeObject:
    """Return the merge patch that gives a resource definition the conversion webhook."""
    client = address.client("/convert", bundle)
    absent = {name: None for name in ("url", "service") if name not in client}  # Of an earlier address.
    webhook = {"clientConfig": {**client, **absent}, "conversionReviewVersions": ["v1"]}
    return {"spec": {"conversion": {"strategy": "Webhook", "webhook": webhook}}}


def converted_definitions() -> list[str]:
    """Return the names of the resource definitions with more than one version."""
    return [f"{one.plural}.{GROUP}" for one in KINDS if len(one.versions) > 1]
