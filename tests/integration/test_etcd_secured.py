"""An etcd that authenticates its clients: TLS on both sides, users and passwords."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from tests.cluster.etcd import EtcdCluster

from dynamo.core.errors import ConfigError
from dynamo.runtime.discovery.base import Put, Synced
from dynamo.runtime.discovery.etcd import EtcdDiscovery
from dynamo.runtime.transports.etcd.options import etcd_options

pytestmark = pytest.mark.integration

BUCKET = "v1/instances"
TIMEOUT_S = 60.0  # For operations that take a second on an idle machine.


class CertificateFiles:
    """Certificates of a member and its clients."""

    def __init__(self, folder: Path) -> None:
        authority, untrusted_authority = trustme.CA(), trustme.CA()
        self.ca, self.other_ca = str(folder / "ca.pem"), str(folder / "other.pem")
        self.cert, self.key = str(folder / "cert.pem"), str(folder / "key.pem")
        issued = authority.issue_cert("127.0.0.1", "localhost")
        authority.cert_pem.write_to_path(self.ca)
        untrusted_authority.cert_pem.write_to_path(self.other_ca)
        issued.cert_chain_pems[0].write_to_path(self.cert)
        issued.private_key_pem.write_to_path(self.key)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> CertificateFiles:
    return CertificateFiles(tmp_path_factory.mktemp("papers"))


@pytest.fixture(scope="module")
def encrypted(files: CertificateFiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    flags = [f"--cert-file={files.cert}", f"--key-file={files.key}"]
    flags += [f"--trusted-ca-file={files.ca}", "--client-cert-auth"]
    with EtcdCluster(tmp_path_factory.mktemp("encrypted"), 1, *flags) as cluster:
        yield {
            "ETCD_ENDPOINTS": cluster.endpoints,
            "ETCD_AUTH_CA": files.ca,
            "ETCD_AUTH_CLIENT_CERT": files.cert,
            "ETCD_AUTH_CLIENT_KEY": files.key,
            "ETCD_STARTUP_CONNECT_TIMEOUT_SECONDS": str(TIMEOUT_S),
        }


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Start a member whose tokens expire after a second, so that every renewal of a lease needs a new one."""
    with EtcdCluster(tmp_path_factory.mktemp("guarded"), 1, "--auth-token-ttl=1") as cluster:
        cluster.wait()
        cluster.control("user", "add", "root:top")
        cluster.control("user", "grant-role", "root", "root")
        cluster.control("role", "add", "worker")
        cluster.control("role", "grant-permission", "worker", "--prefix=true", "readwrite", "v1/")
        cluster.control("user", "add", "dynamo:secret")
        cluster.control("user", "grant-role", "dynamo", "worker")
        cluster.control("auth", "enable")
        yield {"ETCD_ENDPOINTS": cluster.endpoints, "ETCD_AUTH_USERNAME": "dynamo", "ETCD_AUTH_PASSWORD": "secret"}


async def meet(variables: dict[str, str], wait_s: float = 0.0) -> None:
    """Check that two members discover each other, and still list each other after the wait."""
    options = etcd_options(variables)
    owner, reader = EtcdDiscovery(options=options), EtcdDiscovery(options=options)
    async with asyncio.timeout(TIMEOUT_S + wait_s):
        await owner.put(BUCKET, "k", b"v")
        watch = reader.watch(BUCKET)
        assert [await anext(watch), await anext(watch)] == [Put("k", b"v"), Synced()]
        await asyncio.sleep(wait_s)
        assert owner.is_reachable and reader.is_reachable
        await owner.put(BUCKET, "k", b"w")
        assert await anext(watch) == Put("k", b"w")
        await owner.close()
        await reader.close()


async def refused(variables: dict[str, str]) -> str:
    member = EtcdDiscovery(options=etcd_options(variables))
    try:
        async with asyncio.timeout(TIMEOUT_S):
            with pytest.raises(ConfigError) as caught:
                await member.connect()
    finally:
        await member.close()
    return str(caught.value)


async def test_mutual_tls_connects_members(encrypted: dict[str, str]) -> None:
    await meet(encrypted)


async def test_untrusted_member_is_refused(encrypted: dict[str, str], files: CertificateFiles) -> None:
    await meet(encrypted)
    output = await refused({**encrypted, "ETCD_AUTH_CA": files.other_ca})
    assert output.startswith("ETCD_AUTH_CA: certificate of https://127.0.0.1:")


async def test_client_without_certificate_gets_the_reason(encrypted: dict[str, str]) -> None:
    await meet(encrypted)
    without = {name: value for name, value in encrypted.items() if "CLIENT" not in name}
    output = await refused({**without, "ETCD_STARTUP_CONNECT_TIMEOUT_SECONDS": "5"})
    assert "ETCD_AUTH_CLIENT_CERT" in output


async def test_password_login_is_renewed_after_its_token_expires(guarded: dict[str, str]) -> None:
    await meet(guarded, wait_s=3.0)


@pytest.mark.parametrize(
    "change", [{"ETCD_AUTH_PASSWORD": "wrong"}, {"ETCD_AUTH_USERNAME": "", "ETCD_AUTH_PASSWORD": ""}]
)
async def test_refused_login_names_the_settings_to_correct(guarded: dict[str, str], change: dict[str, str]) -> None:
    assert (await refused({**guarded, **change})).startswith(
        "ETCD_AUTH_USERNAME, ETCD_AUTH_PASSWORD: rejected by http://127"
    )


async def test_record_outside_the_permitted_range_is_refused(guarded: dict[str, str]) -> None:
    member = EtcdDiscovery(options=etcd_options(guarded))
    with pytest.raises(ConfigError, match=r"ETCD_AUTH_USERNAME: etcd rejected record secret/k: .*permission denied"):
        await member.put("secret", "k", b"v")
    await member.put(BUCKET, "k", b"v")
    assert await member.snapshot(BUCKET) == {"k": b"v"}
    await member.close()
