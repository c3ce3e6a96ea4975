"""Places of kinds in the API."""

import pytest

from dynamo.core.errors import InvalidArgument
from dynamo.k8s.kinds import ENDPOINT_SLICES, PODS, ObjectKind


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (PODS.path(), "/api/v1/pods"),
        (PODS.path("ns", "a"), "/api/v1/namespaces/ns/pods/a"),
        (ENDPOINT_SLICES.path("ns"), "/apis/discovery.k8s.io/v1/namespaces/ns/endpointslices"),
        (PODS.path("ns", "a", "status"), "/api/v1/namespaces/ns/pods/a/status"),
        (ObjectKind("v1", "Node", "nodes", is_namespaced=False).path("ns", "a"), "/api/v1/nodes/a"),
    ],
)
def test_path_names_group_namespace_object_and_subresource(path: str, expected: str) -> None:
    assert path == expected


@pytest.mark.parametrize("name", ["", "..", "a/b", "a?b", "a#", "-a", "a" * 254, "a\n"])
def test_name_that_leaves_its_place_in_the_path_is_refused(name: str) -> None:
    for place in ({"namespace": name}, {"namespace": "ns", "name": name}):
        with pytest.raises(InvalidArgument, match="is not a name of a Kubernetes object"):
            PODS.path(**place)
