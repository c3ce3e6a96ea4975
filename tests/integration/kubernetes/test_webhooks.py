"""The operator's webhooks, called by an API server over TLS."""

import asyncio
import copy
import socket
from collections.abc import Callable, Coroutine
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from tests.cluster.kubernetes.running import KubernetesServer
from tests.cluster.kubernetes.servers import CRDS, AnyKubernetes, install_definitions

from dynamo.core.metrics import MetricsRegistry
from dynamo.k8s.client import KubeClient
from dynamo.k8s.kinds import SECRETS
from dynamo.operator.certificates import SERVER_DAYS
from dynamo.operator.validation.graph import ORIGIN_VERSION
from dynamo.operator.webhooks import CERTIFICATES, WebhookServer, WebhookSettings
from dynamo.protocols.kubernetes.crds import CONVERSION_NAMESPACE, CONVERSION_SERVICE

pytestmark = pytest.mark.integration

Object = dict[str, Any]
METRICS = MetricsRegistry()
Case = Callable[[httpx.AsyncClient, WebhookServer, KubeClient], Coroutine[Any, Any, None]]
ALPHA, BETA = (
    f"/apis/nvidia.com/{version}/namespaces/default/dynamographdeployments" for version in ("v1alpha1", "v1beta1")
)
REQUESTS = "/apis/nvidia.com/{}/namespaces/default/dynamographdeploymentrequests"
NAMESPACES = "/api/v1/namespaces"
MERGE = {"content-type": "application/merge-patch+json"}


def graph(replicas: int = 1) -> Object:
    service = {"componentType": "frontend", "replicas": replicas, "ingress": {"enabled": True, "host": "h"}}
    return {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": "g"},
        "spec": {"services": {"Frontend": service}},
    }


async def is_checked(api: httpx.AsyncClient) -> bool:
    """Return whether the API server uses the webhooks, which it reads some time after they were configured."""
    probe = {**graph(), "metadata": {"name": "probe"}}
    made = await api.post(f"{ALPHA}?dryRun=All", json=probe)
    return made.status_code == 201 and ORIGIN_VERSION in made.json()["metadata"].get("annotations", {})


