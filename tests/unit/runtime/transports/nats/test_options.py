from pathlib import Path

import pytest

from dynamo.core.errors import ConfigError
from dynamo.runtime.config import RuntimeOptions, nats_options
from dynamo.runtime.transports.nats.options import NatsOptions

EVERYTHING = {
    "NATS_AUTH_USERNAME": "ann",
    "NATS_AUTH_PASSWORD": "secret",
    "NATS_AUTH_TOKEN": "token",
    "NATS_AUTH_NKEY": "SUSEED",
    "NATS_AUTH_CREDENTIALS_FILE": __file__,
}


def test_nats_options_default_to_a_local_server_and_released_user() -> None:
    options = nats_options(variables={})
    assert options.servers == ["nats://localhost:4222"]
    assert (options.startup_timeout_s, options.request_timeout_s) == (120.0, 10.0)
    assert options.credentials() == {"user": "user", "password": "user"}
    assert options.tls() is None


def test_nats_options_prefer_user_over_token_over_nkey_over_file() -> None:
    variables = dict(EVERYTHING)
    assert nats_options(variables=variables).credentials() == {"user": "ann", "password": "secret"}
    del variables["NATS_AUTH_PASSWORD"]
    assert nats_options(variables=variables).credentials() == {"token": "token"}
    del variables["NATS_AUTH_TOKEN"]
    assert nats_options(variables=variables).credentials() == {"nkeys_seed_str": "SUSEED"}
    del variables["NATS_AUTH_NKEY"]
    assert nats_options(variables=variables).credentials() == {"user_credentials": __file__}


def test_nats_options_leave_a_user_in_the_url() -> None:
    assert nats_options(variables={"NATS_SERVER": "nats://ann:secret@host:1"}).credentials() == {}


def test_nats_options_messages_show_no_password() -> None:
    options = nats_options(variables={**EVERYTHING, "NATS_SERVER": "nats://ann:hidden@host:1, tls://b:2"})
    assert options.where == "nats://host:1,tls://b:2"
    assert not {"secret", "token'", "SUSEED"} & set(repr(options).split("'"))


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        ({"NATS_TLS_CLIENT_CERT_PATH": "a"}, "must be set together"),
        ({"NATS_TLS_CLIENT_KEY_PATH": "a"}, "must be set together"),
        ({"NATS_TLS_INSECURE": "1"}, "NATS_SERVER=nats://localhost:4222 must begin with tls://"),
        ({"NATS_TLS_INSECURE": "perhaps"}, "NATS_TLS_INSECURE='perhaps'"),
        ({"DYN_NATS_REQUEST_TIMEOUT_SECS": "soon"}, "DYN_NATS_REQUEST_TIMEOUT_SECS='soon'"),
        ({"NATS_AUTH_CREDENTIALS_FILE": "/no/such/file"}, "file not found"),
    ],
)
def test_nats_options_report_contradictions_in_one_line(variables: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        nats_options(variables=variables)


def test_nats_options_prefer_flags_over_variables() -> None:
    flags = RuntimeOptions(nats_tls_ca_cert_path="theirs.pem")
    variables = {"NATS_SERVER": "tls://host:1", "NATS_TLS_CA_CERT_PATH": "other.pem"}
    assert nats_options(flags, variables).tls_ca_cert_path == "theirs.pem"
    assert nats_options(variables=variables).tls_ca_cert_path == "other.pem"


def test_nats_options_error_names_an_unreadable_certificate(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read a certificate"):
        NatsOptions(server="tls://host:1", tls_ca_cert_path=str(tmp_path / "none.pem")).tls()
