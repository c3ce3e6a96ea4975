"""Upstream's files, summary and exit status of a collection, and the pages of the skill."""

import json
from pathlib import Path

import pytest

from dynamo.core.errors import ConfigError
from dynamo.ops.troubleshoot.case import case_of
from dynamo.ops.troubleshoot.command import SIGNATURES
from dynamo.ops.troubleshoot.evidence import EvidenceConfig, collect_evidence, evidence_files, outcomes_of, summary
from dynamo.ops.troubleshoot.signature import signature_table

SKILL = Path(__file__).parents[4] / ".agents" / "skills" / "dynamo-troubleshoot"
POD = {
    "kind": "Pod",
    "metadata": {"name": "g-w"},
    "spec": {"nodeName": "n1"},
    "status": {"phase": "Running", "containerStatuses": [{"name": "main", "ready": False, "restartCount": 3}]},
}
EVENT = {"reason": "BackOff", "message": "x", "type": "Warning", "involvedObject": {"kind": "Pod", "name": "g-w"}}
FILES = {
    "graphs.json": json.dumps([{"metadata": {"name": "g"}, "status": {"conditions": [{"type": "Ready"}]}}]),
    "pods.json": json.dumps([POD]),
    "events.json": json.dumps([EVENT]),
    "pods/g-w/main.log": "RuntimeError: No CUDA GPUs are available\n",
    "pods/g-w/main-previous.log": "before",
    "pods/dynamo-operator-1/manager.log": "reconciled",
}


def test_evidence_files_have_upstream_names_and_contents() -> None:
    found = evidence_files(FILES, "dgd", "g")
    assert set(found) == {
        "g.yaml",
        "conditions.txt",
        "pods.txt",
        "events.txt",
        "describe-g-w.txt",
        "logs-g-w.txt",
        "logs-g-w-previous.txt",
        "operator.log",
    }
    assert found["pods.txt"] == "g-w  0/1  Running  3  n1\n"
    assert json.loads(found["conditions.txt"]) == [{"type": "Ready"}]
    assert found["logs-g-w.txt"] == "===== main =====\nRuntimeError: No CUDA GPUs are available\n"
    assert "pod/g-w" in case_of(found).logs


def test_missing_resource_fails_and_missing_parts_are_warnings() -> None:
    good = outcomes_of(FILES, evidence_files(FILES, "dgd", "g"), "dgd", "g", [])
    assert {result for result, _, _ in good} == {"PASS"}
    bad = outcomes_of({}, evidence_files({}, "dgdr", "x"), "dgdr", "x", ["events: forbidden"])
    assert bad[0] == ("FAIL", "resource", "dgdr/x not found")
    assert [result for result, _, _ in bad[1:]] == ["WARN"] * 5


def test_summary_equals_the_upstream_footer() -> None:
    lines = summary([("PASS", "pods", "1 pods"), ("FAIL", "resource", "dgd/g not found")], "out").splitlines()
    assert lines[:3] == ["===== Collection Summary =====", "PASS|pods|1 pods", "FAIL|resource|dgd/g not found"]
    assert lines[-3:-1] == ["Output: out", "Passed: 1  Failed: 1  Warned: 0"]
    assert "references/symptom-signatures.md" in lines[-1]


@pytest.mark.parametrize("argv", [[], ["-k", "dgd"], ["-k", "pod", "-r", "x", "-o", "y"], ["-k", "dgd", "-r", "g"]])
def test_invalid_options_are_usage_errors(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"-k|-r|-o|kind"):
        collect_evidence(argv)
    assert EvidenceConfig(kind="dgd", resource="g", output="o").namespace == "default"


def test_page_of_the_skill_lists_every_signature_with_its_cause_and_next_command() -> None:
    page = (SKILL / "references" / "symptom-signatures.md").read_text()
    assert page == f"# Signatures of `dynamo troubleshoot`\n\n{signature_table(SIGNATURES)}"


def test_script_of_the_skill_runs_this_module() -> None:
    script = SKILL / "scripts" / "collect-evidence.sh"
    assert "-m dynamo.ops.troubleshoot.evidence" in script.read_text()
    assert script.stat().st_mode & 0o111
    assert (SKILL / "SKILL.md").read_text().startswith("---\nname: dynamo-troubleshoot\n")
