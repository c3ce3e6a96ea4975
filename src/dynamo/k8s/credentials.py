"""Credentials of requests to an API server: tokens, token files that are renewed, passwords, and credential programs."""

import asyncio
import base64
import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from dynamo.core.clock import Clock, SystemClock
from dynamo.core.config import environ
from dynamo.core.errors import ConfigError, WorkerUnavailable
from dynamo.k8s.kubeconfig import ClusterAccess, ExecEntry

FILE_S = 60.0
"""Age at which a token file is read again; the kubelet renews the file long before its token expires."""
EXEC_S = 60.0
EXPIRY_MARGIN_S = 10.0
EXEC_VERSIONS = tuple(f"client.authentication.k8s.io/{version}" for version in ("v1", "v1beta1", "v1alpha1"))
ERROR_CHARS = 300


class CredentialsUnavailable(WorkerUnavailable):
    """The credentials cannot be had at present."""


class ExecStatus(msgspec.Struct, rename="camel"):
    """Credentials that a program printed."""

    token: str = ""
    client_certificate_data: str = ""
    client_key_data: str = ""
    expiration_timestamp: datetime | None = None


class ExecOutput(msgspec.Struct):
    """Output of a credential program."""

    status: ExecStatus


class Identity(NamedTuple):
    """Credentials of one request."""

    headers: Mapping[str, str] = {}
    certificate_pem: str = ""
    key_pem: str = ""


class UserCredentials:
    """Credentials of one user, current at every request."""

    def __init__(self, access: ClusterAccess, clock: Clock | None = None) -> None:
        """Raise `ConfigError` for credentials that are not supported."""
        self._access = access
        self._clock = clock or SystemClock()
        self._known: Identity | None = None
        self._until: float | None = None
        """Time (`Clock.wall`) at which the known identity must be renewed; None: never."""
        self._lock = asyncio.Lock()
        user = access.user
        if user.exec is not None and user.exec.api_version not in EXEC_VERSIONS:
            raise ConfigError(
                f"{access.source}: exec.apiVersion {user.exec.api_version}: must be one of {', '.join(EXEC_VERSIONS)}"
            )
        if user.auth_provider is not None and not (user.exec or user.token or user.token_file):
            raise ConfigError(f"{access.source}: auth-provider is not supported, as in kubectl since 1.26; use exec")

    async def current(self) -> Identity:
        """Return the credentials. Raise `CredentialsUnavailable`."""
        if (known := self._fresh()) is not None:
            return known
        async with self._lock:
            if (known := self._fresh()) is None:
                known = self._known = await self._read()
        return known

    def expire(self, used: Identity) -> bool:
        """Have refused credentials renewed; return whether other ones can be had."""
        user = self._access.user
        if self._known is used:
            self._known = None
        return bool(user.token_file or user.exec)

    def _fresh(self) -> Identity | None:
        is_due = self._until is not None and self._clock.wall() >= self._until
        return None if is_due else self._known

    async def _read(self) -> Identity:
        user = self._access.user
        if user.token_file:
            self._until = self._clock.wall() + FILE_S
            return _bearer(self._token_of(self._access.path("user", user.token_file)))
        if user.token:
            return _bearer(user.token)
        if user.exec:
            return await self._run(user.exec)
        if user.username is not None:
            text = base64.b64encode(f"{user.username}:{user.password or ''}".encode()).decode()
            return Identity({"authorization": f"Basic {text}"})
        return Identity()

    def _token_of(self, path: str) -> str:
        try:
            return Path(path).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise CredentialsUnavailable(f"{self._access.source}: tokenFile {path}: {error.strerror}") from None

    async def _run(self, program: ExecEntry) -> Identity:
        output = await _output_of(program, self._access)
        name = f"{self._access.source}: exec {program.command}"
        try:
            status = msgspec.json.decode(output, type=ExecOutput).status
        except msgspec.DecodeError as error:
            raise CredentialsUnavailable(f"{name}: its output is not an ExecCredential: {error}") from None
        if not status.token and not status.client_certificate_data:
            raise CredentialsUnavailable(f"{name}: its output has neither token nor clientCertificateData")
        if bool(status.client_certificate_data) != bool(status.client_key_data):
            raise CredentialsUnavailable(f"{name}: clientCertificateData and clientKeyData are required together")
        expiry = status.expiration_timestamp
        self._until = None if expiry is None else expiry.timestamp() - EXPIRY_MARGIN_S
        headers = _bearer(status.token).headers if status.token else {}
        return Identity(headers, status.client_certificate_data, status.client_key_data)


def _bearer(token: str) -> Identity:
    return Identity({"authorization": f"Bearer {token}"})


async def _output_of(program: ExecEntry, access: ClusterAccess) -> bytes:
    """Run a credential program and return its output. Raise `CredentialsUnavailable`."""
    name = f"{access.source}: exec {program.command}"
    variables = {**environ(), **{one.name: one.value for one in program.env or ()}}
    variables["KUBERNETES_EXEC_INFO"] = json.dumps(_exec_info(program, access))
    command = access.path("user", program.command) if "/" in program.command else program.command
    try:
        process = await asyncio.create_subprocess_exec(
            command,
            *(program.args or ()),
            env=variables,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        hint = f"; {' '.join(program.install_hint.split())}" if program.install_hint else ""
        raise CredentialsUnavailable(f"{name}: {error.strerror or error}{hint}") from None
    try:
        async with asyncio.timeout(EXEC_S):
            output, errors = await process.communicate()
    except TimeoutError:
        raise CredentialsUnavailable(f"{name}: did not end within {EXEC_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode != 0:
        text = " ".join(errors.decode(errors="replace").split())[-ERROR_CHARS:]
        raise CredentialsUnavailable(f"{name}: ended with status {process.returncode}: {text}")
    return output


def _exec_info(program: ExecEntry, access: ClusterAccess) -> dict[str, Any]:
    """Return the object that a credential program reads from its environment."""
    spec: dict[str, Any] = {"interactive": False}
    if program.provide_cluster_info:
        spec["cluster"] = {
            key: value
            for key, value in {
                "server": access.cluster.server,
                "tls-server-name": access.cluster.tls_server_name,
                "insecure-skip-tls-verify": access.cluster.insecure_skip_tls_verify or None,
                "certificate-authority-data": access.cluster.certificate_authority_data,
                "proxy-url": access.cluster.proxy_url,
            }.items()
            if value is not None
        }
    return {"apiVersion": program.api_version, "kind": "ExecCredential", "spec": spec}
