"""NATS options: server addresses, credentials and timeouts."""

import os
import ssl
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from dynamo.core.errors import ConfigError

DEFAULT_SERVER = "nats://localhost:4222"
DEFAULT_USER = "user"  # Default name and password of released Dynamo.


@dataclass(frozen=True, slots=True, kw_only=True)
class NatsOptions:
    """NATS options, read from the environment by `runtime.config.nats_options`."""

    server: str = DEFAULT_SERVER
    """URL, or comma-separated URLs of one cluster."""
    username: str = ""
    password: str = field(default="", repr=False)
    token: str = field(default="", repr=False)
    nkey: str = field(default="", repr=False)
    """Seed of the nkey."""
    credentials_file: str = ""
    tls_ca_cert_path: str = ""
    tls_client_cert_path: str = ""
    tls_client_key_path: str = ""
    tls_insecure: bool = False
    startup_timeout_s: float = 120.0
    """Timeout of a process's first connection, in seconds."""
    connect_timeout_s: float = 3.0
    """Timeout of one connection attempt, and of requests during an outage, in seconds."""
    request_timeout_s: float = 10.0
    """Timeout of a worker's response, in seconds."""
    ping_interval_s: float = 0.5
    """Interval of pings in seconds; a silence of twice this time closes the connection."""

    def __post_init__(self) -> None:
        if self.credentials_file and not os.path.isfile(self.credentials_file):
            raise ConfigError(f"NATS_AUTH_CREDENTIALS_FILE={self.credentials_file}: file not found")
        if bool(self.tls_client_cert_path) != bool(self.tls_client_key_path):
            raise ConfigError("NATS_TLS_CLIENT_CERT_PATH and NATS_TLS_CLIENT_KEY_PATH must be set together")
        if self.wants_tls and not all(url.startswith("tls://") for url in self.servers):
            raise ConfigError(f"NATS_TLS_* is set: NATS_SERVER={self.where} must begin with tls://")

    @property
    def servers(self) -> list[str]:
        return [url.strip() for url in self.server.split(",") if url.strip()]

    @property
    def where(self) -> str:
        """Return the servers without passwords, for messages."""
        return ",".join(_without_user(url) for url in self.servers)

    @property
    def wants_tls(self) -> bool:
        return bool(self.tls_ca_cert_path or self.tls_client_cert_path or self.tls_insecure)

    def credentials(self) -> dict[str, Any]:
        """Return the arguments of the client library: the first of user and password, token, nkey, credentials file."""
        if self.username and self.password:
            return {"user": self.username, "password": self.password}
        if self.token:
            return {"token": self.token}
        if self.nkey:
            return {"nkeys_seed_str": self.nkey}
        if self.credentials_file:
            return {"user_credentials": self.credentials_file}
        if any(urlsplit(url).username for url in self.servers):
            return {}
        return {"user": DEFAULT_USER, "password": DEFAULT_USER}

    def tls(self) -> ssl.SSLContext | None:
        """Return the TLS context; None uses the URL's scheme and the system's CAs. Raise `ConfigError`."""
        if not self.wants_tls:
            return None
        try:
            context = ssl.create_default_context(cafile=self.tls_ca_cert_path or None)
            if self.tls_client_cert_path:
                context.load_cert_chain(self.tls_client_cert_path, self.tls_client_key_path)
        except OSError as error:  # Includes ssl.SSLError.
            raise ConfigError(f"NATS_TLS_*: cannot read a certificate: {error}") from None
        if self.tls_insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


def _without_user(url: str) -> str:
    scheme, separator, rest = url.rpartition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"
