"""Checks of a recipe: each defect is a row, and a complete recipe has none."""

import copy
import json
from typing import Any

import pytest

from dynamo.core.errors import ConfigError
from dynamo.ops.recipes.catalog import Recipe
from dynamo.ops.recipes.checks import is_pinned, report, rows_of_recipe
from dynamo.ops.recipes.parts import RecipeFiles, SourcedObject, claims_used, gpu_total, served_models
from dynamo.ops.recipes.patch import RecipePatch, counts, pairs, patched, with_tag
from dynamo.ops.report import CheckStatus

CLAIM = {
    "apiVersion": "v1",
    "kind": "PersistentVolumeClaim",
    "metadata": {"name": "model-cache"},
    "spec": {"storageClassName": "fast"},
}
PERF = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {"name": "perf"},
    "spec": {
        "template": {
            "spec": {
                "containers": [
                    {
                        "name": "perf",
                        "image": "python:3.12",
                        "env": [
                            {"name": "TARGET_MODEL", "value": "m"},
                            {"name": "ENDPOINT", "value": "g-frontend:8000"},
                            {"name": "DEPLOYMENT_GPU_COUNT", "value": "4"},
                        ],
                    }
                ]
            }
        }
    },
}


def graph() -> dict[str, Any]:
    worker = {
        "name": "main",
        "image": "r/vllm:1.6.1",
        "command": ["python3", "-m", "dynamo.vllm"],
        "args": ["--model", "m", "--tensor-parallel-size", "2"],
        "resources": {"limits": {"nvidia.com/gpu": "2"}},
        "envFrom": [{"secretRef": {"name": "hf-token-secret"}}],
    }
    volumes = [{"name": "v", "persistentVolumeClaim": {"claimName": "model-cache"}}]
    front = {"name": "main", "image": "r/vllm:1.6.1", "args": ["python3 -m dynamo.frontend --router-mode kv"]}
    return {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": "g"},
        "spec": {
            "components": [
                {"name": "Frontend", "type": "frontend", "podTemplate": {"spec": {"containers": [front]}}},
                {
                    "name": "Worker",
                    "type": "worker",
                    "replicas": 2,
                    "podTemplate": {"spec": {"containers": [worker], "volumes": volumes}},
                },
            ]
        },
    }


def files(deploy: dict[str, Any] | None = None, *, cache: Any = CLAIM, perf: Any = PERF) -> RecipeFiles:
    def sourced(name: str, value: Any) -> tuple[SourcedObject, ...]:
        return () if value is None else (SourcedObject(name, value),)

    return RecipeFiles(
        sourced("cache.yaml", cache), sourced("deploy.yaml", deploy or graph()), sourced("perf.yaml", perf)
    )


def worst(made: RecipeFiles) -> dict[str, CheckStatus]:
    order = list(CheckStatus)
    found: dict[str, CheckStatus] = {}
    for row in rows_of_recipe(made, [], [], is_adapted=False):
        found[row.check] = max(found.get(row.check, row.status), row.status, key=order.index)
    return found


def test_complete_recipe_passes_every_check() -> None:
    assert set(worst(files()).values()) == {CheckStatus.PASS}
    assert gpu_total(files()) == 4
    assert served_models(files()) == {"m"}
    assert claims_used(graph()) == {"model-cache"}


def changed(path: tuple[Any, ...], value: Any, base: Any = None) -> dict[str, Any]:
    made: Any = copy.deepcopy(base or graph())
    at = made
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return dict(made)


WORKER = ("spec", "components", 1, "podTemplate", "spec", "containers", 0)
PERF_ENV = ("spec", "template", "spec", "containers", 0, "env")


