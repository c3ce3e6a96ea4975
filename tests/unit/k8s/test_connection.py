"""Proxy of an API server: from the kubeconfig, the environment, or none."""

import pytest

from dynamo.core.errors import ConfigError
from dynamo.k8s.connection import proxy_of
from dynamo.k8s.kubeconfig import ClusterAccess, ClusterEntry, UserEntry


def access(server: str = "https://10.1.2.3:6443", proxy_url: str | None = None) -> ClusterAccess:
    return ClusterAccess(cluster=ClusterEntry(server=server, proxy_url=proxy_url), user=UserEntry())


@pytest.mark.parametrize(
    ("server", "no_proxy", "expected"),
    [
        ("https://10.1.2.3:6443", "", ("proxy", 3128)),
        ("https://10.1.2.3:6443", "example.com, 10.0.0.0/8", None),
        ("https://api.example.com", ".example.com", None),
        ("https://api.example.org", "example.com", ("proxy", 3128)),
        ("https://127.0.0.1:6443", "", None),
        ("http://10.1.2.3", "", None),
    ],
)
def test_proxy_of_the_environment(
    server: str, no_proxy: str, expected: tuple[str, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", no_proxy)
    assert proxy_of(access(server)) == expected


def test_proxy_of_the_kubeconfig_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    assert proxy_of(access(proxy_url="http://other:8080")) == ("other", 8080)
    with pytest.raises(ConfigError, match="proxy-url 'socks5://other'"):
        proxy_of(access(proxy_url="socks5://other"))
