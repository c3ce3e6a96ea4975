"""etcd options from the environment, under Dynamo's names."""

import ssl
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass

from dynamo.core.config import setting
from dynamo.core.errors import ConfigError

DEFAULT_ENDPOINTS = "http://localhost:2379"


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a member."""

    host: str
    port: int
    is_tls: bool

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.is_tls else 'http'}://{host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Parse `http://host:port`, `https://host:port` or `host:port`. Raise `ConfigError` for anything else."""
        wrong = ConfigError(f"ETCD_ENDPOINTS={text!r}: must be http://host:port or https://host:port, comma-separated")
        try:
            parts = urllib.parse.urlsplit(text if "://" in text else f"http://{text}")
            port = parts.port or 2379
        except ValueError:
            raise wrong from None
        if parts.scheme not in {"http", "https"} or not parts.hostname or parts.path not in {"", "/"}:
            raise wrong
        return cls(parts.hostname, port, parts.scheme == "https")


LEASE_TTL_S = 30  # TTL used by released Dynamo 1.6.1 (observed; its documentation specifies 10).


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdOptions:
    """Addresses, credentials and timeouts of etcd."""

    addresses: tuple[Address, ...] = (Address("localhost", 2379, is_tls=False),)
    username: str = ""
    password: str = ""
    ca: str = ""
    client_cert: str = ""
    client_key: str = ""
    lease_ttl_s: int = LEASE_TTL_S
    startup_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        if not self.addresses:
            raise ConfigError("ETCD_ENDPOINTS: must contain at least one member")
        if bool(self.username) != bool(self.password):
            raise ConfigError("ETCD_AUTH_USERNAME and ETCD_AUTH_PASSWORD: must be set together")
        if bool(self.client_cert) != bool(self.client_key):
            raise ConfigError("ETCD_AUTH_CLIENT_CERT and ETCD_AUTH_CLIENT_KEY: must be set together")
        if self.lease_ttl_s < 1:
            raise ConfigError(f"ETCD_LEASE_TTL={self.lease_ttl_s}: must be 1 second or more")
        if self.startup_timeout_s <= 0:
            raise ConfigError(
                f"ETCD_STARTUP_CONNECT_TIMEOUT_SECONDS={self.startup_timeout_s:g}: must be greater than 0"
            )

    def tls(self) -> ssl.SSLContext | None:
        """Return the context of encrypted connections, None if no member uses TLS. Raise `ConfigError`."""
        if not any(address.is_tls for address in self.addresses):
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca or None)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"ETCD_AUTH_CA={self.ca!r}: {error.strerror or error}") from None
        if self.client_cert:
            try:
                context.load_cert_chain(self.client_cert, self.client_key)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(
                    f"ETCD_AUTH_CLIENT_CERT={self.client_cert!r}, ETCD_AUTH_CLIENT_KEY={self.client_key!r}: "
                    f"{error.strerror or error}"
                ) from None
        return context


def etcd_options(variables: Mapping[str, str] | None = None) -> EtcdOptions:
    """Return the etcd options of this process. Raise `ConfigError`."""
    endpoints = setting("ETCD_ENDPOINTS", DEFAULT_ENDPOINTS, str, variables)
    return EtcdOptions(
        addresses=tuple(Address.parse(part.strip()) for part in endpoints.split(",") if part.strip()),
        username=setting("ETCD_AUTH_USERNAME", "", str, variables),
        password=setting("ETCD_AUTH_PASSWORD", "", str, variables),
        ca=setting("ETCD_AUTH_CA", "", str, variables),
        client_cert=setting("ETCD_AUTH_CLIENT_CERT", "", str, variables),
        client_key=setting("ETCD_AUTH_CLIENT_KEY", "", str, variables),
        lease_ttl_s=setting("ETCD_LEASE_TTL", LEASE_TTL_S, int, variables),
        startup_timeout_s=setting("ETCD_STARTUP_CONNECT_TIMEOUT_SECONDS", 120.0, float, variables),
    )
