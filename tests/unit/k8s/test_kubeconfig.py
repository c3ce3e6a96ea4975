"""Kubeconfig files and the service account of a pod: which cluster, which user, and the errors of wrong files."""

import base64
import ssl
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.certificates import Certificates

from dynamo.core.errors import ConfigError
from dynamo.k8s.kubeconfig import from_files, from_pod


def write(path: Path, **sections: Any) -> str:
    path.write_text(yaml.safe_dump({name.replace("_", "-"): value for name, value in sections.items()}))
    return str(path)


def cluster(name: str, **values: Any) -> list[dict[str, Any]]:
    return [{"name": name, "cluster": {"server": "https://10.0.0.1:6443", **values}}]


def context(cluster: str, user: str | None = None, **values: Any) -> list[dict[str, Any]]:
    return [{"name": "c", "context": {"cluster": cluster, **({"user": user} if user else {}), **values}}]


def test_current_context_names_cluster_user_and_namespace(tmp_path: Path) -> None:
    users = [{"name": "u", "user": {"token": "t"}}, {"name": "v", "user": {"token": "other"}}]
    file = write(
        tmp_path / "config", current_context="c", clusters=cluster("k"), users=users,
        contexts=context("k", "u", namespace="n"),
    )  # fmt: skip
    access = from_files([file])
    assert (access.cluster.server, access.user.token, access.namespace) == ("https://10.0.0.1:6443", "t", "n")


def test_files_are_merged_and_the_first_value_wins(tmp_path: Path) -> None:
    (tmp_path / "second").mkdir()
    first = write(tmp_path / "first", current_context="c", contexts=context("k", "u"))
    second = write(
        tmp_path / "second" / "config", current_context="d", contexts=context("other"),
        clusters=cluster("k", **{"certificate-authority": "ca.pem"}), users=[{"name": "u", "user": {"tokenFile": "token"}}],
    )  # fmt: skip
    access = from_files([str(tmp_path / "absent"), first, second])
    assert access.path("cluster", "ca.pem") == str(tmp_path / "second" / "ca.pem"), "relative to the file that names it"
    assert access.path("user", "/run/token") == "/run/token"


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({}, "current-context"),
        ({"current_context": "c"}, "context 'c'"),
        ({"current_context": "c", "contexts": context("k")}, "cluster 'k'"),
        ({"current_context": "c", "contexts": context("k", "u"), "clusters": cluster("k")}, "user 'u'"),
        ({"current_context": "c", "contexts": context("k"), "clusters": [{"name": "k"}]}, "cluster k: .*server"),
    ],
)
def test_incomplete_file_is_refused_in_one_line(sections: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = write(tmp_path / "config", **sections)
    with pytest.raises(ConfigError, match=f"^KUBECONFIG {file}: .*{message}") as caught:
        from_files([file])
    assert "\n" not in str(caught.value)


def test_absent_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        from_files([str(tmp_path / "absent")])


def test_pod_uses_its_service_account(tmp_path: Path) -> None:
    variables = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    assert from_pod(tmp_path, variables) is None, "no token is mounted"
    (tmp_path / "token").write_text("t")
    (tmp_path / "namespace").write_text("n")
    access = from_pod(tmp_path, variables)
    assert access is not None
    assert (access.cluster.server, access.namespace) == ("https://[fd00::1]:443", "n")
    assert access.user.token_file == str(tmp_path / "token"), "the file is read at each renewal"
    assert from_pod(tmp_path, {}) is None, "not in a pod"


def encoded(path: str) -> str:
    return base64.b64encode(Path(path).read_bytes()).decode()


def test_tls_has_the_authority_and_certificate_of_the_file(tmp_path: Path) -> None:
    made = Certificates(tmp_path / "tls")
    authority = {"certificate-authority-data": encoded(made.ca)}
    user = {"client-certificate-data": encoded(made.client_cert), "client-key-data": encoded(made.client_key)}
    users = [{"name": "u", "user": user}]
    file = write(
        tmp_path / "config", current_context="c", contexts=context("k", "u"), clusters=cluster("k", **authority), users=users
    )  # fmt: skip
    context_of_file = from_files([file]).tls()
    assert len(context_of_file.get_ca_certs()) == 1, "the system's authorities are not trusted"
    assert context_of_file.verify_mode is ssl.CERT_REQUIRED
    insecure = cluster("k", **{"insecure-skip-tls-verify": True})
    file = write(tmp_path / "config", current_context="c", contexts=context("k"), clusters=insecure)
    assert from_files([file]).tls().verify_mode is ssl.CERT_NONE


@pytest.mark.parametrize("data", ["%", base64.b64encode(b"no certificate").decode()])
def test_wrong_certificate_is_refused_with_its_field(data: str, tmp_path: Path) -> None:
    clusters = cluster("k", **{"certificate-authority-data": data})
    file = write(tmp_path / "config", current_context="c", contexts=context("k"), clusters=clusters)
    with pytest.raises(ConfigError, match="certificate-authority-data"):
        from_files([file]).tls()
