"""`dynamo deploy` against an API server with the resource definitions of this repository."""

from pathlib import Path

import pytest
from tests.cluster.kubernetes.kubeconfig import write_kubeconfig
from tests.cluster.kubernetes.servers import AnyKubernetes, administrator, install_definitions

from dynamo.cli.deploy import deploy
from dynamo.core.errors import ConfigError

pytestmark = pytest.mark.integration

GRAPH = """\
apiVersion: nvidia.com/v1beta1
kind: DynamoGraphDeployment
metadata: {name: g}
spec: {components: [{name: Frontend, type: frontend, replicas: 1}]}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: c}
data: {a: b}
"""


@pytest.fixture
def graph_file(kubernetes_api: AnyKubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install the definitions and return a manifest."""
    install_definitions(kubernetes_api)
    monkeypatch.setenv("KUBECONFIG", str(kubernetes_api.kubeconfig))
    file = tmp_path / "g.yaml"
    file.write_text(GRAPH)
    return file


def test_graph_is_applied_compared_shown_and_deleted(
    graph_file: Path, kubernetes_api: AnyKubernetes, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(graph_file)
    assert deploy(["diff", file]) == 1
    assert "+kind: DynamoGraphDeployment" in capsys.readouterr().out
    assert deploy(["apply", file]) == 0
    assert capsys.readouterr().out.splitlines() == ["ConfigMap/c created", "DynamoGraphDeployment/g created"]
    assert deploy(["apply", file]) == 0
    assert "DynamoGraphDeployment/g unchanged" in capsys.readouterr().out
    assert deploy(["diff", file]) == 0
    graph_file.write_text(GRAPH.replace("replicas: 1", "replicas: 3"))
    capsys.readouterr()
    assert deploy(["diff", file]) == 1
    assert "+    replicas: 3" in capsys.readouterr().out
    assert deploy(["status", "g"]) == 1
    assert "Frontend   0/1" in capsys.readouterr().out
    assert deploy(["logs", "g"]) == 1
    assert deploy(["delete", file]) == 0
    with pytest.raises(ConfigError, match=r"g: no DynamoGraphDeployment or .* of this name in namespace default"):
        deploy(["status", "g"])
    assert deploy(["delete", "g"]) == 1


def test_objects_are_deleted_by_kind_and_name_and_absent_ones_are_named(
    graph_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "m.yaml"
    model.write_text(
        "apiVersion: nvidia.com/v1alpha1\nkind: DynamoModel\n"
        "metadata: {name: m}\nspec: {modelName: m, baseModelName: b, modelType: base}\n"
    )
    assert deploy(["apply", str(model)]) == 0
    assert deploy(["delete", "dm/m"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "DynamoModel/m deleted"
    assert deploy(["delete", "dm/m"]) == 1
    assert "error: m: no DynamoModel of this name in namespace default" in capsys.readouterr().err
    assert deploy(["delete", str(graph_file)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "DynamoGraphDeployment/g does not exist",
        "ConfigMap/c does not exist",
    ]


def test_refusal_of_a_difference_names_the_file(graph_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph_file.write_text(GRAPH.replace("name: g", "name: Wrong_1"))
    assert deploy(["diff", str(graph_file)]) == 1
    shown = capsys.readouterr()
    assert f"error: {graph_file}: DynamoGraphDeployment/Wrong_1: 422 Invalid" in shown.err
    assert "+kind: ConfigMap" in shown.out


def test_refused_credentials_and_a_wrong_namespace_are_one_line(
    graph_file: Path, kubernetes_api: AnyKubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"--namespace 'Bad NS': must have lower-case letters"):
        deploy(["status", "g", "--namespace", "Bad NS"])
    file = write_kubeconfig(tmp_path / "other", kubernetes_api.url, "wrong", kubernetes_api.ca)
    monkeypatch.setenv("KUBECONFIG", str(file))
    with pytest.raises(ConfigError, match=r"KUBECONFIG: https?://.* refuses its credentials \(401 Unauthorized"):
        deploy(["apply", str(graph_file)])


def test_status_of_a_request_shows_conditions_and_the_next_step(
    graph_file: Path, kubernetes_api: AnyKubernetes, capsys: pytest.CaptureFixture[str]
) -> None:
    graph_file.write_text(
        "apiVersion: nvidia.com/v1beta1\nkind: DynamoGraphDeploymentRequest\n"
        "metadata: {name: r}\nspec: {model: m, image: i}\n"
    )
    assert deploy(["apply", str(graph_file)]) == 0
    assert deploy(["status", "r"]) == 1
    assert "DynamoGraphDeploymentRequest/r: not reported\nnext: the operator" in capsys.readouterr().out
    validation = {
        "type": "Validation", "status": "False", "reason": "ValidationFailed", "message": "spec.hardware: unknown",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }  # fmt: skip
    path = "/apis/nvidia.com/v1beta1/namespaces/default/dynamographdeploymentrequests/r/status"
    headers = {"Content-Type": "application/merge-patch+json"}
    body = {"status": {"phase": "Failed", "conditions": [validation]}}
    with administrator(kubernetes_api) as api:
        assert api.patch(path, json=body, headers=headers).status_code == 200
    assert deploy(["status", "dgdr/r", "--watch"]) == 1
    shown = capsys.readouterr().out
    assert "Validation  False   ValidationFailed  2026-01-01T00:00:00Z  spec.hardware: unknown" in shown
    assert "next: correct the cause (spec.hardware: unknown), and create another request" in shown


def test_refused_manifest_is_not_sent(graph_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph_file.write_text(GRAPH.replace("replicas: 1", "replicas: -1"))
    assert deploy(["apply", str(graph_file)]) == 1
    assert "spec.components[0].replicas" in capsys.readouterr().err
    assert deploy(["delete", "g"]) == 1


def test_kind_that_is_not_installed_is_named(graph_file: Path) -> None:
    graph_file.write_text("apiVersion: example.com/v1\nkind: Box\nmetadata: {name: b}\n")
    with pytest.raises(ConfigError, match=r"Box/b: example\.com/v1 is not installed"):
        deploy(["apply", str(graph_file)])


def changed_config(server: AnyKubernetes, folder: Path, old: str, new: str) -> str:
    """Return a copy of the kubeconfig with a replaced text."""
    config = folder / "changed"
    config.write_text(server.kubeconfig.read_text().replace(old, new))
    return str(config)


def test_unreachable_server_is_one_line(
    graph_file: Path,
    kubernetes_api: AnyKubernetes,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    away = changed_config(kubernetes_api, graph_file.parent, kubernetes_api.url, "http://127.0.0.1:9")
    monkeypatch.setenv("KUBECONFIG", away)
    assert deploy(["diff", str(graph_file)]) == 1
    assert capsys.readouterr().err.startswith("error: Kubernetes API server http://127.0.0.1:9")


def test_kubeconfig_without_user_is_refused(
    graph_file: Path, kubernetes_api: AnyKubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", changed_config(kubernetes_api, graph_file.parent, "user: test", "user: other"))
    with pytest.raises(ConfigError, match="KUBECONFIG"):
        deploy(["status", "g"])


def test_graph_is_restarted_by_apply(graph_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert deploy(["apply", str(graph_file)]) == 0
    graph_file.write_text(GRAPH.replace("spec: {", "spec: {restart: {id: again}, "))
    assert deploy(["apply", str(graph_file)]) == 0
    assert "DynamoGraphDeployment/g configured" in capsys.readouterr().out


def test_empty_fields_of_a_manifest_are_left_out(graph_file: Path) -> None:
    graph_file.write_text(GRAPH.replace("replicas: 1", "replicas: 1, multinode: , podTemplate: {spec: {containers: }}"))
    assert deploy(["apply", str(graph_file)]) == 0
    assert deploy(["diff", str(graph_file)]) == 0
