"""Identity of the endpoint picker: the TLS context of its certificate files, or of a certificate that it signs itself."""

import asyncio
import os
import ssl
import tempfile
from datetime import UTC, datetime, timedelta

from dynamo.core.errors import ConfigError
from dynamo.core.extras import install_command
from dynamo.core.tls import PemFile, TlsIdentity, server_context
from dynamo.epp.config import EppOptions

CERTIFICATE_DAYS = 365
RENEWAL_S = 10.0
"""Time between two looks at the certificate files, which are renewed while the process runs."""


def tls_of(options: EppOptions) -> tuple[ssl.SSLContext, TlsIdentity | None]:
    """Return the TLS context of ext_proc, and what keeps its files current. Raise `ConfigError`."""
    if options.tls_cert_path is None or options.tls_key_path is None:
        return self_signed_context(datetime.now(UTC)), None
    certificate = PemFile("--tls-cert-path", options.tls_cert_path)
    key = PemFile("--tls-key-path", options.tls_key_path)
    context = server_context(certificate, key, PemFile("", ""))
    return context, TlsIdentity(context, certificate, key)


async def keep_current(identity: TlsIdentity) -> None:
    """Load renewed files for new connections, forever."""
    while True:
        await asyncio.sleep(RENEWAL_S)
        identity.refresh()


def self_signed_context(now: datetime) -> ssl.SSLContext:
    """Return the context of a new certificate. Raise `ConfigError`."""
    private, certificate = self_signed(now)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if hasattr(os, "memfd_create"):  # The root file system of a container may be read-only.
        with open(os.memfd_create("dynamo-epp", os.MFD_CLOEXEC), "wb") as file:
            file.write(certificate + private)
            file.flush()
            context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
        return context
    with tempfile.NamedTemporaryFile() as file:
        file.write(certificate + private)
        file.flush()
        context.load_cert_chain(file.name)
    return context


def self_signed(now: datetime) -> tuple[bytes, bytes]:
    """Return a new key and a certificate for it (PEM), which gateways accept without verification. Raises `ConfigError`."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ImportError:
        raise ConfigError(
            f"--secure-serving: requires cryptography; install it: {install_command('kubernetes')}, "
            "or set DYN_SECURE_SERVING=false"
        ) from None
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "dynamo-epp")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=CERTIFICATE_DAYS))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private, certificate.public_bytes(serialization.Encoding.PEM)
