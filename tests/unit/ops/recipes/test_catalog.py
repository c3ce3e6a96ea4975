"""Catalog: recipes by their layout, selected by name, path and keywords."""

from pathlib import Path

import pytest

from dynamo.core.errors import ConfigError
from dynamo.ops.recipes.catalog import find_recipes, recipe_at, root_of, select_recipe, selected


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("llama/vllm/agg", "llama/vllm/disagg-multi-node/h200", "qwen/sglang/disagg-b200", "qwen/notes"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "deploy.yaml").touch()
    (tmp_path / "llama/vllm/agg/perf.yaml").touch()
    (tmp_path / "llama/model-cache").mkdir()
    return tmp_path


def test_layout_names_model_framework_mode_and_gpu(root: Path) -> None:
    found = find_recipes(root)
    assert [(one.name, one.hardware) for one in found] == [
        ("llama/vllm/agg", ""),
        ("llama/vllm/disagg-multi-node/h200", "h200"),
        ("qwen/sglang/disagg-b200", "b200"),
    ]
    assert found[0].perf_yaml is not None
    assert (found[0].model_cache_dir is not None, found[2].model_cache_dir) == (True, None)


def test_recipes_are_selected_by_their_fields(root: Path) -> None:
    recipes = find_recipes(root)
    assert len(selected(recipes, mode="disagg")) == 2
    assert [one.model for one in selected(recipes, framework="sglang", query="QWEN")] == ["qwen"]
    assert [one.hardware for one in selected(recipes, gpu="H200")] == ["h200"]


def test_target_is_a_name_a_path_or_a_unique_set_of_words(root: Path) -> None:
    recipes = find_recipes(root)
    for target in (
        "llama/vllm/agg",
        str(root / "llama/vllm/agg"),
        str(root / "llama/vllm/agg/deploy.yaml"),
        "llama agg",
    ):
        assert select_recipe(recipes, target).name == "llama/vllm/agg"
    assert select_recipe(recipes, str(root / "qwen")).name == "qwen/sglang/disagg-b200"
    with pytest.raises(ConfigError, match=": 2 recipes match"):
        select_recipe(recipes, str(root / "llama"))
    with pytest.raises(ConfigError, match="llama: 2 recipes match: llama/vllm/agg, llama/vllm/disagg"):
        select_recipe(recipes, "llama")
    with pytest.raises(ConfigError, match="gpt: no such recipe; known: llama"):
        select_recipe(recipes, "gpt")


def test_recipe_of_a_file_needs_model_framework_and_mode_in_its_path(root: Path) -> None:
    deploy = root / "llama/vllm/agg/deploy.yaml"
    assert [one is not None for one in (recipe_at(root, deploy), recipe_at(root / "llama", deploy))] == [True, False]
    assert recipe_at(root, root / "qwen/notes/deploy.yaml") is None


def test_root_is_given_or_found_above(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert root_of(None, tmp_path / "a" / "b") == tmp_path / "recipes"
    with pytest.raises(ConfigError, match="--root /absent: no such directory"):
        root_of("/absent")
