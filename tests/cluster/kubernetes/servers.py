"""Operations that tests use with both API servers."""

from pathlib import Path

import httpx
from tests.cluster.kubernetes.errors import Object
from tests.cluster.kubernetes.kubeconfig import write_kubeconfig
from tests.cluster.kubernetes.released import ReleasedKubernetes
from tests.cluster.kubernetes.running import KubernetesServer
from tests.cluster.processes import wait_until

from dynamo.protocols.kubernetes.crds import manifests

AnyKubernetes = KubernetesServer | ReleasedKubernetes
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


def administrator(server: AnyKubernetes) -> httpx.Client:
    """Return a client with all rights."""
    headers = {"Authorization": f"Bearer {server.token}"}
    return httpx.Client(base_url=server.url, headers=headers, verify=server.verify, timeout=30)


def install_definitions(server: AnyKubernetes, *more: Object, has_conversion: bool = False) -> None:
    """Create the resource definitions, by default without their conversion webhook, and wait until they are served."""
    with administrator(server) as api:
        made = [*(crd for _, crd in manifests(has_conversion=has_conversion)), *more]
        for crd in made:
            response = api.post(CRDS, json=crd)
            assert response.status_code == 201, response.text
        for crd in made:
            wait_until(lambda: _is_served(api, crd), f"{crd['metadata']['name']} is not served")  # noqa: B023


def _is_served(api: httpx.Client, crd: Object) -> bool:
    spec = crd["spec"]
    paths = [f"/apis/{spec['group']}/{one['name']}/{spec['names']['plural']}" for one in spec["versions"]]
    return all(api.get(path).status_code == 200 for path in paths)


def account_kubeconfig(server: ReleasedKubernetes, folder: Path, namespace: str, account: str) -> Path:
    """Return a kubeconfig with a token of a service account, which has the rights of its roles only."""
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
    with administrator(server) as api:
        response = api.post(path, json={"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}})
        assert response.status_code == 201, response.text
    token = response.json()["status"]["token"]
    return write_kubeconfig(folder / f"{account}.kubeconfig", server.url, token, server.ca, namespace)
