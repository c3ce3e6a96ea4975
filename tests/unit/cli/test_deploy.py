"""`dynamo deploy` without a cluster: validation, and refusals of options."""

from pathlib import Path

import pytest
import yaml

from dynamo.cli.deploy import VERBS, deploy
from dynamo.core.errors import ConfigError

GOOD = """\
apiVersion: nvidia.com/v1alpha1
kind: DynamoGraphDeployment
metadata: {name: g}
spec: {services: {Frontend: {componentType: frontend, replicas: 1}}}
---
apiVersion: v1
kind: Secret
metadata: {name: s}
"""


def test_validate_accepts_a_graph_and_skips_other_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "g.yaml"
    file.write_text(GOOD)
    assert deploy(["validate", str(file)]) == 0
    assert capsys.readouterr().out == "1 checked, 0 problems; 1 of other groups not checked\n"


def test_validate_prints_field_path_and_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "g.yaml"
    file.write_text(GOOD.replace("replicas: 1", "replicas: -1"))
    assert deploy(["validate", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert f"error: {file}: DynamoGraphDeployment/g: spec.services.Frontend.replicas: -1 must be at least 0" in error


def test_validate_reports_every_file_of_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "good.yaml").write_text(GOOD)
    (tmp_path / "damaged.yaml").write_text("a: [")
    (tmp_path / "wrong.yaml").write_text(GOOD.replace("replicas: 1", "replicas: -1"))
    (tmp_path / "Chart.yaml").write_text("apiVersion: v2\nname: chart\n")
    assert deploy(["validate", str(tmp_path), "missing.yaml"]) == 1
    printed = capsys.readouterr()
    assert printed.out == "2 checked, 3 problems; 2 of other groups not checked; 1 files skipped\n"
    assert f"skipped: {tmp_path}/Chart.yaml: no apiVersion and kind\n" in printed.err
    for problem in (
        f"{tmp_path}/damaged.yaml: line",
        "missing.yaml: cannot be read",
        "-1 must be at least 0",
    ):
        assert problem in printed.err


def test_validate_applies_the_rules_of_grove_on_request(tmp_path: Path) -> None:
    file = tmp_path / "g.yaml"
    file.write_text(GOOD.replace("spec: {", "spec: {priorityClassName: high, "))
    assert [deploy(["validate", str(file), "--grove", mode]) for mode in ("auto", "yes", "no")] == [0, 0, 1]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["aply"], "unknown command dynamo deploy aply"),
        (["validate"], "FILE: expected at least one manifest"),
        (["render", "missing.yaml"], "missing.yaml: cannot be read"),
        (["validate", "a.yaml", "--grove", "maybe"], "--grove maybe: must be auto, yes, no"),
        (["status"], "NAME: expected the name"),
        (["logs", "g", "--tail", "0"], "--tail 0: must be at least 1"),
    ],
)
def test_invalid_usage_is_one_error_line(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        deploy(argv)


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert deploy([]) == 0
    page = capsys.readouterr().out
    assert all(f"dynamo deploy {verb} " in page for verb in VERBS)


def test_restart_in_a_file_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "g.yaml"
    file.write_text(GOOD.replace("spec: {", "spec: {restart: {id: a}, "))
    assert deploy(["validate", str(file)]) == 0
    assert "spec.restart.id: must be absent at creation" in capsys.readouterr().err


def test_render_prints_the_objects_of_a_graph_and_others_unchanged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "g.yaml"
    file.write_text(GOOD)
    assert deploy(["render", str(file), "--namespace", "space"]) == 0
    found = list(yaml.safe_load_all(capsys.readouterr().out))
    kinds = ["ServiceAccount", "Role", "RoleBinding", "DynamoComponentDeployment", "Deployment", "Service", "Secret"]
    assert [one["kind"] for one in found] == kinds
    assert found[4]["metadata"]["name"] == "g-frontend"
    assert {one["metadata"].get("namespace") for one in found[:-1]} == {"space"}


def test_render_names_an_unsupported_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "g.yaml"
    services = "{Decode: {componentType: worker, multinode: {nodeCount: 2}}}"
    file.write_text(GOOD.replace("{Frontend: {componentType: frontend, replicas: 1}}", services))
    assert deploy(["render", str(file)]) == 1
    captured = capsys.readouterr()
    assert (captured.out, "podTemplate.spec.containers[main].command" in captured.err) == ("", True)


def test_render_for_a_cluster_with_grove(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "g.yaml"
    worker = {"name": "decode", "type": "decode", "replicas": 1, "multinode": {"nodeCount": 2}}
    components = [{"name": "Frontend", "type": "frontend", "replicas": 1}, worker]
    value = {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": "g"},
        "spec": {"backendFramework": "sglang", "components": components},
    }
    file.write_text(yaml.safe_dump(value))
    assert deploy(["render", str(file), "--grove", "--gang-scheduler", "kai"]) == 0
    text = capsys.readouterr().out
    assert "&id" not in text  # No references within a document.
    [made] = [one for one in yaml.safe_load_all(text) if one["kind"] == "PodCliqueSet"]
    cliques = made["spec"]["template"]["cliques"]
    assert [one["name"] for one in cliques] == ["frontend", "decode-ldr", "decode-wkr"]
    assert {one["spec"]["podSpec"]["schedulerName"] for one in cliques} == {"kai-scheduler"}


def test_render_warns_about_fields_without_effect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "g.yaml"
    ingress = {"enabled": True, "host": "g.example.com", "useVirtualService": True}
    value = {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": "g"},
        "spec": {"services": {"F": {"componentType": "frontend", "ingress": ingress}}},
    }
    file.write_text(yaml.safe_dump(value))
    assert deploy(["render", str(file)]) == 0
    path = "spec.services.F.ingress.virtualServiceGateway: is required with useVirtualService"
    assert f"warning: {file}: DynamoGraphDeployment/g: {path}" in capsys.readouterr().err
