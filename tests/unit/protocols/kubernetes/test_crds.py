"""CustomResourceDefinitions of the API group."""

from typing import Any

import pytest
from tools.crds import contents

from dynamo.protocols.kubernetes.crds import BY_KIND, KINDS, find_kind, manifest, manifests, version_schema
from dynamo.protocols.kubernetes.schema import Schema


def structural(schema: Schema, path: str = "") -> list[str]:
    """Return the places whose schema an API server refuses: no type, or a default that does not match it."""
    if schema.get("x-kubernetes-int-or-string"):
        return []
    found = [] if "type" in schema else [path]
    for name, part in schema.get("properties", {}).items():
        found += structural(part, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            found += structural(schema[key], f"{path}.{key}")
    return found


def test_deploy_files_equal_the_generated_manifests() -> None:
    for path, content in contents().items():
        assert path.read_text() == content, f"{path.name}: run `make references`"


@pytest.mark.parametrize("kind", sorted(BY_KIND))
def test_every_schema_is_structural(kind: str) -> None:
    for version in BY_KIND[kind].versions:
        assert structural(version_schema(kind, version)) == []


def test_names_versions_and_columns_of_a_graph() -> None:
    crd: dict[str, Any] = manifest(BY_KIND["DynamoGraphDeployment"])
    assert crd["metadata"]["name"] == "dynamographdeployments.nvidia.com"
    assert crd["spec"]["names"]["shortNames"] == ["dgd"]
    assert [(one["name"], one["storage"]) for one in crd["spec"]["versions"]] == [
        ("v1alpha1", False),
        ("v1beta1", True),
    ]
    assert [one["name"] for one in crd["spec"]["versions"][1]["additionalPrinterColumns"]] == [
        "Ready", "State", "Backend", "Age",
    ]  # fmt: skip


def test_scaling_adapter_has_a_scale_subresource() -> None:
    versions = manifest(BY_KIND["DynamoGraphDeploymentScalingAdapter"])["spec"]["versions"]
    assert [one["subresources"]["scale"]["specReplicasPath"] for one in versions] == [".spec.replicas"] * 2


def test_conversion_is_declared_for_kinds_with_two_versions_and_can_be_omitted() -> None:
    converted = {name for name, crd in manifests() if "conversion" in crd["spec"]}
    assert converted == {f"nvidia.com_{one.plural}.yaml" for one in KINDS if len(one.versions) == 2}
    assert not any("conversion" in crd["spec"] for _, crd in manifests(has_conversion=False))


def test_find_kind_returns_none_for_another_group_kind_or_version() -> None:
    found = find_kind("nvidia.com/v1beta1", "DynamoGraphDeployment")
    assert found is not None
    assert found[0].plural == "dynamographdeployments"
    assert find_kind("apps/v1", "Deployment") is None
    assert find_kind("nvidia.com/v1", "DynamoGraphDeployment") is None
    assert find_kind("nvidia.com/v1beta1", "DynamoModel") is None
