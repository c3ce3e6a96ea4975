"""The endpoint picker as a component of a graph in a cluster: pods with frontend sidecars, its account's rights, a gateway."""

import contextlib
import json
import signal
from pathlib import Path

import grpc
import httpx
import pytest
import yaml
from tests.cluster.gateway import CHAT_PATH, DESTINATION, GatewayStream, refusal
from tests.cluster.kubernetes.installed import GRAPHS, installed

from dynamo.runtime.discovery.pod_identity import id_of_name

pytestmark = [pytest.mark.integration, pytest.mark.kserve]

WORKER = "x-dynamo-worker-instance-id"
EXAMPLE = Path(__file__).parents[3] / "examples" / "backends" / "mocker" / "deploy" / "gaie" / "agg.yaml"
CHAT = {"model": "Qwen/Qwen3-0.6B", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


def test_gateway_request_reaches_the_picked_pod(tmp_path: Path) -> None:
    with installed(tmp_path) as cluster, contextlib.ExitStack() as opened:
        graph = yaml.safe_load(EXAMPLE.read_text())
        graph["metadata"]["name"] = "chat"
        (container,) = graph["spec"]["components"][0]["podTemplate"]["spec"]["containers"]
        container["env"].append({"name": "DYN_SECURE_SERVING", "value": "false"})
        made = cluster.http.post(GRAPHS, json=graph)
        assert made.status_code == 201, made.text
        cluster.wait_until(lambda: len(cluster.kubelet.pods("chat-decode")) == 2, "the workers are not ready")
        cluster.wait_until(lambda: cluster.kubelet.pods("chat-epp"), "the picker is not ready")
        (epp,) = cluster.kubelet.pods("chat-epp")
        pods = {str(id_of_name(one.pod["metadata"]["name"])): one for one in cluster.kubelet.pods("chat-decode")}
        channel = opened.enter_context(grpc.insecure_channel(f"{epp.ip}:9002"))

        def picked() -> dict[str, str] | None:
            with GatewayStream(channel) as stream:
                stream.request_headers()
                stream.request_body(json.dumps(CHAT).encode())
                answer = stream.receive()
                if answer.WhichOneof("response") == "immediate_response":
                    refusal(answer)
                    return None
                mutation = answer.request_headers.response.header_mutation
                return {one.header.key: one.header.raw_value.decode() for one in mutation.set_headers}

        cluster.wait_until(
            lambda: {(picked() or {}).get(WORKER) for _ in range(8)} == set(pods), "both pods are picked"
        )
        headers = picked()
        assert headers is not None
        assert headers[DESTINATION] == f"{pods[headers[WORKER]].ip}:8000"
        answer = httpx.post(f"http://{headers[DESTINATION]}{CHAT_PATH}", json=CHAT, headers=headers, timeout=30)
        assert answer.status_code == 200, answer.text
        assert cluster.server.server.authorizer.refused == []

        for process in pods[headers[WORKER]].processes:
            process.send_signal(signal.SIGKILL)
        others = set(pods) - {headers[WORKER]}
        cluster.wait_until(lambda: {(picked() or {}).get(WORKER) for _ in range(8)} == others, "a dead pod is picked")
