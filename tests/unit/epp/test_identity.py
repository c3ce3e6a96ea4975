"""The picker presents a certificate of its own, or the given files."""

import os
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from tests.certificates import Certificates

from dynamo.core.errors import ConfigError
from dynamo.epp.config import read
from dynamo.epp.identity import CERTIFICATE_DAYS, self_signed, self_signed_context, tls_of

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def presented(context: ssl.SSLContext) -> bytes:
    """Return the certificate that a context presents, by a handshake in memory."""
    client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client_context.check_hostname, client_context.verify_mode = False, ssl.CERT_NONE
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = context.wrap_bio(to_server, to_client, server_side=True)
    client = client_context.wrap_bio(to_client, to_server)
    for side in (client, server, client, server):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    return client.getpeercert(binary_form=True) or b""


def test_own_certificate_is_valid_for_a_year() -> None:
    made = x509.load_pem_x509_certificate(self_signed(NOW)[1])
    assert made.not_valid_before_utc < NOW
    assert made.not_valid_after_utc == NOW + timedelta(days=CERTIFICATE_DAYS)
    assert presented(self_signed_context(NOW))


def test_own_certificate_needs_no_writable_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/proc/absent")
    assert presented(self_signed_context(NOW))


def test_own_certificate_without_memory_files_uses_a_temporary_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert presented(self_signed_context(NOW))


def test_given_files_are_presented_and_renewed(tmp_path: Path) -> None:
    files = Certificates(tmp_path)
    context, identity = tls_of(read(["--tls-cert-path", files.cert, "--tls-key-path", files.key], {}))
    first = presented(context)
    assert first == ssl.PEM_cert_to_DER_cert(Path(files.cert).read_text())
    Certificates(tmp_path)
    assert identity is not None
    identity.refresh()
    assert presented(context) not in {first, b""}


def test_file_that_is_no_certificate_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    with pytest.raises(ConfigError, match=r"--tls-cert-path .*/a: contains no certificate"):
        tls_of(read(["--tls-cert-path", f"{tmp_path}/a", "--tls-key-path", f"{tmp_path}/a"], {}))
