"""Serving from a file: selection of the graph, and the frontend's settings."""

from pathlib import Path

import pytest
import yaml

from dynamo.cli.manifests import read_manifests
from dynamo.cli.serve_file import ServeFileConfig, frontend_of, graph_of, names_file, serve_file, translated
from dynamo.core.errors import ConfigError

COMPONENTS = [
    {
        "name": name,
        "type": kind,
        "podTemplate": {"spec": {"containers": [{"name": "main", "image": "x", "command": ["python3", "-m", module]}]}},
    }
    for name, kind, module in (("Frontend", "frontend", "dynamo.frontend"), ("Worker", "worker", "dynamo.cpu"))
]


def written(folder: Path, *documents: object) -> str:
    path = folder / "my_graph.yaml"
    path.write_text(yaml.safe_dump_all(documents))
    return str(path)


def deployment(name: str) -> dict[str, object]:
    return {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": name},
        "spec": {"components": COMPONENTS},
    }


def test_file_is_named_before_the_arguments_of_an_engine() -> None:
    assert names_file(["-f", "x"])
    assert names_file(["--file=x"])
    assert not names_file(["--engine", "vllm", "--", "-f", "x"])


def test_file_with_only_components_is_a_graph_named_after_the_file(tmp_path: Path) -> None:
    value = graph_of(read_manifests([written(tmp_path, {"components": COMPONENTS})]), None)
    assert value["metadata"]["name"] == "my-graph"
    assert [one["replicas"] for one in value["spec"]["components"]] == [1, 1]


def test_graph_of_several_is_selected_by_name(tmp_path: Path) -> None:
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "c"}}
    manifests = read_manifests([written(tmp_path, claim, deployment("a"), deployment("b"))])
    assert graph_of(manifests, "b")["metadata"]["name"] == "b"
    with pytest.raises(ConfigError, match="expected one DynamoGraphDeployment; found: a, b; select one with --graph"):
        graph_of(manifests, None)


def test_refused_graph_is_an_error_with_the_rule(tmp_path: Path) -> None:
    wrong = deployment("a")
    wrong["spec"] = {"components": [*COMPONENTS, COMPONENTS[0]]}
    with pytest.raises(ConfigError, match="components"):
        graph_of(read_manifests([written(tmp_path, wrong)]), None)


def test_alpha_version_is_converted(tmp_path: Path) -> None:
    main = {"image": "x", "command": ["python3", "-m", "dynamo.cpu"]}
    services = {
        "Frontend": {"componentType": "frontend", "extraPodSpec": {"mainContainer": {"image": "x"}}},
        "Worker": {"componentType": "worker", "replicas": 2, "extraPodSpec": {"mainContainer": main}},
    }
    value = {**deployment("a"), "apiVersion": "nvidia.com/v1alpha1", "spec": {"services": services}}
    graph = translated(graph_of(read_manifests([written(tmp_path, value)]), None), {}, "/kv", ServeFileConfig())
    assert [one.name for one in graph.processes] == ["worker-1", "worker-2", "frontend"]


def test_address_flags_override_those_of_the_file(tmp_path: Path) -> None:
    value = graph_of(read_manifests([written(tmp_path, deployment("a"))]), None)
    graph = translated(value, {}, "/kv", ServeFileConfig())
    frontend, _, key = frontend_of(graph, ServeFileConfig(http_port=0), {"DYN_HTTP_PORT": "9000"})
    assert (frontend.http_host, frontend.http_port, key) == ("127.0.0.1", 0, None)
    frontend, variables, key = frontend_of(
        graph, ServeFileConfig(), {"DYN_HTTP_PORT": "9000", "DYN_API_KEYS": "key-of-tests"}
    )
    assert frontend.http_port == 9000
    assert key is not None
    assert key in variables["DYN_API_KEYS"]


def test_dry_run_as_json_has_each_process_and_no_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, deployment("a"))
    assert serve_file(["-f", path, "--dry-run", "--json"], {"DYN_API_KEYS": "secret-key"}, 0.0) == 0
    found = capsys.readouterr().out
    assert '"name": "worker-1"' in found
    assert "secret-key" not in found
    with pytest.raises(ConfigError, match="--json: requires --dry-run"):
        serve_file(["-f", path, "--json"], {}, 0.0)
