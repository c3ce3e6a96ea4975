"""Renewal of webhook certificates: kept while valid, renewed in time, and trusted across a change of the authority."""

from datetime import UTC, datetime, timedelta

from dynamo.operator.certificates import AUTHORITY_DAYS, SERVER_DAYS, CertificateSet, renewed, service_hosts

NOW = datetime(2026, 1, 1, tzinfo=UTC)
HOSTS = service_hosts("hook", "dynamo-system")


def test_valid_set_is_kept() -> None:
    first = renewed(None, HOSTS, NOW)
    assert renewed(first, HOSTS, NOW + timedelta(days=SERVER_DAYS / 2)) == first
    assert CertificateSet.from_data(first.data()) == first


def test_server_certificate_is_renewed_before_it_expires_by_the_same_authority() -> None:
    first = renewed(None, HOSTS, NOW)
    second = renewed(first, HOSTS, NOW + timedelta(days=SERVER_DAYS * 0.7))
    assert second.certificate != first.certificate
    assert second.authority == first.authority


def test_new_authority_keeps_the_former_one_trusted() -> None:
    first = renewed(None, HOSTS, NOW)
    second = renewed(first, HOSTS, NOW + timedelta(days=AUTHORITY_DAYS * 0.7))
    assert second.authority != first.authority
    assert second.authority.endswith(first.authority)
    expired = renewed(first, HOSTS, NOW + timedelta(days=AUTHORITY_DAYS + 1))
    assert first.authority not in expired.authority


def test_certificates_for_other_hosts_and_damaged_sets_are_replaced() -> None:
    first = renewed(None, HOSTS, NOW)
    assert renewed(first, ("127.0.0.1",), NOW).certificate != first.certificate
    damaged = CertificateSet(
        certificate=b"", key=first.key, authority=first.authority, authority_key=first.authority_key
    )
    assert renewed(damaged, HOSTS, NOW).authority != first.authority
    other = renewed(None, HOSTS, NOW)
    mixed = CertificateSet(
        certificate=first.certificate, key=other.key, authority=first.authority, authority_key=first.authority_key
    )
    assert renewed(mixed, HOSTS, NOW).key != other.key
    assert CertificateSet.from_data({"tls.crt": b""}) is None
