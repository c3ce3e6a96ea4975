"""Registries of images, and their pull secrets."""

import base64
import json
from typing import Any

import pytest

from dynamo.operator.reconcile.registries import host_of_server, registry_of, secret_index, secrets_for


def secret(name: str, *servers: str, namespace: str = "space", **more: Any) -> dict[str, Any]:
    text = base64.b64encode(json.dumps({"auths": {one: {} for one in servers}}).encode()).decode()
    return {
        "metadata": {"name": name, "namespace": namespace},
        "type": "kubernetes.io/dockerconfigjson",
        "data": {".dockerconfigjson": text},
        **more,
    }


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ("nvcr.io/nvidia/ai-dynamo/vllm-runtime:1.6.1", "nvcr.io"),
        ("localhost:5000/a", "localhost:5000"),
        ("localhost/a", "localhost"),
        ("ubuntu:24.04", "docker.io"),
        ("library/ubuntu", "docker.io"),
        ("index.docker.io/library/ubuntu", "docker.io"),
    ],
)
def test_registry_is_parsed_from_an_image(image: str, expected: str) -> None:
    assert registry_of(image) == expected


@pytest.mark.parametrize(
    ("server", "expected"),
    [("https://index.docker.io/v1/", "docker.io"), ("nvcr.io", "nvcr.io"), ("http://localhost:5000", "localhost:5000")],
)
def test_registry_is_parsed_from_a_secret_entry(server: str, expected: str) -> None:
    assert host_of_server(server) == expected


def test_images_get_the_secrets_of_their_registry_and_namespace() -> None:
    index = secret_index(
        [
            secret("second", "nvcr.io", "ghcr.io"),
            secret("first", "https://nvcr.io"),
            secret("other", "nvcr.io", namespace="elsewhere"),
        ]
    )
    assert secrets_for(index, "space", "nvcr.io/a:1") == ["first", "second"]
    assert secrets_for(index, "space", "ghcr.io/a:1") == ["second"]
    assert secrets_for(index, "space", "quay.io/a:1") == ()
    assert secrets_for(index, "unknown", "nvcr.io/a:1") == ()
    assert secrets_for(index, "space", "") == ()


@pytest.mark.parametrize(
    "more",
    [
        {"type": "Opaque"},
        {"data": {}},
        {"data": None},
        {"data": {".dockerconfigjson": "?"}},
        {"data": {".dockerconfigjson": "W10="}},
    ],
)
def test_malformed_pull_secrets_are_skipped(more: dict[str, Any]) -> None:
    assert secret_index([secret("a", "nvcr.io", **more)]) == {}
