"""Errors of unusable certificates and keys: one line that contains the setting's name."""

import logging
import shutil
import ssl
from pathlib import Path

import pytest
from tests.certificates import Certificates

from dynamo.core.errors import ConfigError
from dynamo.core.tls import PemFile, TlsIdentity, check_pair, client_context, server_context

NONE = PemFile("--none", "")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


def test_tls_server_requires_client_certificates_when_it_has_a_client_ca(certificates: Certificates) -> None:
    own = PemFile("--cert", certificates.cert), PemFile("--key", certificates.key)
    assert server_context(*own, NONE).verify_mode is ssl.CERT_NONE
    assert server_context(*own, PemFile("--ca", certificates.ca)).verify_mode is ssl.CERT_REQUIRED


def test_tls_client_verifies_unless_disabled(certificates: Certificates) -> None:
    authority = PemFile("--ca", certificates.ca)
    careful = client_context(authority, NONE, NONE, is_insecure=False)
    assert (careful.verify_mode, careful.check_hostname) == (ssl.CERT_REQUIRED, True)
    careless = client_context(authority, NONE, NONE, is_insecure=True)
    assert (careless.verify_mode, careless.check_hostname) == (ssl.CERT_NONE, False)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "No such file"),
        (b"", "contains no certificate"),
        (b"\x30\x82\x01\x0a", "contains no certificate"),
        (b"-----BEGIN CERTIFICATE-----\nnonsense\n-----END CERTIFICATE-----\n", "--cert"),
    ],
)
def test_tls_error_names_an_invalid_certificate(
    certificates: Certificates, tmp_path: Path, text: bytes | None, complaint: str
) -> None:
    path = tmp_path / "cert.pem"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(ConfigError, match=complaint) as raised:
        server_context(PemFile("--cert", str(path)), PemFile("--key", certificates.key), NONE)
    assert str(raised.value).startswith(f"--cert {path}")
    assert "\n" not in str(raised.value)


def test_tls_refuses_a_key_of_another_certificate(certificates: Certificates) -> None:
    with pytest.raises(ConfigError, match=r"--cert .* and --key .*mismatch"):
        server_context(PemFile("--cert", certificates.cert), PemFile("--key", certificates.client_key), NONE)


def test_tls_refuses_an_encrypted_key_without_prompting(certificates: Certificates, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        PrivateFormat,
        load_pem_private_key,
    )

    key = load_pem_private_key(Path(certificates.key).read_bytes(), None)
    locked = tmp_path / "locked.pem"
    locked.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")))
    with pytest.raises(ConfigError, match=f"--key {locked}"):
        server_context(PemFile("--cert", certificates.cert), PemFile("--key", str(locked)), NONE)


def test_tls_error_names_an_invalid_authority(certificates: Certificates, tmp_path: Path) -> None:
    for authority in (PemFile("--ca", certificates.key), PemFile("--ca", str(tmp_path / "nothing"))):
        with pytest.raises(ConfigError, match=f"--ca {authority.path}"):
            client_context(authority, NONE, NONE, is_insecure=False)


def test_tls_refuses_a_certificate_without_key_and_a_key_without_certificate() -> None:
    one, other = PemFile("--cert", "c.pem"), PemFile("--key", "k.pem")
    check_pair(one, other)
    check_pair(PemFile("--cert", ""), PemFile("--key", ""))
    with pytest.raises(ConfigError, match=r"--cert c\.pem: requires --key"):
        check_pair(one, PemFile("--key", ""))
    with pytest.raises(ConfigError, match=r"--key k\.pem: requires --cert"):
        check_pair(PemFile("--cert", ""), other)


def shown(server: ssl.SSLContext) -> bytes | None:
    """The certificate that a server shows, without a socket."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(to_client, to_server)
    answering = server.wrap_bio(to_server, to_client, server_side=True)
    for end in (asking, answering, asking):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
    return asking.getpeercert(binary_form=True)


def test_tls_server_loads_a_renewed_certificate_and_keeps_the_old_one_when_invalid(
    certificates: Certificates, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cert, key = PemFile("--cert", str(tmp_path / "cert.pem")), PemFile("--key", str(tmp_path / "key.pem"))
    shutil.copy(certificates.cert, cert.path)
    shutil.copy(certificates.key, key.path)
    context = server_context(cert, key, NONE)
    identity = TlsIdentity(context, cert, key)
    first = shown(context)
    assert first is not None
    identity.refresh()
    assert shown(context) == first

    shutil.copy(certificates.client_cert, cert.path)  # The key is not there yet.
    with caplog.at_level(logging.WARNING):
        identity.refresh()
        identity.refresh()
    assert shown(context) == first
    assert caplog.text.count("keeping the loaded TLS certificate") == 1

    shutil.copy(certificates.client_key, key.path)
    identity.refresh()
    assert shown(context) not in {None, first}

    Path(cert.path).unlink()
    identity.refresh()
    assert shown(context) not in {None, first}
