"""Configuration of a cluster: kubeconfig files as kubectl reads them, or the service account of a pod."""

import base64
import binascii
import os
import ssl
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import yaml

from dynamo.core.config import environ, setting
from dynamo.core.errors import ConfigError
from dynamo.core.tls import PemFile, client_context

DEFAULT_FILE = "~/.kube/config"
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
SECTIONS = {"clusters": "cluster", "contexts": "context", "users": "user"}
"""Lists of named entries in a file, with the key of an entry's content."""
S = TypeVar("S", bound=msgspec.Struct)
Text = Annotated[str, msgspec.Meta(min_length=1)]


class ClusterEntry(msgspec.Struct, rename="kebab", omit_defaults=True):
    """A cluster of a kubeconfig file."""

    server: Text
    certificate_authority: str | None = None
    certificate_authority_data: str | None = None
    insecure_skip_tls_verify: bool = False
    tls_server_name: str | None = None
    proxy_url: str | None = None


class ExecVariable(msgspec.Struct):
    """A variable of a credential program."""

    name: str
    value: str


class ExecEntry(msgspec.Struct, rename="camel"):
    """A program that prints credentials."""

    api_version: str
    command: Text
    args: list[str] | None = None
    env: list[ExecVariable] | None = None
    install_hint: str = ""
    provide_cluster_info: bool = False


class UserEntry(msgspec.Struct, rename="kebab", omit_defaults=True):
    """A user of a kubeconfig file."""

    token: str | None = None
    token_file: str | None = msgspec.field(name="tokenFile", default=None)
    username: str | None = None
    password: str | None = None
    client_certificate: str | None = None
    client_certificate_data: str | None = None
    client_key: str | None = None
    client_key_data: str | None = None
    exec: ExecEntry | None = None
    auth_provider: dict[str, Any] | None = None


class ContextEntry(msgspec.Struct, rename="kebab"):
    """A context of a kubeconfig file."""

    cluster: str
    user: str | None = None
    namespace: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAccess:
    """One API server, and as whom it is called."""

    cluster: ClusterEntry
    user: UserEntry
    namespace: str = ""
    source: str = "KUBECONFIG"
    """What errors name."""
    folders: Mapping[str, Path] = field(default_factory=dict)
    """Folders in which relative paths of the cluster and of the user are."""

    def path(self, part: str, name: str) -> str:
        """Return the path of a file that the `cluster` or the `user` names."""
        return str(self.folders.get(part, Path()) / Path(name).expanduser())

    def tls(self, certificate_pem: str = "", key_pem: str = "") -> ssl.SSLContext:
        """Return the TLS context, with the certificate of a credential program if there is one. Raise `ConfigError`."""
        cluster, user = self.cluster, self.user
        with tempfile.TemporaryDirectory(prefix="dynamo-kube-") as place:
            place_of = Path(place)

            def pem(part: str, name: str, path: str | None, data: str | None) -> PemFile:
                if data:
                    file = place_of / name
                    file.write_bytes(self._decoded(f"{name}-data", data))
                    return PemFile(f"{self.source}: {name}-data of", str(file))
                return PemFile(f"{self.source}: {name}", self.path(part, path) if path else "")

            def own(name: str, path: str | None, data: str | None, other: str) -> PemFile:
                if not other:
                    return pem("user", name, path, data)
                file = place_of / name
                file.write_text(other)
                return PemFile(f"{self.source}: {name}-data of", str(file))

            authority = pem(
                "cluster", "certificate-authority", cluster.certificate_authority, cluster.certificate_authority_data
            )
            context = client_context(
                authority,
                own("client-certificate", user.client_certificate, user.client_certificate_data, certificate_pem),
                own("client-key", user.client_key, user.client_key_data, key_pem),
                is_insecure=cluster.insecure_skip_tls_verify,
            )
        if not authority:
            context.load_default_certs()
        return context

    def _decoded(self, name: str, data: str) -> bytes:
        try:
            return base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError):
            raise ConfigError(f"{self.source}: {name} is not base64") from None


def cluster_access() -> ClusterAccess:
    """Return the access that KUBECONFIG, the service account of the pod or ~/.kube/config gives. Raise `ConfigError`."""
    named = [one for one in setting("KUBECONFIG", "", str).split(os.pathsep) if one]
    if named:
        return from_files(named)
    found = from_pod(SERVICE_ACCOUNT, environ())
    if found is not None:
        return found
    if not Path(DEFAULT_FILE).expanduser().is_file():
        raise ConfigError(
            f"KUBECONFIG: not set, {DEFAULT_FILE} does not exist, and this is not a pod with a service account"
        )
    return from_files([DEFAULT_FILE])


def from_pod(account: Path, variables: Mapping[str, str]) -> ClusterAccess | None:
    """Return the access of a pod's service account; None outside a pod."""
    host, port = variables.get("KUBERNETES_SERVICE_HOST"), variables.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not (account / "token").is_file():
        return None
    namespace = account / "namespace"
    return ClusterAccess(
        cluster=ClusterEntry(
            server=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
            certificate_authority=str(account / "ca.crt"),
        ),
        user=UserEntry(token_file=str(account / "token")),
        namespace=namespace.read_text(encoding="utf-8").strip() if namespace.is_file() else "",
        source="service account",
    )


def from_files(names: Sequence[str]) -> ClusterAccess:
    """Return the access of the current context of files, which are merged: the first file with an entry or a value wins.

    Of several files, those that do not exist are ignored. Raise `ConfigError`.
    """
    source = f"KUBECONFIG {os.pathsep.join(names)}"
    paths = [Path(one).expanduser() for one in names]
    existing = [one for one in paths if one.is_file()]
    if not existing:
        raise ConfigError(f"{source}: no such file")
    contents = [(one, _content(source, one)) for one in existing]
    current = next((value for _, one in contents if (value := one.get("current-context"))), None)
    if not current:
        raise ConfigError(f"{source}: not a kubeconfig file with a current-context; kubectl config use-context sets it")
    context, _ = _entry(source, contents, "contexts", str(current), ContextEntry)
    cluster, cluster_folder = _entry(source, contents, "clusters", context.cluster, ClusterEntry)
    user, user_folder = UserEntry(), cluster_folder
    if context.user:
        user, user_folder = _entry(source, contents, "users", context.user, UserEntry)
    return ClusterAccess(
        cluster=cluster,
        user=user,
        namespace=context.namespace or "",
        source=source,
        folders={"cluster": cluster_folder, "user": user_folder},
    )


def _content(source: str, path: Path) -> Mapping[str, Any]:
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{source}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source}: not a kubeconfig file: {' '.join(str(error).split())[:200]}") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{source}: not a kubeconfig file: contains no mapping")
    return value


def _entry(
    source: str, contents: Sequence[tuple[Path, Mapping[str, Any]]], section: str, name: str, kind: type[S]
) -> tuple[S, Path]:
    """Return the named entry and the folder of its file."""
    key = SECTIONS[section]
    for path, content in contents:
        for one in content.get(section) or ():
            if isinstance(one, dict) and one.get("name") == name:
                try:
                    return msgspec.convert(one.get(key) or {}, kind), path.parent
                except msgspec.ValidationError as error:
                    raise ConfigError(f"{source}: {key} {name}: {error}") from None
    raise ConfigError(f"{source}: not a kubeconfig file with the {key} {name!r}, which its context names")
