"""Runtime versions of images."""

import pytest

from dynamo.operator.reconcile.runtime_version import RuntimeVersion, has_reached, image_tag, runtime_version
from dynamo.protocols.kubernetes.v1beta1 import ComponentSpec


def component(image: str, override: str | None = None) -> ComponentSpec:
    template = {"spec": {"containers": [{"name": "side", "image": "x:9.9.9"}, {"name": "main", "image": image}]}}
    return ComponentSpec(name="a", type="worker", pod_template=template, runtime_version_override=override)


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ("nvcr.io/nvidia/ai-dynamo/vllm-runtime:1.6.1", (1, 6, 1)),
        ("localhost:5000/vllm-runtime:v1.5.0-rc2", (1, 5, 0)),
        ("vllm-runtime:1.4.2@sha256:abc", (1, 4, 2)),
        ("localhost:5000/vllm-runtime", None),
        ("vllm-runtime:my-tag", None),
        ("vllm-runtime:1.6", None),
        ("", None),
    ],
)
def test_runtime_version_is_read_from_the_image_tag(image: str, expected: tuple[int, ...] | None) -> None:
    assert runtime_version(component(image)) == (expected and RuntimeVersion(*expected))


def test_runtime_version_override_takes_precedence_over_the_tag() -> None:
    assert runtime_version(component("vllm-runtime:1.4.0", "1.6.0")) == RuntimeVersion(1, 6, 0)


def test_unknown_runtime_version_has_no_features() -> None:
    assert not has_reached(component("custom:latest"), RuntimeVersion(0, 0, 1))
    assert has_reached(component("custom:1.5.0"), RuntimeVersion(1, 5, 0))
    assert not has_reached(component("custom:1.4.9"), RuntimeVersion(1, 5, 0))


def test_component_without_a_container_has_no_runtime_version() -> None:
    assert runtime_version(ComponentSpec(name="a")) is None
    assert image_tag("host:80/a/b:c") == "c"
