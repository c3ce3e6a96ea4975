"""CustomResourceDefinitions: one row per kind with its versions, names, columns and subresources."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

from dynamo.protocols.kubernetes import models, v1alpha1, v1beta1
from dynamo.protocols.kubernetes.common import GROUP, KubeObject, KubeStruct
from dynamo.protocols.kubernetes.schema import Schema, schema_of

CONVERSION_SERVICE = "dynamo-operator-webhook-service"
CONVERSION_NAMESPACE = "dynamo-system"
Column = tuple[str, str, str]
"""Heading, type and JSON path of a printer column."""
AGE: Column = ("Age", "date", ".metadata.creationTimestamp")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceKind:
    """One kind of the API group."""

    kind: str
    plural: str
    short_names: tuple[str, ...] = ()
    versions: Mapping[str, type[KubeStruct]]
    """Struct of each served version."""
    storage: str
    columns: Mapping[str, tuple[Column, ...]] = field(default_factory=dict)
    """Printer columns of each version."""
    has_status: bool = True
    has_scale: bool = False


GRAPH_COLUMNS: tuple[Column, ...] = (
    ("Ready", "string", '.status.conditions[?(@.type=="Ready")].status'),
    ("State", "string", ".status.state"),
    ("Backend", "string", ".spec.backendFramework"),
    AGE,
)
COMPONENT_COLUMNS: tuple[Column, ...] = (
    ("Available", "string", '.status.conditions[?(@.type=="Available")].status'),
    ("Backend", "string", ".spec.backendFramework"),
    ("Replicas", "integer", ".spec.replicas"),
    AGE,
)
KINDS: tuple[ResourceKind, ...] = (
    ResourceKind(
        kind="DynamoGraphDeployment",
        plural="dynamographdeployments",
        short_names=("dgd",),
        versions={
            "v1alpha1": v1alpha1.DynamoGraphDeploymentV1Alpha1,
            "v1beta1": v1beta1.DynamoGraphDeployment,
        },
        storage="v1beta1",
        columns={"v1alpha1": GRAPH_COLUMNS, "v1beta1": GRAPH_COLUMNS},
    ),
    ResourceKind(
        kind="DynamoComponentDeployment",
        plural="dynamocomponentdeployments",
        short_names=("dcd",),
        versions={
            "v1alpha1": v1alpha1.DynamoComponentDeploymentV1Alpha1,
            "v1beta1": v1beta1.DynamoComponentDeployment,
        },
        storage="v1beta1",
        columns={"v1alpha1": COMPONENT_COLUMNS, "v1beta1": COMPONENT_COLUMNS},
    ),
    ResourceKind(
        kind="DynamoGraphDeploymentRequest",
        plural="dynamographdeploymentrequests",
        short_names=("dgdr",),
        versions={
            "v1alpha1": v1alpha1.DynamoGraphDeploymentRequestV1Alpha1,
            "v1beta1": v1beta1.DynamoGraphDeploymentRequest,
        },
        storage="v1beta1",
        columns={
            "v1alpha1": (
                ("Model", "string", ".spec.model"),
                ("Backend", "string", ".status.backend"),
                ("State", "string", ".status.state"),
                ("DGD-State", "string", ".status.deployment.state"),
                AGE,
            ),
            "v1beta1": (
                ("Model", "string", ".spec.model"),
                ("Backend", "string", ".spec.backend"),
                ("Phase", "string", ".status.phase"),
                ("Profiling", "string", ".status.profilingPhase"),
                ("Reason", "string", '.status.conditions[?(@.type=="Succeeded")].reason'),
                ("Message", "string", '.status.conditions[?(@.type=="Succeeded")].message'),
                ("DGD", "string", ".status.dgdName"),
                AGE,
            ),
        },
    ),
    ResourceKind(
        kind="DynamoGraphDeploymentScalingAdapter",
        plural="dynamographdeploymentscalingadapters",
        short_names=("dgdsa",),
        versions={
            "v1alpha1": v1alpha1.DynamoGraphDeploymentScalingAdapterV1Alpha1,
            "v1beta1": v1beta1.DynamoGraphDeploymentScalingAdapter,
        },
        storage="v1beta1",
        columns={
            "v1alpha1": (
                ("DGD", "string", ".spec.dgdRef.name"),
                ("Service", "string", ".spec.dgdRef.serviceName"),
                ("Replicas", "integer", ".status.replicas"),
                AGE,
            ),
            "v1beta1": (
                ("DGD", "string", ".spec.dgdRef.name"),
                ("Component", "string", ".spec.dgdRef.componentName"),
                ("Replicas", "integer", ".status.replicas"),
                AGE,
            ),
        },
        has_scale=True,
    ),
    ResourceKind(
        kind="DynamoModel",
        plural="dynamomodels",
        short_names=("dm",),
        versions={"v1alpha1": models.DynamoModel},
        storage="v1alpha1",
        columns={
            "v1alpha1": (
                ("BaseModel", "string", ".spec.baseModelName"),
                ("Type", "string", ".spec.modelType"),
                ("Ready", "integer", ".status.readyEndpoints"),
                ("Total", "integer", ".status.totalEndpoints"),
                AGE,
            )
        },
    ),
    ResourceKind(
        kind="DynamoCheckpoint",
        plural="dynamocheckpoints",
        short_names=("dckpt",),
        versions={"v1alpha1": models.DynamoCheckpoint},
        storage="v1alpha1",
        columns={
            "v1alpha1": (
                ("Model", "string", ".spec.identity.model"),
                ("Backend", "string", ".spec.identity.backendFramework"),
                ("Phase", "string", ".status.phase"),
                ("CheckpointID", "string", ".status.checkpointID"),
                AGE,
            )
        },
    ),
    ResourceKind(
        kind="DynamoWorkerMetadata",
        plural="dynamoworkermetadatas",
        short_names=("dwm",),
        versions={"v1alpha1": models.DynamoWorkerMetadata},
        storage="v1alpha1",
        columns={"v1alpha1": (AGE,)},
        has_status=False,
    ),
)
BY_KIND = {one.kind: one for one in KINDS}


@cache
def version_schema(kind: str, version: str) -> Schema:
    """Return the structural schema of one kind and version. Raises `KeyError` for an unknown one."""
    return schema_of(BY_KIND[kind].versions[version])


def find_kind(api_version: str, kind: str) -> tuple[ResourceKind, str] | None:
    """Return the kind and the version that an object names, or None if the group does not have it."""
    group, _, version = api_version.partition("/")
    found = BY_KIND.get(kind)
    if group != GROUP or found is None or version not in found.versions:
        return None
    return found, version


def manifests(*, has_conversion: bool = True) -> Iterator[tuple[str, KubeObject]]:
    """Yield the file name and the CustomResourceDefinition of every kind.

    `has_conversion` adds the conversion webhook; without it an API server serves both versions unconverted.
    """
    for one in KINDS:
        yield f"{GROUP}_{one.plural}.yaml", manifest(one, has_conversion=has_conversion)


def manifest(one: ResourceKind, *, has_conversion: bool = True) -> KubeObject:
    """Return the CustomResourceDefinition of one kind."""
    names: KubeObject = {
        "kind": one.kind,
        "listKind": f"{one.kind}List",
        "plural": one.plural,
        "singular": one.kind.lower(),
    }
    if one.short_names:
        names["shortNames"] = list(one.short_names)
    spec: KubeObject = {
        "group": GROUP,
        "names": names,
        "scope": "Namespaced",
        "versions": [_version(one, version) for version in one.versions],
    }
    if has_conversion and len(one.versions) > 1:
        spec["conversion"] = _conversion()
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{one.plural}.{GROUP}"},
        "spec": spec,
    }


def _version(one: ResourceKind, version: str) -> KubeObject:
    schema = {"description": (one.versions[version].__doc__ or "").strip(), **version_schema(one.kind, version)}
    served: KubeObject = {
        "name": version,
        "served": True,
        "storage": version == one.storage,
        "schema": {"openAPIV3Schema": schema},
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path} for name, kind, path in one.columns[version]
        ],
    }
    subresources: KubeObject = {}
    if one.has_status:
        subresources["status"] = {}
    if one.has_scale:
        subresources["scale"] = {
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        }
    if subresources:
        served["subresources"] = subresources
    return served


def _conversion() -> KubeObject:
    service = {"name": CONVERSION_SERVICE, "namespace": CONVERSION_NAMESPACE, "path": "/convert", "port": 443}
    return {
        "strategy": "Webhook",
        "webhook": {"clientConfig": {"service": service}, "conversionReviewVersions": ["v1"]},
    }
