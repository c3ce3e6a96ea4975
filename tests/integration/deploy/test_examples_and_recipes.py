"""Example graphs and recipes: generated files, admission rules, rendering, flags of the components, and layout."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from tools import deploy_examples
from tools.pages import ROOT

from dynamo.core.config import load
from dynamo.epp.config import EppOptions
from dynamo.frontend.config import FrontendConfig
from dynamo.mocker.config import MockerConfig
from dynamo.planner.config.planner_config import parse

pytestmark = pytest.mark.integration

BACKENDS = ROOT / "examples" / "backends"
EXAMPLES = sorted(BACKENDS.glob("*/deploy/*.yaml"))
GATEWAY_EXAMPLES = sorted(BACKENDS.glob("*/deploy/gaie/*agg.yaml"))
ROUTES = sorted(BACKENDS.glob("*/deploy/gaie/http-route.yaml"))
RECIPES = sorted((ROOT / "recipes").glob("*/*/*/deploy.yaml"))
Object = dict[str, Any]


def read(path: Path) -> list[Object]:
    return [one for one in yaml.safe_load_all(path.read_text()) if one]


def dynamo(*argv: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "dynamo.cli", "deploy", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_example_files_equal_the_generated_table() -> None:
    made = dict(deploy_examples.contents())
    assert [str(path) for path, text in made.items() if not path.exists() or path.read_text() != text] == []
    assert {*EXAMPLES, *GATEWAY_EXAMPLES, *ROUTES, *RECIPES} <= made.keys()


def test_examples_cover_five_graphs_of_four_engines_and_a_dozen_recipes() -> None:
    assert len(EXAMPLES) == 20
    assert {one.stem for one in EXAMPLES} == set(deploy_examples.MODES)
    assert (len(GATEWAY_EXAMPLES), len(ROUTES)) == (8, 4)
    assert len(RECIPES) >= 12
    assert len({(path.parts[-3], path.parts[-2]) for path in RECIPES}) >= 6


def test_example_manifests_pass_admission_and_render() -> None:
    paths = [str(path) for path in (*EXAMPLES, *GATEWAY_EXAMPLES, *RECIPES)]
    checked = dynamo("validate", *paths)
    assert checked.returncode == 0, checked.stderr
    assert f"{len(paths)} checked, 0 problems" in checked.stdout
    rendered = dynamo("render", *paths)
    assert rendered.returncode == 0, rendered.stderr
    objects = [one for one in yaml.safe_load_all(rendered.stdout) if one]
    workloads = [one for one in objects if one["kind"] in {"Deployment", "LeaderWorkerSet"}]
    assert len(workloads) >= 2 * len(paths)
    for one in objects:
        if one["kind"] in {"Deployment", "Service", "ServiceAccount", "Role", "RoleBinding"}:
            kubernetes_validate.validate(one, "1.34", strict=True)


@pytest.mark.parametrize("path", ROUTES, ids=lambda path: str(path.parts[-4]))
def test_route_of_a_gateway_refers_to_the_rendered_pool_and_port(path: Path) -> None:
    rendered = dynamo("render", str(path.with_name("agg.yaml")))
    objects = [one for one in yaml.safe_load_all(rendered.stdout) if one]
    (pool,) = (one for one in objects if one["kind"] == "InferencePool")
    (route,) = read(path)
    (reference,) = route["spec"]["rules"][0]["backendRefs"]
    assert reference["name"] == pool["metadata"]["name"]
    assert {"number": reference["port"]} in pool["spec"]["targetPorts"]
    selector = pool["spec"]["selector"]["matchLabels"]
    (pods,) = (
        one["spec"]["template"] for one in objects
        if one["kind"] == "Deployment" and selector.items() <= one["spec"]["template"]["metadata"]["labels"].items()
    )  # fmt: skip
    ports = [
        port["containerPort"]
        for one in pods["spec"]["containers"]
        for port in one.get("ports", ())
        if port["name"] == "http"
    ]
    assert ports == [reference["port"]]


@pytest.mark.parametrize(
    "path", [*EXAMPLES, *GATEWAY_EXAMPLES], ids=lambda path: "-".join((path.parts[-3], path.parts[-2], path.stem))
)
def test_components_accept_their_arguments(path: Path) -> None:
    (graph,) = read(path)
    for component in graph["spec"]["components"]:
        for container in component["podTemplate"]["spec"]["containers"]:
            args = container.get("args", [])
            match container["command"][-1]:
                case "dynamo.frontend":
                    load(FrontendConfig, args, {})
                case "dynamo.mocker":
                    load(MockerConfig, args, {})
                case "dynamo.epp":
                    load(EppOptions, args, {one["name"]: one["value"] for one in container["env"]})
                case "dynamo.planner":
                    config = parse(json.loads(args[args.index("--config") + 1]))
                    assert str(config.backend) == path.parts[-3]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: "-".join(path.parts[-4:-1]))
def test_recipe_has_its_volume_download_and_load_test(path: Path) -> None:
    folder = path.parents[2]
    (graph,), (perf,) = read(path), read(path.with_name("perf.yaml"))
    (claim,), (download,) = (
        read(folder / "model-cache" / name) for name in ("model-cache.yaml", "model-download.yaml")
    )
    for one in (perf, claim, download):
        kubernetes_validate.validate(one, "1.34", strict=True)
    volumes = [one["podTemplate"]["spec"]["volumes"] for one in graph["spec"]["components"]]
    assert {one[0]["persistentVolumeClaim"]["claimName"] for one in volumes} == {claim["metadata"]["name"]}
    (job,) = perf["spec"]["template"]["spec"]["containers"]
    values = {one["name"]: one["value"] for one in job["env"]}
    args = [
        word for one in graph["spec"]["components"][1:] for word in one["podTemplate"]["spec"]["containers"][0]["args"]
    ]
    assert values["TARGET_MODEL"] in args
    assert values["ENDPOINT"] == f"{graph['metadata']['name']}-frontend:8000"
    (loader,) = download["spec"]["template"]["spec"]["containers"]
    assert {"name": "MODEL_NAME", "value": values["TARGET_MODEL"]} in loader["env"]
    gpus = sum(
        int(one["podTemplate"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
        * one["replicas"]
        * (one.get("multinode") or {}).get("nodeCount", 1)
        for one in graph["spec"]["components"][1:]
    )
    assert int(values["DEPLOYMENT_GPU_COUNT"]) == gpus
    assert str(gpus) in (folder / "README.md").read_text()


def test_scripts_of_jobs_are_valid_shell() -> None:
    for path in sorted((ROOT / "recipes").rglob("*.yaml")):
        for one in read(path):
            if one["kind"] == "Job":
                (container,) = one["spec"]["template"]["spec"]["containers"]
                assert container["command"] == ["/bin/sh", "-c"]
                done = subprocess.run(
                    ["sh", "-n"], input=container["args"][0], text=True, capture_output=True, check=False
                )
                assert done.returncode == 0, f"{path}: {done.stderr}"
                assert shlex.split(container["args"][0], comments=True)
