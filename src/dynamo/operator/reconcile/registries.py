"""Image registries: the host of an image, and the pull secrets for it."""

import base64
import binascii
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from dynamo.protocols.kubernetes.common import KubeObject

SECRET_TYPE = "kubernetes.io/dockerconfigjson"  # noqa: S105 - the type of a secret
SECRET_KEY = ".dockerconfigjson"  # noqa: S105
DOCKER_HUB = "docker.io"
DOCKER_HUB_HOSTS = frozenset({"index.docker.io", "registry-1.docker.io"})
SecretIndex = Mapping[str, Mapping[str, Sequence[str]]]
"""Names of pull secrets by namespace and registry."""


def registry_of(image: str) -> str:
    """Return the registry of an image; images without one are from Docker Hub."""
    first, slash, _ = image.partition("/")
    is_host = slash and ("." in first or ":" in first or first == "localhost")
    return _canonical(first) if is_host else DOCKER_HUB


def host_of_server(server: str) -> str:
    """Return the registry of an entry of a pull secret: a host, or a URL such as `https://index.docker.io/v1/`."""
    return _canonical(server.rpartition("://")[2].partition("/")[0])


def secret_index(secrets: Iterable[KubeObject]) -> SecretIndex:
    """Return the names of pull secrets by namespace and registry, each in order; unreadable secrets are left out."""
    found: dict[str, dict[str, list[str]]] = {}
    for secret in secrets:
        metadata = secret["metadata"]
        for server in _servers(secret):
            names = found.setdefault(metadata.get("namespace", ""), {}).setdefault(host_of_server(server), [])
            if metadata["name"] not in names:
                names.append(metadata["name"])
    return {namespace: {host: sorted(names) for host, names in hosts.items()} for namespace, hosts in found.items()}


def secrets_for(index: SecretIndex, namespace: str, image: str) -> Sequence[str]:
    """Return the pull secrets of a namespace for an image."""
    return index.get(namespace, {}).get(registry_of(image), ()) if image else ()


def _servers(secret: KubeObject) -> Iterable[str]:
    if secret.get("type") != SECRET_TYPE:
        return ()
    try:
        text = base64.b64decode((secret.get("data") or {}).get(SECRET_KEY) or "", validate=True)
        entries = msgspec.json.decode(text).get("auths")
    except (binascii.Error, msgspec.DecodeError, AttributeError):
        return ()
    return list(entries) if isinstance(entries, dict) else ()


def _canonical(host: str) -> str:
    return DOCKER_HUB if host in DOCKER_HUB_HOSTS else host
