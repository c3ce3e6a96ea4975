"""Places of kinds in the API."""

import pytest

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
