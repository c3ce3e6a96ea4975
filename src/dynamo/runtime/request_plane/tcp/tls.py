"""TLS of the request plane: certificates of this process and verification of its peers (docs/tls.md).

A process is a server for its callers and a client of the workers that it calls. In Dynamo framing a worker also opens
the response connection: the roles are reversed, so that a process with released peers needs both.
"""

import logging
import ssl

from msgspec import Struct

from dynamo.core.errors import ConfigError
from dynamo.core.tls import PemFile, TlsIdentity, check_pair, client_context, server_context

logger = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 3.0


class TcpTlsFiles(Struct, frozen=True, kw_only=True):
    """TLS settings as given; an empty text is unset."""

    cert_path: str = ""
    key_path: str = ""
    ca_cert_path: str = ""
    client_cert_path: str = ""
    client_key_path: str = ""
    client_ca_cert_path: str = ""
    is_insecure: bool = False
    server_name: str = ""
    handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S


class TcpTls(Struct, frozen=True, kw_only=True):
    """TLS contexts of the connections; without contexts connections are plain TCP."""

    server: ssl.SSLContext | None = None
    """Context of accepted connections."""
    client: ssl.SSLContext | None = None
    """Context of outgoing connections."""
    server_name: str = ""
    """Name expected in the certificates of servers; empty: the host that is connected to."""
    handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S
    identities: tuple[TlsIdentity, ...] = ()
    """Certificates used by the contexts."""

    @classmethod
    def load(cls, files: TcpTlsFiles) -> "TcpTls":
        """Load the files. Raise `ConfigError` for incomplete or invalid settings."""
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
            raise ConfigError(f"{client_authority}: requires --tcp-tls-cert-path and --tcp-tls-key-path")
        if own_certificate and not trusts:
            raise ConfigError(f"{own_certificate}: requires --tcp-tls-ca-cert-path (or DYN_TCP_TLS_INSECURE)")
        if not files.handshake_timeout_s > 0:
            raise ConfigError(f"--tcp-tls-handshake-timeout {files.handshake_timeout_s:g}: must be greater than 0")
        if files.is_insecure:
            logger.warning("--tcp-tls-insecure: certificates of other processes are not verified")
        server = client = None
        identities: list[TlsIdentity] = []
        if certificate:
            server = server_context(certificate, key, client_authority)
            identities.append(TlsIdentity(server, certificate, key))
        if trusts:
            client = client_context(authority, own_certificate, own_key, is_insecure=files.is_insecure)
            if own_certificate:
                identities.append(TlsIdentity(client, own_certificate, own_key))
        return cls(
            server=server,
            client=client,
            server_name=files.server_name,
            handshake_timeout_s=files.handshake_timeout_s,
            identities=tuple(identities),
        )

    def refresh(self) -> None:
        """Reload renewed certificates; called before each handshake."""
        for identity in self.identities:
            identity.refresh()

    @property
    def verifies_clients(self) -> bool:
        """Return True if clients must present a certificate of the configured authority."""
        return self.server is not None and self.server.verify_mode is ssl.CERT_REQUIRED

    @property
    def is_half(self) -> bool:
        """Return True if only one role is secured: enough for batched frames, not for Dynamo framing."""
        return (self.server is None) != (self.client is None)
