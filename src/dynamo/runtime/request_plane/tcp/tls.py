"""TLS of the request plane: what this process shows others, and whom it takes at their word (docs/tls.md).

It is a server to whoever sends it requests, and a client of whoever it sends them to. In upstream's framing a worker
also dials its answers back: there the roles are swapped, so that a process which speaks to released peers needs both.
"""

import logging
import ssl
from dataclasses import dataclass

from dynamo.core.errors import ConfigError
from dynamo.core.tls import Identity, PemFile, check_pair, client_context, server_context

logger = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpTlsFiles:
    """The settings as they were given; an empty text is none."""

    cert_path: str = ""
    key_path: str = ""
    ca_cert_path: str = ""
    client_cert_path: str = ""
    client_key_path: str = ""
    client_ca_cert_path: str = ""
    is_insecure: bool = False
    server_name: str = ""
    handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpTls:
    """How connections are secured; without contexts they are plain TCP."""

    server: ssl.SSLContext | None = None
    """For connections that others open to us."""
    client: ssl.SSLContext | None = None
    """For connections that we open."""
    server_name: str = ""
    """What the certificates of others must be made out to; empty: the host they are reached at."""
    handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S
    identities: tuple[Identity, ...] = ()
    """What the contexts show."""

    @classmethod
    def load(cls, files: TcpTlsFiles) -> "TcpTls":
        """Reads the files. Raises `ConfigError` for settings that are half given or wrong."""
        certificate = PemFile("--tcp-tls-cert-path", files.cert_path)
        key = PemFile("--tcp-tls-key-path", files.key_path)
        authority = PemFile("--tcp-tls-ca-cert-path", files.ca_cert_path)
        own_certificate = PemFile("--tcp-tls-client-cert-path", files.client_cert_path)
        own_key = PemFile("--tcp-tls-client-key-path", files.client_key_path)
        client_authority = PemFile("--tcp-tls-client-ca-cert-path", files.client_ca_cert_path)
        check_pair(certificate, key)
        check_pair(own_certificate, own_key)
        trusts = bool(authority or files.is_insecure)
        if client_authority and not certificate:
            raise ConfigError(f"{client_authority} needs --tcp-tls-cert-path and --tcp-tls-key-path")
        if own_certificate and not trusts:
            raise ConfigError(f"{own_certificate} needs --tcp-tls-ca-cert-path (or DYN_TCP_TLS_INSECURE)")
        if not files.handshake_timeout_s > 0:
            raise ConfigError(f"--tcp-tls-handshake-timeout {files.handshake_timeout_s:g}: expected more than 0")
        if files.is_insecure:
            logger.warning("--tcp-tls-insecure: the certificates of other processes are not verified")
        server = client = None
        identities: list[Identity] = []
        if certificate:
            server = server_context(certificate, key, client_authority)
            identities.append(Identity(server, certificate, key))
        if trusts:
            client = client_context(authority, own_certificate, own_key, is_insecure=files.is_insecure)
            if own_certificate:
                identities.append(Identity(client, own_certificate, own_key))
        return cls(
            server=server,
            client=client,
            server_name=files.server_name,
            handshake_timeout_s=files.handshake_timeout_s,
            identities=tuple(identities),
        )

    def refresh(self) -> None:
        """Takes up certificates that were renewed; called before each handshake."""
        for identity in self.identities:
            identity.refresh()

    @property
    def verifies_clients(self) -> bool:
        """True where a client must show a certificate of our authority."""
        return self.server is not None and self.server.verify_mode is ssl.CERT_REQUIRED

    @property
    def is_half(self) -> bool:
        """True where only one role is secured: our own peers need no more, released ones are answered both ways."""
        return (self.server is None) != (self.client is None)
