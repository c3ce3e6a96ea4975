"""Access to a NATS server, with and without TLS, and message sizes: a real server in each configuration."""

import base64
import json
import secrets
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nkeys
import pytest
from tests.cluster.nats import NatsServer

from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.runtime.config import nats_options
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.request_plane.nats import NatsPlane
from dynamo.runtime.request_plane.tcp.common import TcpOptions
from dynamo.runtime.transports.nats.connection import NatsConnection
from dynamo.runtime.transports.nats.options import NatsOptions

pytestmark = pytest.mark.integration

TIMEOUT_S = 30.0
STARTUP_S = 60.0  # No test waits for it.


async def connects(variables: dict[str, str]) -> None:
    """Connect according to the environment, and receive a message of its own."""
    connection = NatsConnection(
        nats_options(variables={"NATS_STARTUP_CONNECT_TIMEOUT_SECONDS": str(STARTUP_S), **variables}), "test"
    )
    try:
        await connection.start()
        received: list[bytes] = []
        subscription = await connection.subscribe("subject", lambda message: received.append(message.data))
        assert connection.publish("subject", b"x")
        await connection.flush()
        await connection.settle(subscription)
        assert received == [b"x"]
    finally:
        await connection.close()


async def is_refused(variables: dict[str, str], words: str = "authorization rejected") -> None:
    began = time.monotonic()
    with pytest.raises(ConfigError, match=words):
        await connects(variables)
    assert time.monotonic() - began < STARTUP_S / 2, "a refusal must not be waited out"


# Credentials -----------------------------------------------------------------------------------------------------


async def test_nats_login_with_user_and_password(tmp_path: Path) -> None:
    with NatsServer(tmp_path, "authorization { user: ann, password: secret }") as server:
        await connects({"NATS_SERVER": server.url, "NATS_AUTH_USERNAME": "ann", "NATS_AUTH_PASSWORD": "secret"})
        await connects({"NATS_SERVER": f"nats://ann:secret@{server.address}"})
        await is_refused({"NATS_SERVER": server.url, "NATS_AUTH_USERNAME": "ann", "NATS_AUTH_PASSWORD": "wrong"})


async def test_default_credentials_equal_the_released_ones(tmp_path: Path) -> None:
    with NatsServer(tmp_path, "authorization { user: user, password: user }") as server:
        await connects({"NATS_SERVER": server.url})


async def test_nats_login_with_a_token(tmp_path: Path) -> None:
    with NatsServer(tmp_path, "authorization { token: opensesame }") as server:
        await connects({"NATS_SERVER": server.url, "NATS_AUTH_TOKEN": "opensesame"})
        await is_refused({"NATS_SERVER": server.url, "NATS_AUTH_TOKEN": "wrong"})


def key_pair(prefix: int) -> tuple[str, Any]:
    seed = bytes(nkeys.encode_seed(secrets.token_bytes(32), prefix))
    return seed.decode(), nkeys.from_seed(bytearray(seed))


async def test_nats_login_with_an_nkey(tmp_path: Path) -> None:
    seed, pair = key_pair(nkeys.PREFIX_BYTE_USER)
    untrusted_authority, _ = key_pair(nkeys.PREFIX_BYTE_USER)
    with NatsServer(tmp_path, f"authorization {{ users: [ {{ nkey: {pair.public_key.decode()} }} ] }}") as server:
        await connects({"NATS_SERVER": server.url, "NATS_AUTH_NKEY": seed})
        await is_refused({"NATS_SERVER": server.url, "NATS_AUTH_NKEY": untrusted_authority})


def token(claims: dict[str, Any], issuer: Any) -> str:
    """Return a NATS JWT, signed by its issuer's key."""
    claims = {"jti": secrets.token_hex(8), "iat": int(time.time()), "iss": issuer.public_key.decode(), **claims}
    parts = ({"typ": "JWT", "alg": "ed25519-nkey"}, claims)
    text = ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts)
    return f"{text}.{base64.urlsafe_b64encode(issuer.sign(text.encode())).decode().rstrip('=')}"


