"""Each signature of local processes finds its failure in the files of a collection, and nothing in those of a healthy graph."""

import json
from typing import Any

import pytest

from dynamo.ops.troubleshoot.case import case_of
from dynamo.ops.troubleshoot.local_signatures import LOCAL_SIGNATURES
from dynamo.ops.troubleshoot.signature import matches


def process(module: str, state: str = "S", **variables: str) -> dict[str, Any]:
    return {"pid": 7, "module": module, "state": state, "variables": variables}


RECORD = {"key": "v1/mdc/dev/backend/generate/1", "value": "{}"}
NO_MODEL: dict[str, Any] = {"data": []}
CASES: dict[str, dict[str, Any]] = {
    "stopped-process": {"processes.json": [process("dynamo.mocker", "T")]},
    "namespace-mismatch": {
        "processes.json": [process("dynamo.frontend", DYN_NAMESPACE="prod")],
        "discovery.json": [RECORD],
        "models.json": NO_MODEL,
    },
    "worker-lost": {"expired.json": [{"key": RECORD["key"], "seconds": 30.0}]},
    "requests-refused": {"metrics.txt": 'dynamo_frontend_model_rejection_total{model="m"} 3\n'},
}
HEALTHY = {
    "processes.json": [process("dynamo.frontend", DYN_NAMESPACE="dev"), process("dynamo.mocker", "R")],
    "discovery.json": [RECORD],
    "expired.json": [{"key": "v1/metrics_sources/frontend/1", "seconds": 30.0}],
    "models.json": {"data": [{"id": "m"}]},
    "metrics.txt": 'dynamo_frontend_model_rejection_total{model="m"} 0\n',
}


def names(files: dict[str, Any]) -> list[str]:
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in files.items()}
    return [match.signature.name for match in matches(case_of(texts), LOCAL_SIGNATURES)]


def test_every_signature_has_a_case() -> None:
    assert sorted(CASES) == sorted(one.name for one in LOCAL_SIGNATURES)


@pytest.mark.parametrize("name", CASES)
def test_signature_finds_its_failure_alone(name: str) -> None:
    assert names(CASES[name]) == [name]


def test_healthy_graph_has_none() -> None:
    assert names(HEALTHY) == []


def test_namespace_is_no_mismatch_while_models_are_listed_or_none_is_registered() -> None:
    files = CASES["namespace-mismatch"]
    assert names({**files, "models.json": {"data": [{"id": "m"}]}}) == []
    assert names({**files, "discovery.json": []}) == []