@pytest.mark.parametrize(
    ("made", "check", "status"),
    [
        (files(changed((*WORKER, "args", 3), "4")), "gpus", CheckStatus.FAIL),
        (files(changed((*WORKER, "args", 3), "1")), "gpus", CheckStatus.WARN),
        (files(changed((*WORKER, "args", 3), "$TP")), "gpus", CheckStatus.SKIP),
        (files(changed((*WORKER, "image"), "<registry>/vllm:1")), "placeholders", CheckStatus.FAIL),
        (files(changed((*WORKER, "args", 1), "your-model")), "placeholders", CheckStatus.WARN),
        (files(changed((*WORKER, "image"), "vllm:latest")), "images", CheckStatus.WARN),
        (files(cache=None), "claims", CheckStatus.WARN),
        (files(cache=changed(("spec",), {}, CLAIM)), "claims", CheckStatus.WARN),
        (files(cache=changed(("spec", "storageClassName"), "your-class", CLAIM)), "placeholders", CheckStatus.WARN),
        (files(perf=changed((*PERF_ENV, 1, "value"), "other:8000", PERF)), "benchmark", CheckStatus.FAIL),
        (files(perf=changed((*PERF_ENV, 0, "value"), "n", PERF)), "benchmark", CheckStatus.WARN),
        (files(perf=changed((*PERF_ENV, 2, "value"), "8", PERF)), "benchmark", CheckStatus.WARN),
        (files(perf=None), "benchmark", CheckStatus.SKIP),
        (files({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}}), "schema", CheckStatus.FAIL),
    ],
)
def test_each_defect_is_a_row(made: RecipeFiles, check: str, status: CheckStatus) -> None:
    assert worst(made)[check] is status


def test_storage_class_that_is_not_chosen_is_a_blocker_of_an_adapted_recipe() -> None:
    made = files(cache=changed(("spec", "storageClassName"), "your-class", CLAIM))
    (row,) = [one for one in rows_of_recipe(made, [], [], is_adapted=True) if one.check == "placeholders"]
    assert (row.status, row.remedy) == (CheckStatus.FAIL, "give --storage-class CLASS")


def test_problems_of_the_schema_are_blockers() -> None:
    rows = rows_of_recipe(files(), ["spec.x: unknown"], ["old"], is_adapted=False)
    assert [row.status for row in rows[:2]] == [CheckStatus.FAIL, CheckStatus.WARN]


def test_report_has_the_fields_of_the_tool() -> None:
    recipe = Recipe(
        model="m",
        framework="vllm",
        mode="agg",
        hardware="",
        path="p",
        deploy_yaml="d",
        perf_yaml=None,
        model_cache_dir=None,
    )
    found = json.loads(report(recipe, files(), rows_of_recipe(files(), ["bad"], [], is_adapted=False)))
    assert found["deployment_names"] == ["g"]
    assert found["gpu_count_hint"] == 4
    assert found["interesting_lines"] == {
        "storageClassName": ["fast"],
        "images": ["python:3.12", "r/vllm:1.6.1"],
        "hf_secret": ["hf-token-secret"],
        "router": ["--router-mode kv"],
    }
    assert found["blockers"] == ["schema: bad"]


def test_pinned_images_have_a_tag_or_a_digest() -> None:
    assert [is_pinned(one) for one in ("a:1", "h:5000/a", "a:latest", "a", "a@sha256:00", "h:5000/a:2")] == [
        True, False, False, False, True, True,
    ]  # fmt: skip


def test_patch_changes_copies_only() -> None:
    before = files()
    after = patched(
        before,
        RecipePatch(namespace="n", storage_class="s", tag="2", images={"Frontend": "f:1"}, replicas={"Worker": 5}),
    )
    spec = after.deploy[0].value["spec"]["components"]
    assert [one["podTemplate"]["spec"]["containers"][0]["image"] for one in spec] == ["f:1", "r/vllm:2"]
    assert spec[1]["replicas"] == 5
    assert after.cache[0].value["spec"]["storageClassName"] == "s"
    assert {one.value["metadata"]["namespace"] for one in after.all} == {"n"}
    assert before == files()


def test_patch_of_an_unknown_component_and_wrong_pairs_are_refused() -> None:
    with pytest.raises(ConfigError, match="Nope: no such component; the graph has Frontend, Worker"):
        patched(files(), RecipePatch(replicas={"Nope": 1}))
    with pytest.raises(ConfigError, match="--replicas x: expected COMPONENT=NUMBER"):
        counts("--replicas", ["Worker=x"])
    with pytest.raises(ConfigError, match="--image '=x': expected COMPONENT=VALUE"):
        pairs("--image", ["=x"])
    assert with_tag("h:5000/a/b:1@sha256:0", "2") == "h:5000/a/b:2"