async def test_nats_login_with_a_credentials_file(tmp_path: Path) -> None:
    _, operator = key_pair(nkeys.PREFIX_BYTE_OPERATOR)
    _, account = key_pair(nkeys.PREFIX_BYTE_ACCOUNT)
    seed, user = key_pair(nkeys.PREFIX_BYTE_USER)
    account_id, operator_id = account.public_key.decode(), operator.public_key.decode()
    everything = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1)
    operator_jwt = token({"sub": operator_id, "name": "o", "nats": {"type": "operator", "version": 2}}, operator)
    account_jwt = token(
        {"sub": account_id, "name": "a", "nats": {"type": "account", "version": 2, "limits": everything}}, operator
    )
    user_jwt = token(
        {
            "sub": user.public_key.decode(),
            "name": "u",
            "nats": {"type": "user", "version": 2, "subs": -1, "payload": -1},
        },
        account,
    )
    creds = tmp_path / "user.creds"
    creds.write_text(
        f"-----BEGIN NATS USER JWT-----\n{user_jwt}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    )
    config = f"operator: {operator_jwt}\nresolver: MEMORY\nresolver_preload: {{ {account_id}: {account_jwt} }}\n"
    with NatsServer(tmp_path, config) as server:
        await connects({"NATS_SERVER": server.url, "NATS_AUTH_CREDENTIALS_FILE": str(creds)})
        await is_refused({"NATS_SERVER": server.url})


# TLS -------------------------------------------------------------------------------------------------------------


class Certificates:
    """Authority and its signed certificates."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = str(folder / "ca.pem")
        key = str(folder / "ca.key")
        openssl(
            "req", "-x509", *NEW_KEY, "-subj", "/CN=authority", "-days", "2", "-keyout", key, "-out", self.authority
        )

    def sign(self, name: str) -> tuple[str, str]:
        """Return a certificate and its key."""
        paths = {kind: str(self.folder / f"{name}.{kind}") for kind in ("pem", "key", "csr", "ext")}
        Path(paths["ext"]).write_text("subjectAltName=IP:127.0.0.1\n")
        openssl("req", *NEW_KEY, "-subj", f"/CN={name}", "-keyout", paths["key"], "-out", paths["csr"])
        openssl(
            "x509", "-req", "-in", paths["csr"], "-CA", self.authority, "-CAkey", str(self.folder / "ca.key"),
            "-CAcreateserial", "-days", "2", "-extfile", paths["ext"], "-out", paths["pem"],
        )  # fmt: skip
        return paths["pem"], paths["key"]


NEW_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]


def openssl(*words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def tls_config(certificates: Certificates) -> str:
    pem, key = certificates.sign("server")
    return f'cert_file: "{pem}", key_file: "{key}", ca_file: "{certificates.authority}"'


async def test_nats_tls_with_and_without_authority(tmp_path: Path, certificates: Certificates, tls_config: str) -> None:
    with NatsServer(tmp_path, f"tls {{ {tls_config} }}") as server:
        url = f"tls://{server.address}"
        await connects({"NATS_SERVER": url, "NATS_TLS_CA_CERT_PATH": certificates.authority})
        await connects({"NATS_SERVER": url, "NATS_TLS_INSECURE": "true"})
        await is_refused({"NATS_SERVER": url}, r"untrusted certificate \(NATS_TLS_\*\): .*certificate verify failed")


async def test_nats_mutual_tls(tmp_path: Path, certificates: Certificates, tls_config: str) -> None:
    pem, key = certificates.sign("client")
    with NatsServer(tmp_path, f"tls {{ {tls_config}, verify: true }}") as server:
        known = {"NATS_SERVER": f"tls://{server.address}", "NATS_TLS_CA_CERT_PATH": certificates.authority}
        await connects({**known, "NATS_TLS_CLIENT_CERT_PATH": pem, "NATS_TLS_CLIENT_KEY_PATH": key})
        await is_refused({**known, "NATS_STARTUP_CONNECT_TIMEOUT_SECONDS": "0.5"}, "no NATS server")


# Sizes -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(tmp_path, "max_payload: 10000") as server:
        yield server


async def test_payload_over_the_nats_limit_is_a_client_error(small: NatsServer) -> None:
    options = NatsOptions(server=small.url)
    runtime = DistributedRuntime(
        None,
        "mem",
        lambda dispatcher, registry: NatsPlane(dispatcher, options, TcpOptions(host="127.0.0.1"), registry),
        event_plane="mem",
    )
    endpoint = runtime.endpoint("ns.comp.generate")
    await endpoint.serve(lambda _, reply: reply.finish())
    client = await endpoint.client()
    await client.wait_for_instances(TIMEOUT_S)
    assert [item async for item in await client.generate("x" * 8000)] == []
    with pytest.raises(InvalidArgument, match=r"exceeds the limit of 10000 \(the NATS server's max_payload\)"):
        await client.generate("x" * 10_000)
    assert [item async for item in await client.generate("x" * 8000)] == []
    await runtime.shutdown()
