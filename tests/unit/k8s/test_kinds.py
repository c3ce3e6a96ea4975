"""Places of kinds in the API."""

import pytest

from dynamo.core.errors import InvalidArgument
from dynamo.k8s.kinds import BY_NAME, ENDPOINT_SLICES, GRAPHS, KINDS, NODES, PODS, ObjectKind
from dynamo.protocols.kubernetes.common import GROUP
from dynamo.protocols.kubernetes.crds import BY_KIND


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (PODS.path(), "/api/v1/pods"),
        (PODS.path("ns", "a"), "/api/v1/namespaces/ns/pods/a"),
        (ENDPOINT_SLICES.path("ns"), "/apis/discovery.k8s.io/v1/namespaces/ns/endpointslices"),
        (PODS.path("ns", "a", "status"), "/api/v1/namespaces/ns/pods/a/status"),
        (NODES.path("ns", "a"), "/api/v1/nodes/a"),
    ],
)
def test_path_names_group_namespace_object_and_subresource(path: str, expected: str) -> None:
    assert path == expected


@pytest.mark.parametrize("name", ["", "..", "a/b", "a?b", "a#", "-a", "a" * 254, "a\n"])
def test_name_that_changes_the_path_is_refused(name: str) -> None:
    for place in ({"namespace": name}, {"namespace": "ns", "name": name}):
        with pytest.raises(InvalidArgument, match="is not a name of a Kubernetes object"):
            PODS.path(**place)


def test_every_kind_of_the_group_is_listed_in_its_newest_version() -> None:
    listed = {one.kind: one for one in KINDS if one.api_version.startswith(f"{GROUP}/")}
    assert {kind: (one.api_version, one.plural) for kind, one in listed.items()} == {
        kind: (f"{GROUP}/{list(one.versions)[-1]}", one.plural) for kind, one in BY_KIND.items()
    }


def test_kind_is_found_by_api_version_and_kind() -> None:
    assert BY_NAME[("nvidia.com/v1beta1", "DynamoGraphDeployment")] is GRAPHS
    assert len(BY_NAME) == len(KINDS)


@pytest.mark.parametrize("one", [one for one in KINDS if "." not in one.api_version or "k8s.io" in one.api_version])
def test_plural_and_scope_are_those_of_kubernetes(one: ObjectKind) -> None:
    plural = {"Ingress": "ingresses"}.get(one.kind, f"{one.kind.lower()}s")
    assert one.plural == plural
    assert one.is_namespaced == (one.kind not in {"Node", "CustomResourceDefinition"})