@pytest.fixture
def with_webhooks(kubernetes_api: AnyKubernetes, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that runs a case against the API server with the webhooks installed."""
    monkeypatch.setenv("KUBECONFIG", str(kubernetes_api.kubeconfig))

    async def run(case: Case, settings: WebhookSettings) -> None:
        headers = {"Authorization": f"Bearer {kubernetes_api.token}"}
        install_definitions(kubernetes_api)
        client = KubeClient()
        async with httpx.AsyncClient(
            base_url=kubernetes_api.url, headers=headers, verify=kubernetes_api.verify, timeout=30
        ) as api:
            await api.post(NAMESPACES, json={"metadata": {"name": CONVERSION_NAMESPACE}})
            listener = socket.create_server(("127.0.0.1", 0))
            url = f"https://127.0.0.1:{listener.getsockname()[1]}"
            if isinstance(kubernetes_api, KubernetesServer):  # A released one reaches no service.
                addresses = kubernetes_api.server.webhooks.service_addresses
                addresses[f"{CONVERSION_NAMESPACE}/{CONVERSION_SERVICE}"] = url
            else:
                settings = replace(settings, url=url)
            server = WebhookServer(client, settings, METRICS)
            await server.start(listener)
            for _ in range(400):
                if settings.is_excluded("default") or await is_checked(api):  # Nothing is refused there.
                    break
                await asyncio.sleep(0.05)
            try:
                await case(api, server, client)
            finally:
                await server.close()
                await client.close()

    return lambda case, settings=None: asyncio.run(run(case, settings or WebhookSettings()))


def test_graph_is_defaulted_checked_and_converted(with_webhooks: Callable[..., None]) -> None:
    async def case(api: httpx.AsyncClient, server: WebhookServer, client: KubeClient) -> None:
        refused = await api.post(ALPHA, json=graph(-1))
        assert refused.status_code == 422
        bare = graph()
        bare["spec"]["services"] = {}
        denied = await api.post(ALPHA, json=bare)
        assert denied.status_code == 422
        assert denied.json()["details"]["causes"][0]["field"] == "spec.services"
        assert "spec.services: must have at least one component" in denied.json()["message"]
        made = (await api.post(ALPHA, json=graph())).json()
        assert ORIGIN_VERSION in made["metadata"]["annotations"]
        beta = (await api.get(f"{BETA}/g")).json()
        assert beta["spec"]["components"] == [{"name": "Frontend", "type": "frontend", "replicas": 1}]
        patch = {"spec": {"components": [{"name": "Frontend", "type": "frontend", "replicas": 3}]}}
        changed = await api.patch(f"{BETA}/g", headers=MERGE, json=patch)
        assert changed.status_code == 200
        alpha = (await api.get(f"{ALPHA}/g")).json()
        assert alpha["spec"] == graph(3)["spec"]
        other = {"spec": {"components": [{"name": "Other", "type": "frontend"}]}}
        immutable = await api.patch(f"{BETA}/g", headers=MERGE, json=other)
        assert "the set of components is immutable" in immutable.json()["message"]
        graphs, text = 'resource_type="DynamoGraphDeployment"', METRICS.render()
        denied_total = "dynamo_operator_webhook_denials_total"
        assert f'{denied_total}{{{graphs},operation="CREATE",reason="validation"}} ' in text
        assert f'dynamo_operator_webhook_requests_total{{{graphs},operation="UPDATE",result="allowed"}} ' in text

    with_webhooks(case)


def test_seed_era_request_is_served_in_both_versions(with_webhooks: Callable[..., None]) -> None:
    async def case(api: httpx.AsyncClient, server: WebhookServer, client: KubeClient) -> None:
        config = {"sla": {"isl": 3000, "osl": 150, "ttft": 200, "itl": 20}}
        value = {
            "apiVersion": "nvidia.com/v1alpha1", "kind": "DynamoGraphDeploymentRequest", "metadata": {"name": "r"},
            "spec": {"model": "m", "backend": "vllm", "profilingConfig": {"config": config}, "autoApply": True},
        }  # fmt: skip
        assert (await api.post(REQUESTS.format("v1alpha1"), json=value)).status_code == 201
        beta = (await api.get(REQUESTS.format("v1beta1") + "/r")).json()
        assert beta["spec"]["workload"] == {"isl": 3000, "osl": 150}
        assert beta["spec"]["sla"] == {"ttft": 200, "itl": 20}
        alpha = (await api.get(REQUESTS.format("v1alpha1") + "/r")).json()
        assert alpha["spec"]["profilingConfig"] == {"config": config}

    with_webhooks(case)


def test_certificates_rotate_while_objects_are_written(with_webhooks: Callable[..., None]) -> None:
    clock = [datetime.now(UTC) - timedelta(days=SERVER_DAYS * 0.8)]

    async def case(api: httpx.AsyncClient, server: WebhookServer, client: KubeClient) -> None:
        before = await client.get(SECRETS, CERTIFICATES, CONVERSION_NAMESPACE)
        assert before is not None
        clock[0] += timedelta(days=SERVER_DAYS * 0.8)
        await server.check()
        after = await client.get(SECRETS, CERTIFICATES, CONVERSION_NAMESPACE)
        assert after is not None
        assert after["data"]["tls.crt"] != before["data"]["tls.crt"]
        assert (await api.post(ALPHA, json=graph())).status_code == 201
        broken = copy.deepcopy(after["data"])
        broken["ca.key"] = ""
        await client.patch(SECRETS, CERTIFICATES, {"data": broken}, CONVERSION_NAMESPACE)
        await server.check()  # The damaged secret is replaced, with a new authority that is published.
        assert (await api.patch(f"{ALPHA}/g", headers=MERGE, json=graph(2))).status_code == 200

    with_webhooks(case, replace(WebhookSettings(), now=lambda: clock[0]))


def test_check_at_rest_writes_nothing(with_webhooks: Callable[..., None]) -> None:
    async def case(api: httpx.AsyncClient, server: WebhookServer, client: KubeClient) -> None:
        async def revision() -> str:
            listed = (await api.get(NAMESPACES)).json()
            found: str = listed["metadata"]["resourceVersion"]
            return found

        before = await revision()
        await server.check()
        assert await revision() == before
        url = f"https://127.0.0.1:{server.http.port}/convert"
        async with httpx.AsyncClient(verify=False) as plain:
            assert (await plain.post(url, content=b"{")).status_code == 400

    with_webhooks(case)


def test_objects_of_a_namespace_with_another_operator_are_accepted_as_they_are(
    with_webhooks: Callable[..., None],
) -> None:
    async def case(api: httpx.AsyncClient, server: WebhookServer, client: KubeClient) -> None:
        bare = graph()
        bare["spec"]["services"] = {}
        made = await api.post(ALPHA, json=bare)
        assert made.status_code == 201
        assert ORIGIN_VERSION not in (made.json()["metadata"].get("annotations") or {})

    with_webhooks(case, replace(WebhookSettings(), is_excluded=lambda namespace: namespace == "default"))


def test_an_operator_of_one_namespace_leaves_the_conversion_to_that_of_the_cluster(
    with_webhooks: Callable[..., None],
) -> None:
    async def case(api: httpx.AsyncClient, server: WebhookServer, client: KubeClient) -> None:
        path = f"{CRDS}/dynamographdeployments.nvidia.com"
        before = (await api.get(path)).json()["spec"]["conversion"]
        await api.post(NAMESPACES, json={"metadata": {"name": "team"}})
        restricted = WebhookServer(client, WebhookSettings(namespace="team", namespaces=("team",)), MetricsRegistry())
        await restricted.check()
        assert (await api.get(path)).json()["spec"]["conversion"] == before

    with_webhooks(case)
