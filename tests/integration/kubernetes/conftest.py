"""API servers for tests: the one of this repository, and a released one where KUBEBUILDER_ASSETS names its folder."""

import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.cluster.kubernetes.released import ASSETS, ReleasedKubernetes, released_assets
from tests.cluster.kubernetes.running import KubernetesServer


@pytest.fixture
def kubernetes_api(tmp_path: Path) -> Iterator[KubernetesServer]:
    """Return the API server of this repository, with controllers, empty."""
    with KubernetesServer(tmp_path / "kubernetes") as server:
        yield server


@pytest.fixture(scope="module", params=["own", "released"])
def api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Return a client of each API server; the released one is skipped where it is absent."""
    folder = tmp_path_factory.mktemp("kubernetes")
    assets = released_assets()
    if request.param == "released" and assets is None:
        pytest.skip(f"{ASSETS} does not name a folder with kube-apiserver and etcd")
    made = (
        ReleasedKubernetes(folder, assets, controllers=True)
        if request.param == "released" and assets
        else KubernetesServer(folder)
    )
    with made as server:
        verify = ssl.create_default_context(cadata=server.ca.decode()) if server.ca else True
        headers = {"Authorization": f"Bearer {server.token}", "User-Agent": "contract/1"}
        with httpx.Client(base_url=server.url, headers=headers, verify=verify, timeout=30) as client:
            yield client
