"""Kubeconfig files for the servers of tests."""

import base64
from pathlib import Path

import yaml

ADMIN_TOKEN = "admin-token"
"""Bearer token of a member of system:masters."""


def write_kubeconfig(path: Path, url: str, token: str, ca: bytes | None = None, namespace: str = "default") -> Path:
    """Write a kubeconfig with one cluster, one user with a bearer token, and one context."""
    cluster = {"server": url}
    if ca:
        cluster["certificate-authority-data"] = base64.b64encode(ca).decode()
    path.write_text(
        yaml.safe_dump({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": namespace}}],
        })
    )  # fmt: skip
    return path
