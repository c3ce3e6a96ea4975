"""Each signature of a graph finds its failure in the files of a collection."""

import json
from typing import Any

import pytest

from dynamo.ops.troubleshoot.case import case_of
from dynamo.ops.troubleshoot.graph_signatures import GRAPH_SIGNATURES
from dynamo.ops.troubleshoot.signature import matches

GRAPH, TYPE = "nvidia.com/dynamo-graph-deployment-name", "nvidia.com/dynamo-component-type"


def pod(
    name: str, image: str = "nvcr.io/dynamo:1.6.1", labels: dict[str, str] | None = None, **env: str
) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {GRAPH: "g", **(labels or {})}},
        "spec": {
            "containers": [{"name": "main", "image": image, "env": [{"name": k, "value": v} for k, v in env.items()]}]
        },
    }


def process(module: str, pid: int, version: str = "1.6.1", **variables: str) -> dict[str, Any]:
    return {"pid": pid, "module": module, "version": version, "variables": variables}


def graph(status: dict[str, Any], generation: int = 1) -> list[dict[str, Any]]:
    return [{"kind": "DynamoGraphDeployment", "metadata": {"name": "g", "generation": generation}, "status": status}]


def card(role: str, number: int) -> dict[str, Any]:
    value = {"type": "Model", "card_json": {"display_name": "m", "worker_type": role}}
    return {"key": f"v1/mdc/d/{role}/generate/{number}", "value": json.dumps(value)}


METRICS = """\
dynamo_component_router_requests_total{router_id="1"} 30
dynamo_component_router_kv_event_source_mismatch_workers{target_component="backend"} 2
"""
CASES: dict[str, dict[str, Any]] = {
    "webhook": {"events.json": [{"message": 'failed calling webhook "vdgd.nvidia.com": context deadline exceeded'}]},
    "operator-absent": {"graphs.json": graph({})},
    "request-failed": {
        "requests.json": [
            {
                "metadata": {"name": "r"},
                "status": {
                    "phase": "Failed",
                    "conditions": [{"type": "Profiling", "status": "False", "reason": "JobFailed"}],
                },
            }
        ]
    },
    "discovery-mismatch": {
        "processes.json": [process("dynamo.frontend", 1, DYN_FILE_KV="/a"), process("dynamo.cpu", 2, DYN_FILE_KV="/b")]
    },
    "plane-mismatch": {"pods.json": [pod("f", DYN_EVENT_PLANE="nats"), pod("w", DYN_EVENT_PLANE="zmq")]},
    "version-skew": {"pods.json": [pod("f"), pod("w", image="nvcr.io/dynamo:1.5.0")]},
    "missing-peer-role": {"discovery.json": [card("prefill", 1)]},
    "router-without-events": {"metrics.txt": METRICS},
    "doctor": {
        "report.json": {"rows": [{"check": "etcd", "status": "FAIL", "evidence": "down", "remedy": "start it"}]}
    },
    "failed-start": {"logs/failed-start/dynamo-serve.log": "dynamo serve x\nerror: model x: no such directory\n"},
    "frontend-unhealthy": {"health.json": {"status": "not_ready", "stage": "draining"}},
    "request-errors": {
        "metrics.txt": 'dynamo_frontend_requests_total{status="success"} 10\n'
        'dynamo_frontend_requests_total{status="error"} 20\n'
    },
    "no-models": {"health.json": {"status": "healthy", "instances": []}, "models.json": {"data": []}},
    "job-waits": {
        "jobs.json": [{"metadata": {"name": "perf"}, "status": {"active": 1}}],
        "pods/perf-x1/main.log": "Waiting for http://frontend:8000/v1/models",
    },
    "no-endpoints": {
        "slices.json": [
            {"metadata": {"name": "s"}, "endpoints": [{"addresses": ["10.0.0.1"], "conditions": {"ready": False}}]}
        ]
    },
    "graph-not-ready": {
        "graphs.json": graph({"conditions": [{"type": "Ready", "status": "False", "reason": "PodsNotReady"}]})
    },
}


