"""Certificates of the webhook server: a self-signed authority and a server certificate, and when to renew them."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from dynamo.core.errors import ConfigError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

AUTHORITY_DAYS = 3650
SERVER_DAYS = 365
RENEWAL = 1 / 3
"""Part of the validity that is left when a certificate is renewed."""
CLOCK_SKEW = timedelta(hours=1)
AUTHORITY_NAME = "dynamo-operator-webhook-ca"


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateSet:
    """PEM texts, as the secret of the webhook server has them."""

    certificate: bytes
    key: bytes
    authority: bytes
    """Certificates of the authority, the current one first; clients trust all of them."""
    authority_key: bytes

    def data(self) -> dict[str, bytes]:
        """Return the entries of the secret."""
        return {
            "tls.crt": self.certificate,
            "tls.key": self.key,
            "ca.crt": self.authority,
            "ca.key": self.authority_key,
        }

    @classmethod
    def from_data(cls, data: dict[str, bytes]) -> "CertificateSet | None":
        """Return the set of a secret's entries, or None if one is missing."""
        try:
            return cls(
                certificate=data["tls.crt"],
                key=data["tls.key"],
                authority=data["ca.crt"],
                authority_key=data["ca.key"],
            )
        except KeyError:
            return None


def service_hosts(name: str, namespace: str) -> tuple[str, ...]:
    """Return the names under which the API server reaches a service."""
    return (f"{name}.{namespace}.svc", f"{name}.{namespace}.svc.cluster.local", f"{name}.{namespace}", name)


def renewed(old: CertificateSet | None, hosts: Sequence[str], now: datetime) -> CertificateSet:
    """Return the set to use now: `old` as long as it is valid long enough for these hosts, otherwise a new one.

    A new server certificate is signed by the same authority, so that clients need no change. A new authority is added to
    the former one's certificate, so that clients trust both until all servers have the new certificate.
    """
    parsed = None if old is None else _parsed(old)
    if old is None or parsed is None:
        return _issue(hosts, now, *_new_authority(now))
    (not_before, not_after, names), (ca_before, ca_after) = parsed
    if _is_due(ca_before, ca_after, now):
        authority, key = _new_authority(now)
        kept = old.authority if ca_after > now else b""
        return _issue(hosts, now, authority + kept, key)
    if _is_due(not_before, not_after, now) or not set(hosts) <= names:
        return _issue(hosts, now, old.authority, old.authority_key)
    return old


def _is_due(start: datetime, end: datetime, now: datetime) -> bool:
    return now >= end - (end - start) * RENEWAL


def _parsed(pair: CertificateSet) -> tuple[tuple[datetime, datetime, set[str]], tuple[datetime, datetime]] | None:
    """Return the validity and names of a set, or None if it is damaged or its parts do not belong together."""
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        server = x509.load_pem_x509_certificate(pair.certificate)
        authority = x509.load_pem_x509_certificate(pair.authority)
        server.verify_directly_issued_by(authority)
        keys = [load_pem_private_key(one, None).public_key() for one in (pair.key, pair.authority_key)]
        if keys != [server.public_key(), authority.public_key()]:
            return None
        names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        found = set(names.get_values_for_type(x509.DNSName)) | {
            str(one) for one in names.get_values_for_type(x509.IPAddress)
        }
    except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
        return None
    return (
        (server.not_valid_before_utc, server.not_valid_after_utc, found),
        (authority.not_valid_before_utc, authority.not_valid_after_utc),
    )


def _new_authority(now: datetime) -> tuple[bytes, bytes]:
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise ConfigError(
            "webhook certificates require the package cryptography: pip install 'dynamo-serve[kubernetes]'"
        ) from None
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    # The serial number distinguishes two authorities of one name; the key identifier leads a client to the right one.
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, AUTHORITY_NAME)])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + timedelta(days=AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(_usage(is_authority=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return _pem(made), _key_pem(key)


def _issue(hosts: Sequence[str], now: datetime, authority: bytes, authority_key: bytes) -> CertificateSet:
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    issuer = x509.load_pem_x509_certificate(authority)
    signer = load_pem_private_key(authority_key, None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    names: list[x509.GeneralName] = []
    for host in hosts:
        is_address = host.replace(".", "").isdigit() or ":" in host
        names.append(x509.IPAddress(ipaddress.ip_address(host)) if is_address else x509.DNSName(host))
    made = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:64])]))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + timedelta(days=SERVER_DAYS))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .add_extension(_usage(is_authority=False), critical=True)
        .sign(signer, hashes.SHA256())
    )
    return CertificateSet(certificate=_pem(made), key=_key_pem(key), authority=authority, authority_key=authority_key)


def _usage(*, is_authority: bool) -> "x509.KeyUsage":
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not is_authority, key_cert_sign=is_authority, crl_sign=is_authority,
        content_commitment=False, key_encipherment=False, data_encipherment=False, key_agreement=False,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _pem(certificate: "x509.Certificate") -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def _key_pem(key: "ec.EllipticCurvePrivateKey") -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
