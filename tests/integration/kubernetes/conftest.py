"""API servers for tests: the one of this repository, and a released one where KUBEBUILDER_ASSETS names its folder."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.cluster.kubernetes.released import ReleasedKubernetes, released_assets
from tests.cluster.kubernetes.running import KubernetesServer
from tests.cluster.kubernetes.servers import AnyKubernetes, administrator

SERVERS = ("own", "released") if released_assets() else ("own",)


@pytest.fixture(scope="session")
def released_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReleasedKubernetes]:
    """Return a released API server with its controllers, for all tests; each empties it."""
    assets = released_assets()
    assert assets is not None
    with ReleasedKubernetes(tmp_path_factory.mktemp("released"), assets, controllers=True) as server:
        yield server


@pytest.fixture
def own_kubernetes(tmp_path: Path) -> Iterator[KubernetesServer]:
    """Return the API server of this repository, with controllers, empty: the one into which faults are injected."""
    with KubernetesServer(tmp_path / "kubernetes") as server:
        yield server


@pytest.fixture(params=SERVERS)
def kubernetes_api(request: pytest.FixtureRequest) -> Iterator[AnyKubernetes]:
    """Return each API server, with controllers, empty."""
    if request.param == "own":
        yield request.getfixturevalue("own_kubernetes")
        return
    server: ReleasedKubernetes = request.getfixturevalue("released_server")
    yield server
    server.reset()


@pytest.fixture(scope="module", params=SERVERS)
def api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Return an administrator of each API server, with the objects of the tests of a module."""
    if request.param == "own":
        with KubernetesServer(tmp_path_factory.mktemp("kubernetes")) as own, administrator(own) as client:
            yield _named(client)
        return
    server: ReleasedKubernetes = request.getfixturevalue("released_server")
    with administrator(server) as client:
        yield _named(client)
    server.reset()


def _named(client: httpx.Client) -> httpx.Client:
    client.headers["User-Agent"] = "contract/1"
    return client