def found(files: dict[str, Any]) -> list[str]:
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in files.items()}
    return [match.signature.name for match in matches(case_of(texts), GRAPH_SIGNATURES)]


def test_each_signature_has_a_collection() -> None:
    assert sorted(CASES) == sorted(one.name for one in GRAPH_SIGNATURES)


@pytest.mark.parametrize("name", CASES)
def test_collection_is_recognised_and_has_no_other_failure(name: str) -> None:
    assert found(CASES[name]) == [name]


def test_healthy_collection_has_no_failure() -> None:
    files = {
        "pods.json": [pod("f", DYN_EVENT_PLANE="zmq"), pod("w", labels={TYPE: "worker"}, DYN_EVENT_PLANE="zmq")],
        "graphs.json": graph({"observedGeneration": 1, "conditions": [{"type": "Ready", "status": "True"}]}),
        "slices.json": [
            {"metadata": {"name": "s"}, "endpoints": [{"addresses": ["10.0.0.1"], "conditions": {"ready": True}}]}
        ],
        "health.json": {"status": "healthy", "instances": [{}]},
        "models.json": {"data": [{"id": "m"}]},
        "metrics.txt": METRICS.replace(" 2\n", " 0\n"),
        "discovery.json": [card("prefill", 1), card("decode", 2)],
        "report.json": {"rows": [{"check": "etcd", "status": "PASS"}]},
    }
    assert found(files) == []


def test_two_local_graphs_are_no_mismatch() -> None:
    own = [
        process(module, pid, DYN_FILE_KV=f"/{pid // 2}")
        for pid, module in enumerate(["dynamo.frontend", "dynamo.cpu"] * 2)
    ]
    assert found({"processes.json": own}) == []


def test_local_processes_of_two_releases_in_one_registry_are_skewed() -> None:
    assert found({"processes.json": [process("dynamo.frontend", 1), process("dynamo.cpu", 2, "1.5.0")]}) == [
        "version-skew"
    ]


def test_pods_of_one_phase_lack_the_other() -> None:
    prefill = pod("p", labels={TYPE: "prefill"})
    assert found({"pods.json": [prefill]}) == ["missing-peer-role"]
    assert found({"pods.json": [prefill, pod("d", labels={TYPE: "decode"})]}) == []
    assert found({"pods.json": [prefill, pod("w", labels={TYPE: "worker"})]}) == []


def test_status_of_an_old_generation_is_an_absent_operator() -> None:
    assert found({"graphs.json": graph({"observedGeneration": 1}, generation=2)}) == ["operator-absent"]


def test_event_channels_of_two_kinds_are_a_mismatch() -> None:
    channels = [
        {"key": f"v1/event_channels/{kind}", "value": json.dumps({"transport": {"kind": kind}})}
        for kind in ("Zmq", "Nats")
    ]
    assert found({"discovery.json": channels}) == ["plane-mismatch"]


def test_router_that_applied_no_event_is_reported_after_enough_requests() -> None:
    text = (
        'dynamo_component_router_requests_total{router_id="1"} 30\ndynamo_component_kv_cache_events_applied{x="y"} 0\n'
    )
    assert found({"metrics.txt": text}) == ["router-without-events"]
    assert found({"metrics.txt": text.replace("30", "3")}) == []


def test_planes_set_by_flags_are_compared() -> None:
    front, work = pod("f"), pod("w")
    front["spec"]["containers"][0]["args"] = ["--event-plane", "zmq"]
    work["spec"]["containers"][0]["args"] = ["--event-plane=nats"]
    assert found({"pods.json": [front, work]}) == ["plane-mismatch"]


def test_members_of_etcd_in_another_order_are_no_mismatch() -> None:
    pods = [pod("f", ETCD_ENDPOINTS="http://a:1,http://b:1"), pod("w", ETCD_ENDPOINTS="http://b:1,http://a:1")]
    assert found({"pods.json": pods}) == []
